// One call for the requests of a batch, and its answer: ratelimit_acquire_packed. Its arrays are explained at the type ratelimit.packed.

import { decision } from './decision.js'
import { translate } from './errors.js'

const plainColumns = 'elements, remaining, retry_after_us, reset_after_us, capacity, replayed, shadowed, ' +
  'refused, error_codes, error_messages, error_details, error_hints'
const jointColumns = `${plainColumns}, requests, requests_allowed, requests_replayed, requests_shadowed, bindings`

/** The statement for requests that may share a call: all keyed or none, all joint or none. */
export function pack(batch) {
  const [{ joint, keyed }] = batch
  const charges = batch.flatMap((request) => request.charges)
  return {
    columns: joint ? jointColumns : plainColumns,
    call: 'ratelimit_acquire_packed($1::text[], $2::text[], $3::bigint[], $4::bigint[]::integer[], $5::text[])',
    values: [
      charges.map((c) => c.policy),
      charges.map((c) => c.key),
      charges.map((c) => c.cost),
      joint ? batch.map((request) => String(request.elements)) : null,
      keyed ? batch.map((request) => request.idempotencyKey) : null,
    ],
    once: keyed,
  }
}

/** The answer of each request, a decision or an error, in the order of the batch. */
export function unpack(batch, row) {
  const elements = batch.reduce((sum, request) => sum + request.elements, 0)
  const decisions = new Array(elements)
  each(row, ['elements', 'remaining', 'retry_after_us', 'reset_after_us', 'capacity'],
    (number, i, [, remaining, retry_after, reset_after, capacity]) => {
      const [replayed, shadowed] = [isSet(row.replayed, i), isSet(row.shadowed, i)]
      const allowed = retry_after !== null && Number(retry_after) === 0
      decisions[number] = decision({ allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed })
    })

  let answers = decisions
  if (batch[0].joint) {
    let end = 0
    const own = batch.map((request) => decisions.slice(end, end += request.elements))
    answers = new Array(batch.length)
    each(row, ['requests', 'requests_allowed', 'bindings'], (number, i, [, allowed, binding]) => {
      binding = Number(binding) - 1
      if (!own[number]?.[binding]) throw misfit()
      const [replayed, shadowed] = [isSet(row.requests_replayed, i), isSet(row.requests_shadowed, i)]
      answers[number] = { ...own[number][binding], allowed, replayed, shadowed, binding, decisions: own[number] }
    })
  }
  each(row, ['refused', 'error_codes', 'error_messages', 'error_details', 'error_hints'],
    (number, _, [, code, message, detail, hint]) => {
      answers[number] = translate(Object.assign(new Error(message), { code, detail, hint, severity: 'ERROR' }))
    })
  if (answers.length !== batch.length || answers.includes(undefined)) throw misfit()
  return answers
}

/** Calls use(number, index, values) for each element of parallel arrays, the first of which has numbers that count from 1. */
function each(row, names, use) {
  const arrays = names.map((name) => row[name] ?? [])
  if (arrays.some((array) => array.length !== arrays[0].length)) throw misfit()
  arrays[0].forEach((number, i) => use(Number(number) - 1, i, arrays.map((array) => array[i])))
}

const misfit = () => new Error('an answer whose arrays do not fit the requests')

/** An array of flags is empty if none is set. */
const isSet = (flags, i) => flags?.length > 0 && flags[i]

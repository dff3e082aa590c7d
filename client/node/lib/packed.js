// One call for the requests of a batch, and its answer: ratelimit_acquire_packed. Its arrays are explained at the type ratelimit.packed.

import { decision } from './decision.js'
import { translate } from './errors.js'

// The numbers are texts such as '1,2,-', which take less time to read than arrays, in any driver.
const numbers = (...names) => names.map((name) => `pg_catalog.array_to_string(${name}, ',', '-') as ${name}`).join(', ')
const split = (numbers) => numbers ? numbers.split(',') : []
const orNull = (number) => number === '-' ? null : number

const plainColumns = numbers('elements', 'remaining', 'retry_after_us', 'reset_after_us', 'capacity') +
  ', replayed, shadowed, refused, error_codes, error_messages, error_details, error_hints'
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
  const [places, remaining, retryAfter, resetAfter, capacity] =
    parallel([row.elements, row.remaining, row.retry_after_us, row.reset_after_us, row.capacity].map(split))
  for (let i = 0; i < places.length; i++) {
    decisions[places[i] - 1] = decision({
      allowed: retryAfter[i] === '0',
      remaining: remaining[i],
      retry_after: orNull(retryAfter[i]),
      reset_after: orNull(resetAfter[i]),
      capacity: capacity[i],
      replayed: isSet(row.replayed, i),
      shadowed: isSet(row.shadowed, i),
    })
  }

  let answers = decisions
  if (batch[0].joint) {
    let end = 0
    const own = batch.map((request) => decisions.slice(end, end += request.elements))
    answers = new Array(batch.length)
    const [requests, allowed, bindings] = parallel([row.requests, row.requests_allowed, row.bindings])
    for (let i = 0; i < requests.length; i++) {
      const number = requests[i] - 1, binding = Number(bindings[i]) - 1
      if (!own[number]?.[binding]) throw misfit()
      const [replayed, shadowed] = [isSet(row.requests_replayed, i), isSet(row.requests_shadowed, i)]
      answers[number] = { ...own[number][binding], allowed: allowed[i], replayed, shadowed, binding, decisions: own[number] }
    }
  }
  const [refused, codes, messages, details, hints] = parallel([row.refused, row.error_codes, row.error_messages, row.error_details, row.error_hints])
  for (let i = 0; i < refused.length; i++) {
    answers[refused[i] - 1] = translate(Object.assign(new Error(messages[i]), { code: codes[i], detail: details[i], hint: hints[i], severity: 'ERROR' }))
  }
  if (answers.length !== batch.length || answers.includes(undefined)) throw misfit()
  return answers
}

/** Arrays of the same length, the first of which has numbers that count from 1. They are empty where the row has none. */
function parallel(arrays) {
  arrays = arrays.map((array) => array ?? [])
  if (arrays.some((array) => array.length !== arrays[0].length)) throw misfit()
  return arrays.map((array, i) => i === 0 ? array.map(Number) : array)
}

const misfit = () => new Error('an answer whose arrays do not fit the requests')

/** An array of flags is empty if none is set. */
const isSet = (flags, i) => flags?.length > 0 && flags[i]

// One call for the requests of a batch, and its answer: ratelimit_acquire_packed. Its arrays are explained at the type ratelimit.packed.

import { decision, misfit, text } from './decision.js'
import { refusal } from './errors.js'

/** The arrays: of the decisions, of the errors, and of what joint requests have in common. */
export const PARTS = [
  ['elements', 'remaining', 'retry_after_us', 'reset_after_us', 'capacity', 'replayed', 'shadowed'],
  ['refused', 'error_codes', 'error_messages', 'error_details', 'error_hints'],
  ['requests', 'bindings', 'requests_allowed', 'requests_replayed', 'requests_shadowed'],
]
// JSON takes less time to read than arrays, in any driver.
const columns = `pg_catalog.json_build_array(${PARTS.map((names) => `pg_catalog.json_build_array(${names})`)})::text as parts`

/** The statement for requests that may share a call: all keyed or none, all joint or none. */
export function pack(batch) {
  const [{ joint, keyed }] = batch
  const charges = batch.flatMap((request) => request.charges)
  return {
    columns,
    call: 'ratelimit_acquire_packed($1::text[], $2::text[], $3::bigint[], $4::bigint[]::integer[], $5::text[])',
    values: [
      charges.map((c) => c.policy),
      charges.map((c) => c.key),
      charges.map((c) => c.cost),
      joint ? batch.map((request) => String(request.elements)) : null,
      keyed ? batch.map((request) => request.idempotencyKey) : null,
    ],
    once: keyed,
    decode(row) {
      const [decided, refused, wholes] = JSON.parse(text(row, 'parts'))
      return unpack(batch, rows(decided, 2), rows(refused, 0), rows(wholes, 2))
    },
  }
}

/** The answer of each request, a decision or an error, in the order of the batch. */
function unpack(batch, decided, refused, wholes) {
  const decisions = []
  for (const [element, remaining, retry_after, reset_after, capacity, replayed = false, shadowed = false] of decided) {
    decisions[element - 1] = decision({ allowed: retry_after === 0, remaining, retry_after, reset_after, capacity, replayed, shadowed })
  }
  let answers = decisions
  if (batch[0].joint) {
    let end = 0
    const own = batch.map((request) => decisions.slice(end, end += request.elements))
    answers = []
    for (const [number, binding, allowed, replayed = false, shadowed = false] of wholes) {
      const of = own[number - 1]
      if (!of?.[binding - 1]) throw misfit()
      answers[number - 1] = { ...of[binding - 1], allowed, replayed, shadowed, binding: binding - 1, decisions: of }
    }
  }
  for (const [number, ...error] of refused) answers[number - 1] = refusal(...error)
  if (answers.length !== batch.length || answers.includes(undefined)) throw misfit()
  return answers
}

/** Parallel arrays as rows. Those of flags, which come last, are absent or empty if none is set. */
function rows(arrays, flags) {
  const length = arrays[0]?.length ?? 0
  const isRight = (array, i) => (array?.length ?? 0) === length || (i >= arrays.length - flags && !array?.length)
  if (!arrays.every(isRight)) throw misfit()
  return Array.from({ length }, (_, i) => arrays.map((array) => array?.[i]))
}

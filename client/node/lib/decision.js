// Rows of the server, as the answers that callers get. Drivers return a bigint as a string, a number or a BigInt.

import { refusal } from './errors.js'

export const microseconds = (column) => `(extract(epoch from ${column}) * 1000000.0)::bigint`

/**
 * Microseconds as seconds; null, which is never, stays null. Where a double cannot hold the quotient it is rounded up, so that
 * `seconds * 1e6` is never less than the wait.
 */
export function seconds(us) {
  if (us == null) return null
  const s = Number(us) / 1e6
  return s * 1e6 < Number(us) || s > 1e9 ? s * (1 + Number.EPSILON) : s
}

// A kind of row has the columns to select, and decode, which makes them an answer.

const columns = (wait) =>
  `allowed, remaining, ${microseconds(wait)} as ${wait}, ${microseconds('reset_after')} as reset_after, capacity, replayed, shadowed`

export const decision = (row) => ({
  allowed: row.allowed,
  remaining: Number(row.remaining),
  retryAfter: seconds(row.retry_after),
  resetAfter: seconds(row.reset_after),
  capacity: Number(row.capacity),
  replayed: row.replayed,
  shadowed: row.shadowed,
})

export const DECISION = { columns: columns('retry_after'), decode: decision }

export const RESERVATION = {
  columns: columns('wait'),
  decode({ wait, ...row }) {
    const { retryAfter, ...rest } = decision({ ...row, retry_after: wait })
    return { ...rest, wait: retryAfter }
  },
}

export const PARTIAL = {
  columns: `${DECISION.columns}, taken`,
  decode: (row) => ({ ...decision(row), taken: Number(row.taken) }),
}

// The decisions are JSON, since drivers differ in how they return an array of a composite type.
export const JOINT = {
  columns: `${DECISION.columns}, binding, pg_catalog.to_json(array(
    select array[d.allowed::integer, d.remaining, ${microseconds('d.retry_after')}, ${microseconds('d.reset_after')},
                 d.capacity, d.replayed::integer, d.shadowed::integer]
      from pg_catalog.unnest(decisions) with ordinality as d
     order by d.ordinality))::text as decisions`,
  decode(row) {
    const decisions = JSON.parse(row.decisions).map(([allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed]) =>
      decision({ allowed: allowed === 1, remaining, retry_after, reset_after, capacity, replayed: replayed === 1, shadowed: shadowed === 1 }))
    return { ...decision(row), binding: Number(row.binding) - 1, decisions }
  },
}

/** The answers to many requests, decisions and errors, in one row. */
const manyOf = (more, decode) => ({
  columns: `pg_catalog.json_agg(pg_catalog.json_build_array(
    error_code, error_message, error_detail, error_hint,
    allowed, remaining, ${microseconds('retry_after')}, ${microseconds('reset_after')}, capacity, replayed, shadowed${more})
    order by request)::text as answers`,
  decode: (row) => JSON.parse(row.answers).map(
    ([code, message, detail, hint, allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed, taken]) => code === null
      ? decode({ allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed, taken })
      : refusal(code, message, detail, hint)),
})

export const MANY = manyOf('', decision)
export const MANY_PARTIAL = manyOf(', taken', PARTIAL.decode)

export const HOLD = {
  columns: `allowed, remaining, ${microseconds('retry_after')} as retry_after, ${microseconds('held_for')} as held_for, capacity, renewed, shadowed`,
  decode: (row) => ({
    allowed: row.allowed,
    remaining: Number(row.remaining),
    retryAfter: seconds(row.retry_after),
    heldFor: seconds(row.held_for),
    capacity: Number(row.capacity),
    renewed: row.renewed,
    shadowed: row.shadowed,
  }),
}

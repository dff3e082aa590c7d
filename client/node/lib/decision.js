// Rows of the server, as the answers that callers get. Drivers return a bigint as a string, a number or a BigInt.

export const microseconds = (column) => `(extract(epoch from ${column}) * 1000000.0)::bigint`

/** Microseconds as seconds, rounded up where a double cannot hold the quotient: `seconds * 1e6` is never less. null is never. */
export function seconds(us) {
  if (us === null) return null
  const s = Number(us) / 1e6
  return s * 1e6 < Number(us) || s > 1e9 ? s * (1 + Number.EPSILON) : s
}

// Every column is read by one of these four: a handle may rename columns, drop them, or return all as text, where 'f' would be true.

export const flag = (row, name) => typeof row[name] === 'boolean' ? row[name] : misread(row, name)

export const text = (row, name) => typeof row[name] === 'string' ? row[name] : misread(row, name)

export function integer(row, name) {
  const value = row[name], n = Number(value)
  return /^(number|bigint|string)$/.test(typeof value) && value !== '' && Number.isInteger(n) ? n : misread(row, name)
}

export const wait = (row, name) => row[name] === null ? null : integer(row, name)

function misread(row, name) {
  const found = name in row ? `the column ${name} is ${row[name] === null ? 'null' : `of type ${typeof row[name]}`}`
    : `the row has no column ${name}, but ${Object.keys(row).join(', ')}`
  throw new TypeError(`pgratelimit: ${found}: pass a handle that neither renames, drops nor converts columns, such as postgres.js without transform`)
}

export const misfit = () => new Error('an answer whose arrays do not fit the requests')

// A kind of row has the columns to select, and decode, which makes them an answer.

const columns = (wait) =>
  `allowed, remaining, ${microseconds(wait)} as ${wait}, ${microseconds('reset_after')} as reset_after, capacity, replayed, shadowed`

export const decision = (row) => ({
  allowed: flag(row, 'allowed'),
  remaining: integer(row, 'remaining'),
  retryAfter: seconds(wait(row, 'retry_after')),
  resetAfter: seconds(wait(row, 'reset_after')),
  capacity: integer(row, 'capacity'),
  replayed: flag(row, 'replayed'),
  shadowed: flag(row, 'shadowed'),
})

export const DECISION = { columns: columns('retry_after'), decode: decision }

export const RESERVATION = {
  columns: columns('wait'),
  decode(row) {
    const { retryAfter, ...rest } = decision({ ...row, retry_after: wait(row, 'wait') })
    return { ...rest, wait: retryAfter }
  },
}

export const PARTIAL = {
  columns: `${DECISION.columns}, taken`,
  decode: (row) => ({ ...decision(row), taken: integer(row, 'taken') }),
}

// The decisions are JSON, since drivers differ in how they return an array of a composite type.
const DECISIONS = `pg_catalog.to_json(array(
    select array[d.allowed::integer, d.remaining, ${microseconds('d.retry_after')}, ${microseconds('d.reset_after')},
                 d.capacity, d.replayed::integer, d.shadowed::integer]
      from pg_catalog.unnest(decisions) with ordinality as d
     order by d.ordinality))::text as decisions`

const decisions = (row) => JSON.parse(text(row, 'decisions')).map(([allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed]) =>
  decision({ allowed: allowed === 1, remaining, retry_after, reset_after, capacity, replayed: replayed === 1, shadowed: shadowed === 1 }))

export const JOINT = {
  columns: `${DECISION.columns}, binding, ${DECISIONS}`,
  decode: (row) => ({ ...decision(row), binding: integer(row, 'binding') - 1, decisions: decisions(row) }),
}

export const SETTLEMENT = {
  columns: `replayed, ${DECISIONS}`,
  decode: (row) => ({ replayed: flag(row, 'replayed'), decisions: decisions(row) }),
}

export const HOLD = {
  columns: `allowed, remaining, ${microseconds('retry_after')} as retry_after, ${microseconds('held_for')} as held_for, capacity, renewed, shadowed`,
  decode: (row) => ({
    allowed: flag(row, 'allowed'),
    remaining: integer(row, 'remaining'),
    retryAfter: seconds(wait(row, 'retry_after')),
    heldFor: seconds(integer(row, 'held_for')),
    capacity: integer(row, 'capacity'),
    renewed: flag(row, 'renewed'),
    shadowed: flag(row, 'shadowed'),
  }),
}

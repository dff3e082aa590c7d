// Rows of the server, as the answers that callers get. Drivers return a bigint as a string, a number or a BigInt.

export const microseconds = (column) => `(extract(epoch from ${column}) * 1000000.0)::bigint`

const columns = (wait) =>
  `allowed, remaining, ${microseconds(wait)} as ${wait}, ${microseconds('reset_after')} as reset_after, capacity, replayed, shadowed`

export const decisionColumns = columns('retry_after')
export const reservationColumns = columns('wait')
export const holdColumns =
  `allowed, remaining, ${microseconds('retry_after')} as retry_after, ${microseconds('held_for')} as held_for, capacity, renewed, shadowed`
export const partialColumns = `${decisionColumns}, taken`

// The decisions are one array of numbers, since drivers differ in how they return an array of a composite type.
export const jointColumns = `${decisionColumns}, binding, array(
  select n from pg_catalog.unnest(decisions) with ordinality as d,
    lateral pg_catalog.unnest(array[d.allowed::integer, d.remaining, ${microseconds('d.retry_after')}, ${microseconds('d.reset_after')},
      d.capacity, d.replayed::integer, d.shadowed::integer]) with ordinality as f (n, field)
   order by d.ordinality, field) as decisions`

/**
 * Microseconds as seconds; null, which is never, stays null. Where a double cannot hold the quotient it is rounded up, so that
 * `seconds * 1e6` is never less than the wait.
 */
export function seconds(us) {
  if (us == null) return null
  const s = Number(us) / 1e6
  return s * 1e6 < Number(us) || s > 1e9 ? s * (1 + Number.EPSILON) : s
}

export function decision(row) {
  return {
    allowed: row.allowed,
    remaining: Number(row.remaining),
    retryAfter: seconds(row.retry_after),
    resetAfter: seconds(row.reset_after),
    capacity: Number(row.capacity),
    replayed: row.replayed,
    shadowed: row.shadowed,
  }
}

export function reservation({ wait, ...row }) {
  const { retryAfter, ...rest } = decision({ ...row, retry_after: wait })
  return { ...rest, wait: retryAfter }
}

export const decodeHold = (row) => ({
  allowed: row.allowed,
  remaining: Number(row.remaining),
  retryAfter: seconds(row.retry_after),
  heldFor: seconds(row.held_for),
  capacity: Number(row.capacity),
  renewed: row.renewed,
  shadowed: row.shadowed,
})

export const partial = (row) => ({ ...decision(row), taken: Number(row.taken) })

export function joint(row) {
  const decisions = []
  for (let i = 0; i < row.decisions.length; i += 7) {
    const [allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed] = row.decisions.slice(i, i + 7)
    decisions.push(decision({
      allowed: Number(allowed) === 1, remaining, retry_after, reset_after, capacity, replayed: Number(replayed) === 1, shadowed: Number(shadowed) === 1,
    }))
  }
  return { ...decision(row), binding: Number(row.binding) - 1, decisions }
}

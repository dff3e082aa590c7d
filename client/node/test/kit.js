// What tests share. The database is that of libpq's variables (PGHOST and so on), with pgratelimit installed, and no other test in it.
import { readFileSync } from 'node:fs'
import pg from 'pg'
import { PARTS } from '../lib/combiner.js'

export const pool = connect()

/** A pool whose connections keep no test file from ending while they are idle. One that is not given back does, as does a timer. */
export function connect(options) {
  const pool = new pg.Pool({ allowExitOnIdle: true, ...options })
  pool.on('error', () => {}) // tests kill connections
  return pool
}

/** The script for psql, for a database that has no pgratelimit, without psql's own commands. */
export const installation = () => {
  const read = (file) => readFileSync(new URL(file, new URL('../../../migrations/psql/', import.meta.url)), 'utf8')
  const script = read('install.sql').replace(/\s\\gset$/gm, ';').replace(/^\\(?!ir ).*$/gm, '')
  return script.replace(/^\\ir (.*)$/gm, (_, file) => read(file))
}

/** What the clients of all languages answer alike. */
export const vectors = (name) => JSON.parse(readFileSync(new URL(`../../../tests/vectors/${name}.json`, import.meta.url)))

let policies = 0

/** Defines a policy that is new, by further arguments of the function, and returns its name. */
async function define(args, ...values) {
  const name = `p${process.pid}-${++policies}`
  await pool.query(`select ratelimit_define_policy($1, ${args})`, [name, ...values])
  return name
}

export const definePolicy = (capacity = 1000, refill = 1, every = '100 days', stepped = false) =>
  define('$2, $3, $4::interval, stepped => $5', capacity, refill, every, stepped)

/** Defines a quota of a month whose next turn is after so long. */
export const defineQuota = (capacity, turnIn) =>
  define("$2, period => '1 month', anchor => (clock_timestamp() + $3::interval) at time zone 'UTC'", capacity, turnIn)

export const defineSlots = (capacity = 3, lease = '1 hour', shadow = false) =>
  define('$2, lease => $3::interval, shadow => $4', capacity, lease, shadow)

/** The holders of a policy. */
export const holders = async (policy) =>
  (await pool.query('select holder from ratelimit_holders($1)', [policy])).rows.map(({ holder }) => holder)

export async function left(policy, key) {
  const { rows: [{ remaining }] } = await pool.query('select remaining::integer from ratelimit_peek($1, $2)', [policy, key])
  return remaining
}

/** Runs use while another transaction has locked the bucket of a key. */
export async function withLocked(policy, key, use) {
  const acquire = ['select ratelimit_acquire($1, $2)', [policy, key]]
  await pool.query(...acquire) // so that there is a row
  return whileOpen(...acquire, use)
}

/** Runs use while another transaction has made a call, which is rolled back. */
export async function whileOpen(sql, values, use) {
  const holder = await pool.connect()
  try {
    await holder.query('begin')
    await holder.query(sql, values)
    return await use(async () => { await holder.query('rollback') })
  } finally {
    await holder.query('rollback')
    holder.release()
  }
}

/** Runs use with a pool of a role that may do nothing. */
export async function asNobody(use) {
  const { rows: [{ name }] } = await pool.query("select 'nobody_' || md5(current_database()) as name")
  await pool.query(`create role "${name}"`)
  const own = connect({ options: `-c role=${name}` })
  try {
    await use(own, name)
  } finally {
    await own.end()
    await pool.query(`drop owned by "${name}"; drop role "${name}"`)
  }
}

/** Runs use while a server listens on a port, or a path. */
export async function listening(server, use, path) {
  await new Promise((resolve) => path ? server.listen(path, resolve) : server.listen(0, '127.0.0.1', resolve))
  try {
    return await use(server.address().port)
  } finally {
    server.closeAllConnections?.()
    await new Promise((resolve) => server.close(resolve))
  }
}

/** Asks until the answer is what is looked for, and returns that. */
export async function eventually(ask) {
  const deadline = performance.now() + 60_000
  while (performance.now() < deadline) {
    const found = await ask()
    if (found) return found
    await turn()
  }
  throw new Error(`not in a minute: ${ask}`)
}

/** The process ids of the sessions that wait for a lock in a call of a function. */
export async function stuck(call) {
  const { rows } = await pool.query(`select pid from pg_stat_activity
    where datname = current_database() and wait_event_type = 'Lock' and strpos(query, $1) > 0 order by pid`, [`${call}(`])
  return rows.map((row) => row.pid)
}

/** The rest of the loop's turn, after which every call that can be made is made. */
export const turn = () => new Promise(setImmediate)

/** The row of a shared call, as the server gives it. */
const packed = (arrays) => ({ parts: JSON.stringify(PARTS.map((names) => names.map((name) => arrays[name]))) })

/** A database that answers when the test says so. What remains of a bucket is the number at the end of its key. */
export class Gate {
  calls = [] // that were made
  open = 0 // of these

  query(text, values) {
    return new Promise((resolve, reject) => {
      const many = text.includes('acquire_packed'), all = text.includes('acquire_all')
      const keys = many || all ? values[1] : [values[1]]
      const end = (by) => (outcome) => {
        this.open--
        call.isOpen = false
        by(outcome)
        return turn().then(turn)
      }
      const remaining = keys.map((key) => Number(/\d*$/.exec(key)[0]))
      const numbers = keys.map((_, i) => i + 1), zeros = keys.map(() => 0)
      const requests = values[3]?.map?.((_, i) => i + 1)
      const row = many
        ? {
            elements: numbers, remaining, retry_after_us: zeros, reset_after_us: zeros, capacity: zeros, shadowed: [],
            requests, requests_allowed: requests?.map(() => true), bindings: requests?.map(() => 1),
          }
        : {
            allowed: true, remaining: remaining[0] ?? 0, retry_after: '0', wait: '0', reset_after: '0', capacity: '9', replayed: false, shadowed: false,
            binding: 1, decisions: JSON.stringify(remaining.map((n) => [1, n, 0, 0, 9, 0, 0])),
          }
      const grant = (change) => end(resolve)({ rows: [many ? packed({ ...row, ...change }) : { ...row, ...change }] })
      const call = { text, values, keys, isOpen: true, grant, fail: end(reject) }
      this.open++
      this.calls.push(call)
    })
  }

  /** Grants the calls that are open, and those that follow. */
  async grantAll() {
    for (const call of this.calls) if (call.isOpen) await call.grant()
  }
}

// The drivers, which send and return the same values in ways of their own.
import assert from 'node:assert/strict'
import { getEventListeners } from 'node:events'
import test, { after } from 'node:test'
import { PGlite } from '@electric-sql/pglite'
import postgres from 'postgres'
import { Combiner, InvalidArgument, Limiter, UnknownPolicy } from '../index.js'
import { limitedFetch } from '../outgoing.js'
import { definePolicy, defineSlots, eventually, holders, installation, left, pool } from './kit.js'

const sql = postgres({ max: 3 })
const rowsOf = (sql) => ({ query: async (text, values) => ({ rows: await sql.unsafe(text, values) }) })
const drivers = { pg: pool, 'postgres.js': rowsOf(sql) }
const camel = postgres({ max: 3, transform: postgres.camel })
after(() => Promise.all([sql.end(), camel.end()]))

for (const [driver, db] of Object.entries(drivers)) {
  test(`${driver}: odd text arrives as it is, and numbers come back`, async () => {
    const odd = 'o\'clock "{NULL}", 100 % of $1 %s \\ é🪣\n', name = `${await definePolicy()} % ${odd}`, combiner = new Combiner(db)
    await pool.query("select ratelimit_define_policy($1, 10, 1, '1 day')", [name])
    const ask = (key, cost) => combiner.acquire(name, key, { cost, idempotencyKey: `${odd}${cost}` })
    assert.deepEqual((await Promise.all([ask(odd, 1), ask('NULL', 1), ask(odd, 2), ask(odd, 2)])).map((d) => [d.remaining, d.replayed]),
      [[9, false], [9, false], [7, false], [7, true]])
    const joint = (key) => combiner.acquireAll([{ policy: name, key }, { policy: name, key: 'é', cost: 11 }])
    assert.deepEqual((await Promise.all([joint(odd), joint('')].map((p) => p.catch((e) => e)))).map((d) => d.binding ?? d.constructor), [1, InvalidArgument])
    const { binding, decisions, retryAfter } = await joint(odd)
    assert.deepEqual([binding, retryAfter, decisions.map((d) => d.remaining)], [1, null, [7, 10]])
    assert.equal((await combiner.acquire(name, odd, { cost: 99 })).retryAfter, null)
    assert.equal((await combiner.peek(name, odd)).remaining, 7)
    assert.equal((await combiner.acquireUpTo(name, odd, 3, { atLeast: 2 })).taken, 3)
    assert.equal((await combiner.reserve(name, odd, 400_000_000.001, { cost: 8 })).remaining, -4)
    await assert.rejects(combiner.acquire('none', odd), UnknownPolicy)
    await combiner.close()
  })
}

// Each method of a Limiter, once. `once` is an idempotency key that was granted.
const calls = {
  acquire: (limiter, { policy }, options) => limiter.acquire(policy, 'k', options),
  acquireAll: (limiter, { policy }, options) => limiter.acquireAll([{ policy, key: 'k' }, { policy, key: 'other' }], options),
  acquireUpTo: (limiter, { policy }, options) => limiter.acquireUpTo(policy, 'k', 2, options),
  peek: (limiter, { policy }, options) => limiter.peek(policy, 'k', options),
  charge: (limiter, { policy }, options) => limiter.charge(policy, 'k', 1, options),
  settle: (limiter, { policy }, options) => limiter.settle(policy, 'k', 'once', 1, options),
  settleAll: (limiter, { policy }, options) => limiter.settleAll([{ policy, key: 'k', cost: 1 }], 'once', options),
  refund: (limiter, { policy }, options) => limiter.refund(policy, 'k', 1, options),
  reserve: (limiter, { policy }, options) => limiter.reserve(policy, 'k', 0, options),
  wait: (limiter, { policy }, options) => limiter.wait(policy, 'k', options),
  pause: (limiter, { policy }, options) => limiter.pause(policy, 'paused', 1, options),
  hold: (limiter, { slots }, options) => limiter.hold(slots, 'k', options),
  holdWait: (limiter, { slots }, options) => limiter.holdWait(slots, 'k', options),
  renew: (limiter, { slots }, options) => limiter.renew(slots, 'k', 'mine', options),
  release: (limiter, { slots }, options) => limiter.release(slots, 'k', 'mine', options),
  check: (limiter, { policy }, options) => limiter.check({ policies: [policy], ...options }),
}
const share = async (limiter, { policy }) => (await Promise.all([limiter.acquire(policy, 'a'), limiter.acquire(policy, 'b')]))[0]

test('a row that is not as its statement is an error with the column, and nothing is held', async () => {
  assert.deepEqual(Object.keys(calls).sort(), Object.getOwnPropertyNames(Limiter.prototype).filter((name) => !/^_|^constructor$/.test(name)).sort(),
    'each method is tried')
  const changed = (change) => ({ query: async (...args) => ({ rows: (await pool.query(...args)).rows.map((row) => Object.fromEntries(change(row))) }) })
  const words = ['release', 'settleAll', 'share'] // their columns are words, which are not renamed
  for (const [title, db, rights, error] of [
    ['as it is', pool, [...Object.keys(calls), 'share']],
    ['renamed by postgres.js', rowsOf(camel), words, /the row has no column (retry_after|reset_after|held_for), but .*: pass a handle/],
    ['renamed', changed((row) => Object.entries(row).map(([name, value]) => [name.toUpperCase(), value])), [], /the row has no column [a-z_]+, but [A-Z_]+/],
    ['as text', { query: (text, values) => pool.query({ text, values, types: { getTypeParser: () => String } }) },
      ['renew', 'share'], /the column (allowed|held|replayed) is of type string/],
    ['as arrays', { query: (text, values) => pool.query({ text, values, rowMode: 'array' }) }, [], /the row has no column/],
    ['without a value', changed((row) => Object.entries(row).map(([name]) => [name, undefined])), [], /the column [a-z_]+ is of type undefined/],
    ['all null', changed((row) => Object.entries(row).map(([name]) => [name, null])), ['renew'], /the column [a-z_]+ is null/],
    ['no result', { query: async (...args) => { await pool.query(...args) } }, [], /did not resolve to \{ rows \}/],
    ['rows alone', { query: async (...args) => (await pool.query(...args)).rows }, [], /did not resolve to \{ rows \}/],
    ['no row', { query: async (...args) => { await pool.query(...args); return { rows: [] } } }, [], /did not resolve to \{ rows \}/],
  ]) {
    const limiter = new Limiter(db, { retry: true }), combiner = new Combiner(db, { retry: true })
    for (const [name, call] of [...Object.entries(calls), ['share', share]]) {
      const buckets = { policy: await definePolicy(), slots: await defineSlots() }
      await pool.query("select ratelimit_acquire($1, 'k', 5, 'once'), ratelimit_hold($2, 'other', 'x')", Object.values(buckets))
      const outcome = await call(name === 'share' ? combiner : limiter, buckets).catch((error) => error)
      const about = `${title}: ${name}: ${outcome?.message ?? JSON.stringify(outcome)}`
      assert.equal(!(outcome instanceof Error), rights.includes(name), about)
      if (!rights.includes(name)) assert.ok(outcome instanceof TypeError && error.test(outcome.message), about)
      else await outcome?.release?.()
      if (name.startsWith('hold')) await eventually(async () => (await holders(buckets.slots)).join() === 'x')
    }
    await combiner.close()
  }
})

test('any number of calls may share a signal: it gets one listener, which goes with the last of them', async (t) => {
  const warnings = [], warn = (warning) => warnings.push(warning.message)
  process.on('warning', warn)
  t.after(() => process.off('warning', warn))
  const stop = new AbortController(), options = { signal: stop.signal }, combiner = new Combiner(pool, { callTimeoutMs: Infinity }), kinds = [new Limiter(pool), combiner]
  const listeners = () => getEventListeners(stop.signal, 'abort').length
  const buckets = { policy: await definePolicy(1_000_000, 1, '1 day'), slots: await defineSlots(1000) }
  const asked = kinds.flatMap((limiter) => Object.values(calls).flatMap((call) => Array.from({ length: 40 }, () => call(limiter, buckets, options))))
  assert.equal(listeners(), 1)
  const holds = (await Promise.allSettled(asked)).map(({ value }) => value).filter((value) => value?.holder)
  assert.deepEqual([holds.length, listeners()], [160, 1])
  await Promise.all(holds.slice(1).map((held) => held.release()))

  const empty = { policy: await definePolicy(1, 1, '1 hour') }, last = new Error('shutdown')
  await pool.query("select ratelimit_acquire($1, 'k')", [empty.policy])
  const send = limitedFetch(kinds[0], { charges: () => [{ ...empty, key: 'k' }], fetch: () => assert.fail('sent') })
  const waiting = Array.from({ length: 20 }, () => [kinds[0].wait(empty.policy, 'k', options), send('/', options)]).flat()
  await eventually(async () => await left(empty.policy, 'k') === -20)
  assert.equal(listeners(), 1)
  stop.abort(last)
  assert.equal(holds[0].signal.reason, last)
  for (const gone of await Promise.allSettled(waiting)) assert.equal(gone.reason, last)
  await holds[0].release()
  await combiner.close()
  await eventually(() => listeners() === 0)
  assert.deepEqual(warnings, [])
})

test('statements that a pooler does not keep are sent in full: nothing is lost, or taken twice', async () => {
  for (const code of ['26000', '42P05']) {
    let named = 0
    const policy = await definePolicy(), limiter = new Limiter({
      totalCount: 0, options: pool.options, connect: pool.connect,
      async query(query, values) {
        if (query.name) named++
        await pool.query('select')
        if (query.name) throw Object.assign(new Error('prepared statement'), { code, severity: 'ERROR' })
        return pool.query(query, values)
      },
    })
    const acquire = () => limiter.acquire(policy, 'k')
    await Promise.all(Array.from({ length: 20 }, acquire))
    await acquire()
    assert.deepEqual([named, await left(policy, 'k')], [20, 1000 - 21])
  }
})

test('a missing grant or installation has the remedy as its hint', async () => {
  const connection = await pool.connect()
  const hint = (options) => new Limiter(connection, options).reserve('p', 'k', 1000).catch((error) => error.hint)
  try {
    await connection.query('begin; create role stranger; set local role stranger')
    assert.equal(await hint(), 'Its owner can run: grant execute on function ratelimit_reserve(text, text, interval, bigint, text) to <role>;')
    await connection.query('rollback; begin')
    assert.match(await hint({ schema: 'pg_catalog' }), /^Install pgratelimit in this database/)
  } finally {
    await connection.query('rollback')
    connection.release()
  }
})

test('PGlite answers like a server', async () => {
  const db = await PGlite.create()
  await db.exec(installation())
  await db.exec("select ratelimit_define_policy('api', 10, 1, '1 day')")
  const combiner = new Combiner(db)
  assert.deepEqual((await Promise.all(['a', 'b', 'a'].map((key) => combiner.acquire('api', key)))).map((d) => d.remaining), [9, 9, 8])
  assert.equal((await combiner.acquireAll([{ policy: 'api', key: 'a', cost: 9 }, { policy: 'api', key: 'b' }])).binding, 0)
  await assert.rejects(combiner.acquire('none', 'a'), UnknownPolicy)
  await combiner.close()
  await db.close()
})

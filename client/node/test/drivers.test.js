// The drivers, which send and return the same values in ways of their own.
import assert from 'node:assert/strict'
import test, { after } from 'node:test'
import { PGlite } from '@electric-sql/pglite'
import postgres from 'postgres'
import { Combiner, InvalidArgument, Limiter, UnknownPolicy } from '../index.js'
import { definePolicy, installation, pool } from './kit.js'

const sql = postgres({ max: 3 })
const drivers = { pg: pool, 'postgres.js': { query: async (text, values) => ({ rows: await sql.unsafe(text, values) }) } }
after(() => sql.end())

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
    assert.equal((await combiner.reserve(name, odd, 400_000.000001, { cost: 8 })).remaining, -4)
    await assert.rejects(combiner.acquire('none', odd), UnknownPolicy)
    await combiner.close()
  })
}

test('a missing grant or installation has the remedy as its hint', async () => {
  const connection = await pool.connect()
  const hint = (options) => new Limiter(connection, options).reserve('p', 'k', 1).catch((error) => error.hint)
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

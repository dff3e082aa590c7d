// What is wrong from the start is heard then, or at the first request, whatever failure is.
import assert from 'node:assert/strict'
import test from 'node:test'
import { byIP, decide, per } from '../http.js'
import { Combiner, Limiter, NotReady } from '../index.js'
import { asNobody, connect, definePolicy, defineSlots, eventually, installation, pool } from './kit.js'

const lacks = (promise) => promise.then(() => [], (error) => {
  assert.ok(error instanceof NotReady, error)
  return error.lacks
})

/** The lines of a program's log while it decides about requests. */
async function heard(t, decided, ...requests) {
  const warned = t.mock.method(console, 'warn', () => {}), events = []
  for (const request of requests) events.push(await decided(request))
  return { events, lines: () => warned.mock.calls.map(({ arguments: [line] }) => line) }
}

test('a check lists the grants that the calls of a limiter lack, and its statements help', () => asNobody(async (own, name) => {
  const needs = (limiter, calls, policies) => lacks(limiter.check({ calls, policies }))
  const grants = await needs(new Combiner(own))
  assert.deepEqual(grants.map((line) => /^grant execute on function public\.(\w+)\(.*\) to/.exec(line)[1]),
    ['ratelimit_acquire', 'ratelimit_acquire_all', 'ratelimit_acquire_packed'])
  assert.equal((await needs(new Limiter(own))).length, 2)
  assert.deepEqual((await needs(new Limiter(own), ['hold', 'acquireUpTo'])).length, 4)
  for (const statement of grants) await pool.query(statement)
  assert.deepEqual(await needs(new Combiner(own)), [])
  await pool.query(`revoke usage on schema public from public`)
  try {
    assert.deepEqual(await needs(new Limiter(own)), [`grant usage on schema public to "${name}";`])
  } finally {
    await pool.query(`grant usage on schema public to public`)
  }
  await assert.rejects(new Limiter(own).check({ calls: ['Acquire'] }), /has Acquire/)
  const both = await needs(new Limiter(own), ['acquire', 'refund'], ['misspelt'])
  assert.deepEqual(both.map((line) => line.split(/[:(]/)[0]), ['grant execute on function public.ratelimit_refund', 'no policy is named "misspelt"'])
}))

test('a check finds a missing package, and one that search_path does not lead to', async () => {
  const { rows: [{ name }] } = await pool.query("select current_database() || '_bare' as name")
  await pool.query(`create database "${name}" template template0`)
  const own = connect({ database: name }), limiter = new Limiter(own)
  assert.deepEqual(await lacks(limiter.check()), ['pgratelimit is not installed in this database: run migrations/psql/install.sql'])
  await own.query('create schema apart')
  await own.query(`set search_path = apart; ${installation()}`)
  const bare = connect({ database: name })
  assert.match((await lacks(new Limiter(bare).check()))[0], /^ratelimit_acquire is in schema apart, which is not on search_path/)
  assert.deepEqual(await lacks(new Limiter(bare, { schema: 'apart' }).check()), [])
  assert.match((await lacks(new Limiter(bare, { schema: 'none' }).check()))[0], /not installed in schema "none"/)
})

test('a check finds policies that are not there, or of another kind', async () => {
  const policy = await definePolicy(), slots = await defineSlots(), limiter = new Combiner(pool)
  assert.deepEqual(await lacks(limiter.check({ policies: [policy] })), [])
  assert.deepEqual(await lacks(limiter.check({ policies: [slots], calls: ['hold'] })), [])
  const [unknown, ofSlots] = await lacks(limiter.check({ policies: ['misspelt', policy, slots] }))
  assert.match(unknown, /^no policy is named "misspelt"/)
  assert.match(ofSlots, /lends slots: call hold$/)
  assert.match((await lacks(limiter.check({ policies: [policy], calls: ['holdWait', 'release'] })))[0], /lends no slots/)
  const all = Object.getOwnPropertyNames(Limiter.prototype).filter((name) => !['constructor', 'check'].includes(name) && name[0] !== '_')
  assert.ok(all.length > 10)
  assert.deepEqual(await lacks(limiter.check({ policies: [slots, policy], calls: all })), [], 'of either kind')
  await assert.rejects(new Limiter(connect({ host: '127.0.0.1', port: 1 })).check(), (error) => !(error instanceof NotReady))
})

test('the first decision of a middleware tells what further requests lack', (t) => asNobody(async (own, name) => {
  const policy = await definePolicy()
  await pool.query(`grant execute on function ratelimit_acquire to "${name}"`)
  const { events, lines } = await heard(t, decide(new Combiner(own), { charges: per(policy, () => 'k'), failure: 'open' }), {}, {})
  assert.deepEqual(events.map(({ outcome }) => outcome), ['allowed', 'allowed'])
  await eventually(() => lines().length > 0)
  assert.equal(lines().length, 1)
  assert.match(lines()[0], /grant execute on function public\.ratelimit_acquire_packed/)
}))

test('a cost above the capacity, and a proxy that is not configured, are told once', async (t) => {
  const policy = await definePolicy(5), request = { headers: { 'x-forwarded-for': '192.0.2.1' }, socket: { remoteAddress: '127.0.0.1' } }
  const options = (key, cost) => ({ charges: per(policy, key, cost), failure: 'open' })
  const { lines } = await heard(t, decide(new Limiter(pool), options(byIP(), 6)), request, request)
  assert.equal(lines().length, 2)
  assert.match(lines()[0], /has X-Forwarded-For.*byIP\(1\)/)
  assert.match(lines()[1], /a request of 6 tokens is never allowed: the capacity of the policy ".*" is 5$/)
  t.mock.restoreAll()
  assert.deepEqual((await heard(t, decide(new Limiter(pool), options(byIP(0), 5)), request, request)).lines(), [])
})

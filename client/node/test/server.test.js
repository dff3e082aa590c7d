// The clients on PostgreSQL, with its locks and lost connections.
import assert from 'node:assert/strict'
import test from 'node:test'
import { Combiner, Denied, IdempotencyMismatch, Limiter, TimedOut, TooLate, UnknownPolicy, translate } from '../index.js'
import { connect, definePolicy, defineQuota, eventually, left, pool, stuck, whileOpen, withLocked } from './kit.js'

const PACKED = 'ratelimit_acquire_packed'

/** Asks for keys in one call of several, one that a held bucket stalls. */
async function stall(combiner, policy, keys, options) {
  const answers = keys.map((key) => combiner.acquire(policy, key, options))
  for (const answer of answers) answer.catch(() => {}) // the test looks at them later
  const [pid] = await eventually(async () => (await stuck(PACKED))[0] && stuck(PACKED))
  return { answers, pid }
}

const kill = (pid) => pool.query('select pg_terminate_backend($1)', [pid])

test('a call without an answer within callTimeout has its connection destroyed, and its place is free', async (t) => {
  const policy = await definePolicy(), own = connect({ max: 2, idleTimeoutMillis: 0 })
  const combiner = new Combiner(own, { callTimeoutMs: 3_600_000 }), { setTimeout } = globalThis, due = []
  t.mock.method(globalThis, 'setTimeout', (end, ms, ...more) => ms === 3_600_000 ? void due.push(end) : setTimeout(end, ms, ...more))
  await withLocked(policy, 'held', async () => {
    const { answers } = await stall(combiner, policy, ['held', 'beside'])
    for (const end of due.splice(0)) end()
    for (const answer of answers) await assert.rejects(answer, TimedOut)
    assert.ok((await combiner.acquire(policy, 'free')).allowed, 'the only place')
    await eventually(() => own.totalCount === 1)
    await eventually(async () => (await stuck(PACKED)).length === 0) // the server does not go on waiting
  })
  await combiner.close()
})

test('a call that is given up before it has a connection is never sent', async () => {
  const policy = await definePolicy(), own = connect({ max: 1 }), combiner = new Combiner(own, { callTimeoutMs: 50 })
  const only = await own.connect()
  await assert.rejects(combiner.acquire(policy, 'k'), TimedOut)
  only.release()
  await combiner.close()
  await own.query('select') // behind the call
  assert.equal(await left(policy, 'k'), 1000)
})

test('when the connection is lost, a request without an idempotency key fails', async () => {
  const policy = await definePolicy(), combiner = new Combiner(pool)
  await withLocked(policy, 'held', async () => {
    const { answers, pid } = await stall(combiner, policy, ['free', 'held'])
    await kill(pid)
    for (const answer of answers) await assert.rejects(answer, { code: '57P01' })
  })
  await combiner.close()
  assert.equal(await left(policy, 'free'), 1000)
})

test('when the connection is lost, a request with an idempotency key is sent again and charged once', async () => {
  const policy = await definePolicy(), combiner = new Combiner(pool)
  await withLocked(policy, 'held', async (unlock) => {
    const { answers, pid } = await stall(combiner, policy, ['free', 'held'], { idempotencyKey: 'once' })
    await kill(pid)
    await eventually(async () => (await stuck(PACKED)).some((again) => again !== pid))
    await unlock()
    assert.ok((await Promise.all(answers)).every((d) => d.allowed))
  })
  await combiner.close()
  assert.deepEqual([await left(policy, 'free'), await left(policy, 'held')], [999, 998])
})

test('a call that did nothing is tried again on a pool, and not on a connection', async () => {
  const deadlock = ['40P01', 'deadlock detected'], replaced = ['XX000', 'cache lookup failed for function 16999'], bug = ['XX000', 'made up']
  const moved = ['XX000', 'the shard has moved']
  const pool = { connect() {}, totalCount: 0 }, connection = {}, told = { retry: true }
  for (const [db, [code, message], tries] of [
    [pool, deadlock, 3], [connection, deadlock, 1], [told, deadlock, 3], [pool, replaced, 3], [connection, replaced, 1], [pool, moved, 3], [pool, bug, 1],
  ]) {
    let calls = 0
    db.query = async () => {
      calls++
      throw Object.assign(new Error(message), { code, severity: 'ERROR' })
    }
    await assert.rejects(new Limiter(db, { retry: db.retry }).acquire('api', 'k'), { code })
    assert.equal(calls, tries)
  }
})

test('joint requests are all or nothing, and share calls', async () => {
  const policy = await definePolicy(10), combiner = new Combiner(pool)
  const ask = (key, cost, more) => combiner.acquireAll([{ policy, key: 'all', cost: 2n }, { policy, key, cost }], more)
  const [a, b, none] = await Promise.allSettled([ask('a', 3), ask('b', 11), combiner.acquireAll([{ policy, key: 'a' }, { policy: 'none', key: 'x' }])])
  assert.deepEqual([a.value.allowed, a.value.binding, a.value.decisions.map((d) => d.remaining)], [true, 1, [8, 7]])
  assert.deepEqual([b.value.allowed, b.value.binding, b.value.retryAfter, b.value.decisions.map((d) => d.allowed)], [false, 1, null, [true, false]])
  assert.ok(none.reason instanceof UnknownPolicy)
  const [once, again, other] = await Promise.allSettled([1, 1, 2].map((cost) => ask('c', cost, { idempotencyKey: 'once' })))
  assert.deepEqual([once.value.replayed, again.value.replayed, again.value.decisions[1].replayed], [false, true, true])
  assert.ok(other.reason instanceof IdempotencyMismatch)
  assert.deepEqual([await left(policy, 'all'), await left(policy, 'a'), await left(policy, 'b'), await left(policy, 'c')], [6, 7, 10, 9])
  const plain = await new Limiter(pool).acquireAll([{ policy, key: 'all' }, { policy, key: 'b', cost: 2 }])
  assert.deepEqual([plain.allowed, plain.binding, plain.remaining, plain.decisions.map((d) => d.remaining)], [true, 1, 8, [5, 8]])
  await combiner.close()
})

test('a Limiter on a connection is part of its transaction', async () => {
  const policy = await definePolicy(), client = await pool.connect(), limiter = new Limiter(client, { schema: 'public' })
  await client.query('begin')
  assert.equal((await limiter.acquire(policy, 'k', { cost: 5 })).remaining, 995)
  await client.query('rollback')
  client.release()
  assert.equal(await left(policy, 'k'), 1000)
})

test('wait returns when the tokens are there, and no sooner', async () => {
  const policy = await definePolicy(10, 1, '50 ms'), limiter = new Limiter(pool)
  assert.equal((await limiter.wait(policy, 'k', { cost: 10 })).wait, 0)
  const { rows: [{ due }] } = await pool.query("select (select retry_after from ratelimit_peek($1, 'k')) + clock_timestamp() as due", [policy])
  await limiter.wait(policy, 'k')
  const { rows: [{ passed }] } = await pool.query('select clock_timestamp() >= $1::timestamptz as passed', [due.toISOString()])
  assert.ok(passed)
})

test('wait fails at once when the tokens would come too late, and has taken nothing', async () => {
  const policy = await definePolicy(10, 1, '1 hour'), limiter = new Limiter(pool)
  await assert.rejects(limiter.wait(policy, 'k', { cost: 11 }), (error) => error instanceof TooLate && error.reservation.wait === null)
  await limiter.acquire(policy, 'k', { cost: 10 })
  await assert.rejects(limiter.wait(policy, 'k', { timeoutMs: 3_000_000 }), (error) => error instanceof TooLate && error.reservation.wait > 3500)
  assert.equal(await left(policy, 'k'), 0)
})

test('wait sleeps until the turn of a quota', async () => {
  const policy = await defineQuota(10, '1 hour'), limiter = new Limiter(pool)
  await limiter.charge(policy, 'k', 10)
  // On a slow machine the turn is over by the call.
  await pool.query("select ratelimit_define_policy($1, anchor => (clock_timestamp() + interval '500 ms') at time zone 'UTC')", [policy])
  const { rows: [{ due }] } = await pool.query("select anchor at time zone 'UTC' as due from ratelimit_policies() where policy = $1", [policy])
  const { allowed, wait, remaining } = await limiter.wait(policy, 'k', { cost: 4, timeoutMs: 60_000 })
  assert.deepEqual([allowed, wait, remaining], [true, 0, 6])
  const { rows: [{ passed }] } = await pool.query('select clock_timestamp() >= $1::timestamptz as passed', [due.toISOString()])
  assert.ok(passed)
  for (const options of [{ cost: 7, timeoutMs: 3_600_000 }, { cost: 11 }]) await assert.rejects(limiter.wait(policy, 'k', options), TooLate)
})

test('a caller that stops waiting leaves after 5 seconds, if its bucket is locked, and gets its tokens back later', async (t) => {
  const policy = await definePolicy(10, 1, '1 hour'), leaving = new AbortController(), late = new AbortController(), seen = []
  await pool.query("select ratelimit_charge($1, 'k', 10)", [policy])
  const waiting = new Limiter(pool).wait(policy, 'k', { cost: 3, signal: leaving.signal })
  waiting.catch(() => {})
  await eventually(async () => await left(policy, 'k') === -3)
  t.mock.method(AbortSignal, 'timeout', (ms) => (seen.push(ms), late.signal))
  await whileOpen("select ratelimit_charge($1, 'k', 1)", [policy], async () => {
    leaving.abort(new Error('enough'))
    await eventually(async () => (await stuck('ratelimit_settle')).length === 1)
    assert.deepEqual(seen, [5000])
    late.abort()
    await assert.rejects(waiting, /enough/)
  })
  await eventually(async () => await left(policy, 'k') === 0)
})

test('the error of a guard has its numbers', async () => {
  const policy = await definePolicy(10, 1, '1 hour')
  const error = await pool.query("select ratelimit_enforce($1, 'k', 11)", [policy]).catch(translate)
  assert.ok(error instanceof Denied)
  assert.deepEqual([error.policy, error.cost, error.remaining, error.retryAfter, error.capacity], [policy, 11, 10, null, 10])
  assert.ok(translate(new Error('of an ORM', { cause: error })) instanceof Denied)
  const foreign = Object.assign(new Error('of other code'), { code: 'RL429', detail: '{}' })
  assert.equal(translate(foreign), foreign)
})

test('a pool of pg prepares a statement once on each connection', async () => {
  const policy = await definePolicy(), own = connect({ max: 1 }), limiter = new Limiter(own), combiner = new Combiner(own)
  for (let i = 0; i < 3; i++) await Promise.all([limiter.acquire(policy, 'k'), combiner.acquireAll([{ policy, key: 'k' }])])
  const { rows } = await own.query("select generic_plans + custom_plans as runs from pg_prepared_statements where name like 'ratelimit\\_%'")
  assert.deepEqual(rows.map(({ runs }) => Number(runs)), [3, 3])
  await combiner.close()
})

// The calls and errors that the clients of all languages answer alike: tests/vectors. They set the clock.
import assert from 'node:assert/strict'
import test, { after, before } from 'node:test'
import * as pgratelimit from '../index.js'
import { definePolicy, pool, vectors } from './kit.js'

const T0 = Date.parse('2024-03-30T12:00:00Z')
const { Combiner, Limiter } = pgratelimit

/** Sends each acquire in one call with another, which has the same idempotency key if there is one. */
class InCompany extends Combiner {
  async acquire(policy, key, options) {
    const [answer] = await Promise.allSettled([super.acquire(policy, key, options), super.acquire('company', 'k', { ...options, cost: 0 })])
    if (answer.status === 'rejected') throw answer.reason
    return answer.value
  }
}

/** Asks for each bucket as one of several. */
class Joint extends InCompany {
  async acquire(policy, key, { cost, ...options } = {}) {
    const { decisions } = await super.acquireAll([{ policy: 'company', key: 'k', cost: 0 }, { policy, key, cost }], options)
    return decisions[1]
  }
}

const limiters = { 'a Limiter': new Limiter(pool), 'a Combiner': new InCompany(pool), 'joint requests': new Joint(pool) }

async function setClock(ms) {
  await pool.query('update public.test_clock set now = $1', [new Date(T0 + ms).toISOString()])
}

let clock
before(async () => {
  clock = (await pool.query("select pg_get_functiondef('ratelimit.clock'::regproc) as text")).rows[0].text
  await pool.query(`
    select ratelimit_define_policy('company', 1, 1, '1 day');
    create table public.test_clock (now timestamptz not null);
    insert into public.test_clock values ('epoch');
    create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe as $$ select now from public.test_clock $$`)
})
after(async () => {
  await pool.query(clock)
  await pool.query('drop table public.test_clock')
})

for (const [name, limiter] of Object.entries(limiters)) {
  test(`${name} answers the shared vectors`, async () => {
    const call = {
      acquire: (policy, cost) => limiter.acquire(policy, 'k', { cost }),
      peek: (policy, cost) => limiter.peek(policy, 'k', { cost }),
      refund: (policy, amount) => limiter.refund(policy, 'k', amount),
      charge: (policy, cost) => limiter.charge(policy, 'k', cost),
      reset: async (policy) => {
        await pool.query("select ratelimit_reset($1, 'k')", [policy])
        return limiter.peek(policy, 'k', { cost: 0 })
      },
    }
    for (const bucket of vectors('buckets')) {
      await setClock(0)
      const policy = await definePolicy(bucket.capacity, bucket.refill, `${bucket.every} ms`, bucket.stepped)
      if (bucket.taken > 0) await call.acquire(policy, bucket.taken)
      for (const step of bucket.steps) {
        await setClock(step.at)
        const got = await call[step.call](policy, step.tokens)
        const about = `${bucket.name}: ${JSON.stringify(step)} got ${JSON.stringify(got)}`
        const seconds = (ms) => ms === null ? null : ms / 1000
        assert.equal(got.allowed, step.allowed, about)
        assert.equal(got.retryAfter === 0, step.allowed, about)
        assert.equal(got.capacity, bucket.capacity, about)
        if (step.remaining !== undefined) assert.equal(got.remaining, step.remaining, about)
        if (step.retry_after !== undefined) assert.equal(got.retryAfter, seconds(step.retry_after), about)
        if (step.reset_after !== undefined) assert.equal(got.resetAfter, seconds(step.reset_after), about)
      }
    }
  })

  test(`${name} raises the shared errors`, async () => {
    await pool.query(`
      select ratelimit_drop_policy('api') where exists (select from ratelimit_policies() where policy = 'api');
      select ratelimit_define_policy('api', 10, 1, '1 hour');
      select ratelimit_acquire('api', 'user:42', 2, 'once'), ratelimit_acquire('api', 'user:42', 2, 'over');
      select ratelimit_settle('api', 'user:42', 'over', 0)`)
    for (const { name, call, policy, key, cost, idempotency_key: idempotencyKey, error, sqlstate } of vectors('errors')) {
      const asked = {
        acquire: () => limiter.acquire(policy, key, { cost, idempotencyKey }),
        settle: () => limiter.settle(policy, key, idempotencyKey, cost),
        charge: () => limiter.charge(policy, key, cost, { idempotencyKey }),
        refund: () => limiter.refund(policy, key, cost),
      }[call]()
      await assert.rejects(asked, (got) => {
        assert.equal(got.constructor, pgratelimit[error], `${name}: ${got.stack}`)
        assert.equal(got.code, sqlstate || undefined, name)
        assert.ok(got.detail.endsWith('.') && got.message.includes(got.detail), `${name}: ${got.message}`)
        assert.ok(got.hint.endsWith('.') || got.hint.endsWith(';'), `${name}: ${got.hint}`)
        return true
      })
    }
  })
}

test('pause stops a bucket, and it refills from 0 after that', async () => {
  await setClock(0)
  const policy = await definePolicy(10), limiter = new Limiter(pool)
  const { allowed, remaining, retryAfter } = await limiter.pause(policy, 'k', 1500)
  assert.deepEqual([allowed, remaining, retryAfter >= 1.5], [false, 0, true])
  assert.equal((await limiter.acquire(policy, 'k')).retryAfter, retryAfter)
  await assert.rejects(limiter.pause(policy, 'k', 0), pgratelimit.InvalidArgument)
})

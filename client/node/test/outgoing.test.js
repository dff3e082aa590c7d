import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import test, { mock } from 'node:test'
import { Combiner, InvalidArgument, Limiter, TooLate, UnknownPolicy } from '../index.js'
import { limitedFetch, retryAfter } from '../outgoing.js'
import { definePolicy, eventually, left, pool, stuck, turn, withLocked } from './kit.js'

/** An upstream that sees requests, and refuses those whose path has the fields of a refusal. */
function upstream(limiter, policy, options) {
  const seen = []
  const charges = (path, init) => [{ policy, key: 'k' }, ...(init?.cost ? [{ policy: init.policy ?? policy, key: 'other', cost: init.cost }] : [])]
  const fetch = async (path, init) => {
    seen.push({ path, init, at: performance.now() })
    return new Response('', path.startsWith('/') ? { status: 200 } : { status: 429, headers: JSON.parse(path) })
  }
  return { seen, send: limitedFetch(limiter, { charges, fetch, ...options }) }
}

test('a request is sent as it is when all its tokens are there', async () => {
  const policy = await definePolicy(2, 10, '1 second'), body = new ReadableStream({ pull() { assert.fail('the body is read') } }, { highWaterMark: 0 })
  const { seen, send } = upstream(new Limiter(pool), policy)
  const begin = performance.now(), init = { method: 'POST', body, cost: 2 }
  assert.equal((await send('/a', init)).status, 200)
  await send('/b', { cost: 2 })
  assert.deepEqual(seen.map(({ path }) => path), ['/a', '/b'])
  assert.equal(seen[0].init, init)
  assert.ok(seen[1].at - begin >= 100, 'the second is not early')
})

test('requests with the same buckets wait in line, and one of them asks at a time', async () => {
  const asked = [], leaving = new AbortController()
  const { seen, send } = upstream({ acquireAll: () => new Promise((resolve) => asked.push(resolve)), pause() {} }, 'none', {
    charges: (path) => [{ policy: 'none', key: path === '/other' ? 'other' : 'k' }],
  })
  const sent = ['/a', '/gone', '/b', '/other'].map((path) => send(path, { signal: path === '/gone' ? leaving.signal : undefined }))
  await turn()
  leaving.abort()
  await assert.rejects(sent.splice(1, 1)[0], { name: 'AbortError' })
  asked.splice(1)[0]({ allowed: true }) // another bucket has another line
  for (const [i, path] of ['/c', '/d'].entries()) {
    await turn()
    asked[i]({ allowed: true })
    await turn()
    sent.push(send(path)) // comes when the first has left, and the second asks
    await turn()
    assert.equal(asked.length, i + 2)
  }
  asked[2]({ allowed: true })
  await turn()
  asked[3]({ allowed: true })
  await Promise.all(sent)
  assert.deepEqual(seen.map(({ path }) => path), ['/other', '/a', '/b', '/c', '/d'])
})

test('one response stops all processes, and is returned', async () => {
  const policy = await definePolicy(5, 100, '1 second')
  const one = upstream(new Limiter(pool), policy), other = upstream(new Combiner(pool), policy)
  const begin = performance.now(), refused = await one.send('{"Retry-After": "1"}') // the pause begins before its answer comes
  assert.equal(refused.status, 429)
  await Promise.all(['/a', '/b'].map((path) => other.send(path)))
  const [first, second] = other.seen.map(({ at }) => at - begin)
  assert.ok(first >= 1000 && second >= first, `after ${first} and ${second} ms`)
})

test('a pause is bounded, and without a field there is none', async () => {
  const paused = [], policy = await definePolicy(99)
  const limiter = { __proto__: new Limiter(pool), acquireAll: (charges) => new Limiter(pool).acquireAll(charges), pause: async (...args) => { paused.push(args) } }
  await upstream(limiter, policy).send('{}')
  assert.deepEqual(paused, [])
  await upstream(limiter, policy).send('{"Retry-After": "1.5"}', { cost: 1, policy: await definePolicy(9) }) // the bucket of the first charge is paused
  await upstream(limiter, policy).send('{"Retry-After": "86400"}')
  await upstream(limiter, policy, { maxPauseMs: 60_000 }).send('{"Retry-After": "86400"}')
  for (const ms of [1e-9, 2500, NaN, -1, -Infinity, 0, undefined]) await upstream(limiter, policy, { pauseForMs: async () => ms }).send('{}')
  await upstream(limiter, policy, { pauseForMs: () => Infinity, maxPauseMs: Infinity }).send('{}')
  assert.deepEqual(paused, [1500, 3_600_000, 60_000, 1, 2500, 365 * 86_400_000].map((ms) => [policy, 'k', ms]))
  const failed = []
  limiter.pause = async () => { throw new Error('lost') }
  assert.equal((await upstream(limiter, policy, { onError: ({ message }) => failed.push(message) }).send('{"Retry-After": "3"}')).status, 429)
  assert.equal((await upstream(limiter, policy, { onError: ({ message }) => failed.push(message), pauseForMs: () => { throw new Error('ours') } }).send('{}')).status, 429)
  assert.deepEqual(failed, ['lost', 'ours'])
  const unhandled = mock.fn(), warned = mock.method(console, 'warn', () => {})
  process.prependOnceListener('unhandledRejection', unhandled)
  for (const onError of [() => { throw new Error('sync') }, async () => { throw new Error('async') }]) {
    assert.equal((await upstream(limiter, policy, { onError }).send('{"Retry-After": "3"}')).status, 429, 'the answer is not lost')
  }
  await new Promise(setImmediate)
  process.off('unhandledRejection', unhandled)
  warned.mock.restore()
  assert.deepEqual([unhandled.mock.callCount(), warned.mock.calls.map(({ arguments: [, error] }) => error.message)], [0, ['sync', 'async']])
})

test('nothing is sent or taken without the tokens', async () => {
  const policy = await definePolicy(2), { seen, send } = upstream(new Limiter(pool), policy)
  await assert.rejects(send('/a', { cost: 3 }), (error) => error instanceof TooLate && error.message.includes(`of 3 tokens is never allowed: the capacity of the policy "${policy}" is 2`))
  await assert.rejects(send('/a', { cost: 1, policy: 'none' }), UnknownPolicy)
  await assert.rejects(send('/a', { signal: AbortSignal.abort(new Error('gone')) }), /gone/)
  assert.equal(await left(policy, 'k'), 2)
  await Promise.all([send('/1'), send('/2')])
  const leaving = new AbortController(), asleep = send('/b', { signal: leaving.signal }), behind = send('/c', { signal: leaving.signal })
  const gone = Promise.all([assert.rejects(asleep, /gone/), assert.rejects(behind, /gone/)])
  leaving.abort(new Error('gone'))
  await gone
  assert.deepEqual([seen.map(({ path }) => path), await left(policy, 'k')], [['/1', '/2'], 0])
})

test('tokens that are granted after an abort are refunded', async () => {
  const limiter = new class extends Limiter { acquireAll(charges) { return this.asked = super.acquireAll(charges) } }(pool)
  const policy = await definePolicy(5), leaving = new AbortController(), { seen, send } = upstream(limiter, policy)
  await withLocked(policy, 'k', async () => {
    const sent = assert.rejects(send('/a', { signal: leaving.signal, cost: 2 }), /gone/)
    await eventually(async () => (await stuck('ratelimit_acquire_all')).length > 0)
    leaving.abort(new Error('gone'))
    await sent
  })
  assert.ok((await limiter.asked).allowed)
  await eventually(async () => await left(policy, 'k') === 4 && await left(policy, 'other') === 5)
  assert.deepEqual(seen, [])
})

test('a response names the wait of the shared table', () => {
  const { clock, answers } = JSON.parse(readFileSync(new URL('../../testdata/upstream.json', import.meta.url)))
  assert.ok(answers.length > 100)
  mock.timers.enable({ apis: ['Date'], now: Date.parse(clock) })
  for (const { source, status, fields, seconds } of answers) {
    const got = retryAfter({ status, headers: new Headers(fields.map((field) => field.split(/: (.*)/s, 2))) })
    assert.ok(Math.abs(got - seconds) < 0.001, `${source}: ${got} of ${fields.join(', ')}`)
  }
  mock.timers.reset()
})

test('a fetch is refused what it cannot work with', async () => {
  assert.throws(() => limitedFetch(pool, { charges: () => [] }), TypeError)
  const limiter = new Limiter(pool), charges = () => []
  assert.throws(() => limitedFetch(limiter), /charges must be a function/)
  for (const name of ['pauseForMs', 'fetch', 'onError']) assert.throws(() => limitedFetch(limiter, { charges, [name]: 5 }), new RegExp(`${name} must be a function`))
  for (const maxPauseMs of [0, -1, NaN, '60', 60n, null]) assert.throws(() => limitedFetch(limiter, { charges, maxPauseMs }), InvalidArgument)
  assert.throws(() => limitedFetch(limiter, { charges, maxPause: 60 }), /options has maxPause/)
  const { seen } = upstream(new Limiter(pool), 'none'), free = limitedFetch(new Limiter(pool), { charges: () => [], fetch: async () => 'sent' })
  assert.deepEqual([await free('/a'), seen], ['sent', []])
  await assert.rejects(limitedFetch(new Limiter(pool), { charges: () => 'text' })('/a'), (error) => error instanceof InvalidArgument || error instanceof TypeError)
})

// The Combiner on a database that answers when the test says so.
import assert from 'node:assert/strict'
import test from 'node:test'
import { Closed, Combiner, InvalidArgument, Limiter, Locked, Overloaded, TimedOut } from '../index.js'
import { Gate, turn } from './kit.js'

/** A Combiner on a Gate, and a function that asks for keys, a request each. */
function gated(t, options) {
  const gate = new Gate(), combiner = new Combiner(gate, options)
  t.after(() => assert.equal(gate.open, 0, 'a call was left open'))
  const ask = (...keys) => keys.map((key) => {
    const answer = combiner.acquire('api', key)
    answer.catch(() => {}) // the test looks at it later
    return answer
  })
  return { gate, combiner, ask }
}

const sqlError = (code) => Object.assign(new Error(code), { code, severity: 'ERROR' })
const keys = (from, n) => Array.from({ length: n }, (_, i) => `k${from + i}`)
const sent = (gate) => gate.calls.map((call) => call.keys)

test('callers that were just answered share the next call', async (t) => {
  const { gate, combiner } = gated(t)
  const callers = keys(0, 40).map(async (key) => {
    for (let i = 0; i < 3; i++) await combiner.acquire('api', key)
  })
  await turn()
  await gate.grantAll()
  await Promise.all(callers)
  assert.ok(gate.calls.length <= 7, `${gate.calls.length} calls for 120 requests`)
})

test('a stalled call holds up its own buckets only', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  const { gate, ask } = gated(t)
  const stalled = ask(...keys(0, 10))
  await turn()
  const behind = ask('k1'), others = ask(...keys(10, 31))
  await turn()
  assert.deepEqual(sent(gate), [keys(0, 10), keys(10, 31)])
  await gate.calls[1].grant()
  await Promise.all(others)
  const few = ask('k10') // not worth a call beside the stalled one, but for the timer
  await turn()
  assert.equal(gate.calls.length, 2)
  t.mock.timers.tick(5)
  await turn()
  assert.deepEqual(gate.calls[2]?.keys, ['k10'])
  await gate.calls[2].grant()
  await few[0]
  await gate.calls[0].grant()
  assert.deepEqual(gate.calls[3].keys, ['k1'])
  await gate.calls[3].grant()
  await Promise.all([...stalled, ...behind])
})

test('a caller that leaves before its request is sent takes it along, and one that leaves later harms nobody', async (t) => {
  const { gate, combiner, ask } = gated(t, { callsInFlight: 1 })
  const early = new AbortController(), late = new AbortController(), reason = new Error('enough')
  const first = ask('k1')
  const inCall = combiner.acquire('api', 'k2', { signal: late.signal })
  await turn()
  const waiting = combiner.acquire('api', 'k3', { signal: early.signal })
  assert.equal(combiner.waiting, 1)
  early.abort(reason)
  late.abort(reason)
  await assert.rejects(waiting, reason)
  await assert.rejects(inCall, reason)
  assert.equal(combiner.waiting, 0)
  await assert.rejects(combiner.acquire('api', 'k4', { signal: early.signal }), reason)
  await gate.calls[0].grant()
  assert.equal((await first[0]).remaining, 1)
  assert.deepEqual(sent(gate), [['k1', 'k2']])
})

test('more than maxWaiting requests are refused at once', async (t) => {
  const { gate, ask } = gated(t, { callsInFlight: 1, maxWaiting: 2 })
  const [first] = ask('k1')
  await turn()
  const waiting = ask('k2', 'k3'), [refused] = ask('k4')
  await assert.rejects(refused, Overloaded)
  await gate.calls[0].grant()
  await first
  await gate.calls[1].grant()
  await Promise.all(waiting)
  assert.deepEqual(sent(gate), [['k1'], ['k2', 'k3']])
})

test('a call that is given up fails its callers and frees its place, and its buckets stay apart until it has ended', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  const { gate, combiner, ask } = gated(t, { callsInFlight: 1, callTimeoutMs: 2000 })
  const stalled = ask('k0', 'k1')
  await turn()
  const behind = ask('k0'), other = ask('k2')
  t.mock.timers.tick(1999)
  await turn()
  assert.equal(gate.calls.length, 1)
  t.mock.timers.tick(1)
  for (const answer of stalled) await assert.rejects(answer, TimedOut)
  await turn()
  assert.deepEqual(sent(gate), [['k0', 'k1'], ['k2']])
  await gate.calls[1].grant()
  await other[0]
  assert.equal(gate.calls.length, 2, 'the call for k0 has not ended')
  assert.equal(combiner.waiting, 1)
  await gate.calls[0].fail(new Error('ended'))
  assert.deepEqual(gate.calls[2].keys, ['k0'])
  await gate.calls[2].grant()
  await behind[0]
})

test('text that would fail or burden a call for others never shares it', async (t) => {
  const { gate, combiner } = gated(t)
  const long = 'é'.repeat(257)
  const answers = [
    combiner.acquire('api', 'k1'), combiner.acquire('api', long), combiner.acquire(long, 'k2'),
    combiner.acquireAll([{ policy: 'api', key: 'k3' }]), combiner.acquireAll([{ policy: 'api', key: long }]), combiner.acquireAll([]),
  ]
  for (const bad of ['a\0b', '\ud800', 42, null]) {
    await assert.rejects(combiner.acquire('api', bad), InvalidArgument)
    await assert.rejects(combiner.acquire(bad, 'k'), InvalidArgument)
    await assert.rejects(combiner.acquireAll([{ policy: 'api', key: bad }]), InvalidArgument)
  }
  for (const cost of [1.5, NaN, '1', 2n ** 63n]) await assert.rejects(combiner.acquire('api', 'k', { cost }), InvalidArgument)
  await assert.rejects(combiner.acquire('api', 'k', { idempotencyKey: 'a\0b' }), InvalidArgument)
  await turn()
  await gate.grantAll()
  await Promise.all(answers)
  assert.equal(gate.calls.length, answers.length)
})

test('text that the database cannot hold fails its own request only', async (t) => {
  for (const code of ['22021', '22P05']) {
    const { gate, ask } = gated(t)
    const [good, bad, other] = ask('k1', 'bad', 'k2')
    await turn()
    await gate.calls[0].fail(sqlError(code))
    await gate.calls[1].grant()
    await gate.calls[2].fail(sqlError(code))
    await gate.calls[3].grant()
    await assert.rejects(bad, (error) => error instanceof InvalidArgument && error.code === code)
    assert.deepEqual([(await good).remaining, (await other).remaining], [1, 2])
  }
})

test('after lock_timeout the buckets of a call are asked for apart, eight at a time, without those who left', async (t) => {
  const { gate, combiner, ask } = gated(t)
  const leaving = new AbortController()
  const answers = ask('k0', 'k0', ...keys(1, 9)), gone = ['k0', 'k1', 'k10'].map((key) => combiner.acquire('api', key, { signal: leaving.signal }))
  await turn()
  leaving.abort()
  for (const answer of gone) await assert.rejects(answer)
  await gate.calls[0].fail(sqlError('55P03'))
  assert.deepEqual(sent(gate).slice(1), [['k0', 'k0'], ...keys(1, 7).map((key) => [key])])
  await gate.calls[1].fail(sqlError('55P03'))
  for (const at of [0, 1]) await assert.rejects(answers[at], Locked)
  await gate.grantAll()
  assert.deepEqual((await Promise.all(answers.slice(2))).map((d) => d.remaining), [1, 2, 3, 4, 5, 6, 7, 8, 9])
  assert.equal(gate.calls.length, 11)
})

test('a joint request has one bucket: those of the same buckets wait for each other, and others share the next call', async (t) => {
  const { gate, combiner } = gated(t)
  const ask = (...names) => combiner.acquireAll(names.map((key) => ({ policy: 'api', key })))
  const first = ask('all', 'k1')
  await turn()
  const same = ask('all', 'k1'), other = ask('all', 'k2')
  await turn()
  assert.deepEqual(sent(gate), [['all', 'k1'], ['all', 'k2']])
  await gate.calls[0].grant({ binding: '2' })
  assert.equal((await first).binding, 1)
  assert.deepEqual(gate.calls[2].keys, ['all', 'k1'])
  await gate.calls[1].grant()
  await gate.calls[2].grant()
  assert.deepEqual((await same).decisions.map((d) => d.remaining), [0, 1])
  await other
})

test('an answer that does not fit its requests fails its call and nothing else', async (t) => {
  const { gate, combiner, ask } = gated(t)
  const changes = [
    { elements: [1] }, { elements: [1, 3] }, { elements: [0, 1] }, { elements: [1, 1] }, { remaining: [1] }, { retry_after_us: null },
    { refused: [1] }, { elements: ['x', 1] }, { elements: [1], remaining: [1], retry_after_us: [0], reset_after_us: [0], capacity: [9], refused: [2] },
  ]
  for (const [i, change] of changes.entries()) {
    const answers = ask('k1', 'k2')
    await turn()
    await gate.calls[i].grant(change)
    for (const answer of answers) await assert.rejects(answer, /an answer whose arrays/, JSON.stringify(change))
  }
  const charges = [{ policy: 'api', key: 'k1' }], jointChanges = [{ bindings: [1, 2] }, { bindings: [0, 1] }, { requests: [1, 3] }, { requests_allowed: [true] }]
  for (const change of jointChanges) {
    const answers = [combiner.acquireAll(charges), combiner.acquireAll([{ policy: 'api', key: 'k2' }])]
    for (const answer of answers) answer.catch(() => {})
    await turn()
    await gate.calls.at(-1).grant(change)
    for (const answer of answers) await assert.rejects(answer, /an answer whose arrays/, JSON.stringify(change))
  }
  const [answer] = ask('k1')
  await turn()
  await gate.calls.at(-1).grant()
  await answer
})

test('integers are read alike from strings, numbers and BigInts', async (t) => {
  const { gate, ask } = gated(t)
  for (const [i, as] of [String, Number, BigInt].entries()) {
    const [answer] = ask('k7')
    await turn()
    await gate.calls[i].grant({ allowed: false, remaining: as(-3), retry_after: as(1), reset_after: as(300_000), capacity: as(9) })
    assert.deepEqual(await answer, {
      allowed: false, remaining: -3, retryAfter: 0.000001, resetAfter: 0.3, capacity: 9, replayed: false, shadowed: false,
    })
  }
})

test('the answers of a shared call are in any order, and each has its flags', async (t) => {
  const { gate, ask } = gated(t)
  const answers = ask('k7', 'k8')
  await turn()
  await gate.calls[0].grant({
    elements: [2, 1], remaining: [-3, 5], retry_after_us: [null, 0], reset_after_us: [1, 300_000], shadowed: [false, true],
  })
  assert.deepEqual((await Promise.all(answers)).map((d) => [d.allowed, d.remaining, d.retryAfter, d.resetAfter, d.shadowed]),
    [[true, 5, 0, 0.3, true], [false, -3, null, 0.000001, false]])
})

test('close refuses new requests and waits for earlier ones', async (t) => {
  const { gate, combiner, ask } = gated(t, { callsInFlight: 1 })
  const answers = ask('k1')
  await turn()
  answers.push(...ask('k2'))
  let isClosed = false
  const closed = combiner.close().then(() => { isClosed = true })
  await assert.rejects(combiner.acquire('api', 'k3'), Closed)
  await gate.calls[0].grant()
  assert.equal(isClosed, false)
  await gate.calls[1].grant()
  await closed
  assert.deepEqual((await Promise.all(answers)).map((d) => d.remaining), [1, 2])
})

test('close waits for a request behind a call that was given up', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  const { gate, combiner, ask } = gated(t, { callTimeoutMs: 2000 })
  const [stalled] = ask('k1')
  await turn()
  const [behind] = ask('k1'), order = []
  behind.then(() => order.push('answered'))
  t.mock.timers.tick(2000)
  await assert.rejects(stalled, TimedOut)
  const closed = combiner.close().then(() => order.push('closed'))
  await turn()
  await gate.calls[0].fail(new Error('ended'))
  await gate.calls[1].grant()
  await closed
  assert.deepEqual(order, ['answered', 'closed'])
})

test('waits are sent in whole microseconds', async (t) => {
  const { gate, combiner } = gated(t)
  const table = [[300, '300000'], [8000.001, '8000001'], [0.249, '249'], [0, '0'], [365 * 86_400_000, '31536000000000'], [Infinity, '31536000000000']]
  for (const [ms, sent] of table) {
    const reserving = combiner.reserve('api', 'k1', ms)
    assert.equal(gate.calls.at(-1).values[2], `${sent} microseconds`)
    gate.calls.at(-1).grant()
    await reserving
  }
})

test('a duration that is none is refused before anything is sent, by its name and with its unit', async () => {
  const limiter = new Limiter({ query: () => assert.fail('a call') })
  const refused = {
    callTimeoutMs: [(ms) => new Limiter(new Gate(), { callTimeoutMs: ms }), 0],
    'Combiner callTimeoutMs': [(ms) => new Combiner(new Gate(), { callTimeoutMs: ms }), 0],
    maxWaitMs: [(ms) => limiter.reserve('api', 'k', ms), undefined],
    timeoutMs: [(ms) => limiter.wait('api', 'k', { timeoutMs: ms }), 0],
    pauseForMs: [(ms) => limiter.pause('api', 'k', ms), 0, 0.5, undefined, Infinity],
  }
  for (const [name, [use, ...others]] of Object.entries(refused)) {
    for (const ms of [NaN, -1, -Infinity, '500', null, 500n, {}, ...others]) {
      await assert.rejects(async () => use(ms), (error) => {
        assert.ok(error instanceof InvalidArgument, `${name} ${String(ms)}: ${error.stack}`)
        return error.message.startsWith(`invalid ${name.split(' ').at(-1)}. `) && /Pass a number of milliseconds, /.test(error.hint)
      })
    }
  }
})

test('an option that is unknown is refused with those that are known', async () => {
  const limiter = new Limiter(new Gate())
  assert.throws(() => new Limiter(new Gate(), { callTimeout: 500 }), /options has callTimeout\. Known names are schema, retry, callTimeoutMs\./)
  assert.throws(() => new Combiner(new Gate(), { callTimeout: 500 }), /callTimeoutMs, callsInFlight, maxWaiting\./)
  assert.throws(() => new Limiter(new Gate(), { maxWaiting: 5 }), InvalidArgument)
  await assert.rejects(limiter.wait('api', 'k', { timeout: 500 }), /Known names are cost, timeoutMs, signal\./)
  for (const options of [5, null, { cots: 2 }]) await assert.rejects(limiter.acquire('api', 'k', options), InvalidArgument)
})

test('an argument that is wrong is named, with what it is and the remedy, and nothing is sent', async () => {
  const wrong = [
    [(limiter) => limiter.acquire('api', null), 'invalid key. key is null. Pass a string.'],
    [(limiter) => limiter.acquire('api', undefined), 'invalid key. key is undefined. Pass a string.'],
    [(limiter) => limiter.acquire('api', 42), 'invalid key. key is of type number. Pass a string.'],
    [(limiter) => limiter.acquire(null, 'k'), 'invalid policy. policy is null. Pass a string.'],
    [(limiter) => limiter.acquire('api', 'k', { cost: '5' }), 'invalid cost. cost is of type string. Pass a whole number of tokens.'],
    [(limiter) => limiter.charge('api', 'k', null), 'invalid cost. cost is null. Pass a whole number of tokens.'],
    [(limiter) => limiter.acquireAll([{ policy: 'api', key: 'k', costs: 5 }]), 'invalid charge. charge has costs. Known names are policy, key, cost.'],
    ...[5, new AbortController(), {}].flatMap((signal) => ['acquire', 'peek', 'hold'].map((method) => [
      (limiter) => limiter[method]('api', 'k', { signal }),
      `invalid signal. signal is of type ${typeof signal}. Pass an AbortSignal, such as AbortSignal.timeout(500), or the signal of an AbortController.`,
    ])),
  ]
  for (const Kind of [Limiter, Combiner]) {
    const gate = new Gate(), limiter = new Kind(gate)
    for (const [use, message] of wrong) await assert.rejects(use(limiter), { name: 'InvalidArgument', message }, String(use))
    assert.equal(gate.calls.length, 0)
  }
})

test('a call may take 30 days, or for ever', async (t) => {
  t.mock.timers.enable({ apis: ['setTimeout'] })
  const timers = t.mock.method(globalThis, 'setTimeout')
  for (const [callTimeoutMs, days] of [[30 * 86_400_000, 30], [Infinity, 60]]) {
    const { gate, combiner } = gated(t, { callTimeoutMs })
    let outcome = 'none'
    combiner.peek('api', 'k1').then(() => { outcome = 'answer' }, (error) => { outcome = error.constructor })
    for (let day = 0; day < days; day++) {
      await turn()
      assert.equal(outcome, 'none', `on day ${day}`)
      t.mock.timers.tick(86_400_000)
    }
    await gate.calls[0].grant()
    assert.equal(outcome, callTimeoutMs === Infinity ? 'answer' : TimedOut)
  }
  assert.ok(timers.mock.calls.every(({ arguments: [, ms] }) => ms < 2 ** 31))
})

test('a handle without query(), and numbers that cannot be, are refused at once', () => {
  for (const [handle, found] of [['postgres://localhost/app', 'of type string'], [undefined, 'undefined'], [null, 'null'], [{}, 'of type object']]) {
    const message = `pgratelimit: the first argument is ${found}, and has no query(text, values): pass a Pool of pg; for other drivers README.md has adapters`
    assert.throws(() => new Limiter(handle), { name: 'TypeError', message })
  }
  for (const options of [{ callsInFlight: 0 }, { callsInFlight: 1.5 }, { maxWaiting: 0 }, { maxWaiting: '9' }]) {
    assert.throws(() => new Combiner(new Gate(), options), InvalidArgument)
  }
})

test('an answer without rows is an error, and is not asked for again', async () => {
  for (const answer of [[], undefined, {}]) {
    let sent = 0
    const limiter = new Limiter({ query: async () => { sent++; return answer } }, { retry: true })
    await assert.rejects(limiter.acquire('api', 'k'), TypeError)
    assert.equal(sent, 1)
  }
})

test('one connection of a pool is left for others', async (t) => {
  for (const [max, calls] of [[1, 1], [2, 1], [3, 2], [10, 2]]) {
    const gate = new Gate()
    const client = { query: ({ text, values }) => gate.query(text, values), release() {}, on: () => client, off() {} }
    const pool = { options: { max }, totalCount: 0, query() {}, connect: (callback) => callback(null, client) }
    const combiner = new Combiner(pool)
    const answers = keys(0, 100).map((key) => combiner.acquire('api', key))
    await turn()
    await turn()
    assert.equal(gate.open, calls, `of ${max}`)
    await gate.grantAll()
    await Promise.all(answers)
  }
})

test('seconds are never less than the microseconds of the server', async (t) => {
  const { gate, ask } = gated(t)
  for (const us of [0, 1, 249, 300_000, 8_000_001, 2 ** 53 - 1, 3_155_760_000_000_000_001n]) {
    const [answer] = ask('k1')
    await turn()
    await gate.calls.at(-1).grant({ reset_after: String(us) })
    const { resetAfter } = await answer
    assert.ok(resetAfter * 1e6 >= us, `${us} us as ${resetAfter} s`)
    assert.ok(resetAfter * 1e6 <= Number(us) * (1 + 1e-15))
  }
})

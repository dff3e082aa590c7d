import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import http from 'node:http'
import net from 'node:net'
import { tmpdir } from 'node:os'
import test from 'node:test'
import { Closed, Combiner, Limiter, Overloaded, translate } from '../index.js'
import { addressKey, byIP, byUser, decide, limit, limitFetch, per } from '../http.js'
import { definePolicy, defineQuota, eventually, left, listening, pool, vectors } from './kit.js'

/** Serves a handler behind middleware while use asks it, by the headers of a request. */
const serving = (middleware, use) => listening(
  http.createServer((request, response) => middleware(request, response, () => response.end('hello'))),
  (port) => use((headers, method) => fetch(`http://127.0.0.1:${port}/`, { headers, method })),
)

const fields = ({ headers }) => ['ratelimit-policy', 'ratelimit', 'retry-after', 'content-type'].map((name) => headers.get(name))

for (const LimiterKind of [Limiter, Combiner]) {
  test(`${LimiterKind.name}: a request is charged, a denial is 429, and both have the fields`, async () => {
    const policy = await definePolicy(2, 1, '1 hour')
    await serving(limit(new LimiterKind(pool), { charges: per(policy, byIP()), failure: 'closed' }), async (get) => {
      const granted = await get()
      assert.equal(granted.status, 200)
      assert.deepEqual(fields(granted), [`"${policy}";q=2`, `"${policy}";r=1;t=3600`, null, null])
      await get()
      const denied = await get()
      assert.equal(denied.status, 429)
      assert.deepEqual(fields(denied), [`"${policy}";q=2`, `"${policy}";r=0;t=3600`, '3600', 'application/problem+json'])
      assert.deepEqual(await denied.json(), {
        type: 'https://iana.org/assignments/http-problem-types#quota-exceeded', title: 'Request cannot be satisfied as assigned quota has been exceeded',
        status: 429, 'violated-policies': [policy],
      })
    })
    assert.equal(await left(policy, 'ip:127.0.0.1'), 0)
  })
}

test('the next tokens of a quota come at its turn', async () => {
  const policy = await defineQuota(2, '1 day')
  await serving(limit(new Limiter(pool), { charges: per(policy, () => 'k'), failure: 'closed', quotas: [policy] }), async (get) => {
    const { rows: [{ turn }] } = await pool.query("select ceil(extract(epoch from reset_after))::integer as turn from ratelimit_acquire($1, 'k')", [policy])
    const [, t] = /r=0;t=(\d+)$/.exec((await get()).headers.get('ratelimit'))
    assert.ok(turn * 0.75 < Number(t) && Number(t) <= turn, `${t} of ${turn}`)
  })
})

test('several charges are all or nothing, each policy is shown once, and only those that refused are named', async () => {
  const [few, many] = [await definePolicy(1, 1, '1 day'), await definePolicy(5, 1, '1 day')]
  await pool.query('select ratelimit_acquire($1, $2, 3)', [many, 'b'])
  const charges = () => [{ policy: many, key: 'a' }, { policy: many, key: 'b' }, { policy: few, key: 'k', cost: 2 }]
  await serving(limit(new Combiner(pool), { charges, failure: 'closed' }), async (get) => {
    const denied = await get()
    assert.deepEqual(fields(denied).slice(1, 3), [`"${many}";r=2;t=86400, "${few}";r=1;t=1`, null], 'no wait helps')
    assert.deepEqual((await denied.json())['violated-policies'], [few])
  })
  assert.deepEqual([await left(many, 'a'), await left(few, 'k')], [5, 1])
})

test('a request without charges passes', async () => {
  for (const none of [[], null, undefined]) {
    const limited = limit(new Limiter(pool), { charges: async () => none, failure: 'closed', observe: () => assert.fail() })
    await serving(limited, async (get) => assert.deepEqual(fields(await get()), [null, null, null, null]))
  }
})

test('fetch handlers are limited alike', async () => {
  const policy = await definePolicy(1, 1, '1 hour')
  const handler = limitFetch(new Limiter(pool), { charges: per(policy, byIP(1)), failure: 'closed' }, (request, context) => Response.redirect(context, 303))
  const request = new Request('http://localhost/', { headers: { 'X-Forwarded-For': 'forged, 192.0.2.1' } })
  const granted = await handler(request, 'http://localhost/there'), denied = await handler(request)
  assert.deepEqual([granted.status, granted.headers.get('location'), fields(granted)[1]], [303, 'http://localhost/there', `"${policy}";r=0;t=3600`])
  assert.deepEqual([denied.status, ...fields(denied).slice(1)], [429, `"${policy}";r=0;t=3600`, '3600', 'application/problem+json'])
  assert.equal(await left(policy, 'ip:192.0.2.1'), 0)
  assert.throws(() => byIP()(request), /no address/)
})

test('the name of a policy is printable ASCII', async () => {
  const policy = `é "%\\${await definePolicy()}`
  await pool.query("select ratelimit_define_policy($1, 3, 1, '1 day')", [policy])
  await serving(limit(new Limiter(pool), { charges: per(policy, () => 'k'), failure: 'closed' }), async (get) => {
    assert.equal((await get()).headers.get('ratelimit-policy'), `"${policy.replace('é', '%C3%A9').replace('"%', '\\"%25').replace('\\p', '\\\\p')}";q=3`)
  })
})

/** A request without a connection, its response, and whether a handler ran. */
function exchange(headers = {}) {
  const request = Object.assign(new http.IncomingMessage(new net.Socket()), { headers }), response = new http.ServerResponse(request)
  return { request, response, handled: 0, through(limited) { return limited(request, response, () => { this.handled++ }) } }
}

const GRANT = { allowed: true, remaining: 1, retryAfter: 0, resetAfter: 1, capacity: 2, replayed: false, shadowed: false }

/** A limiter whose calls are functions of their number and options. */
function fakeLimiter(answer = () => GRANT) {
  const fake = { calls: 0, acquire: async (_policy, _key, options) => answer(++fake.calls, options), acquireAll: () => assert.fail() }
  return fake
}

const charges = () => [{ policy: 'p', key: 'k' }]
const raised = (code) => Object.assign(new Error('raised'), { code, severity: 'ERROR' })
const failures = JSON.parse(readFileSync(new URL('../../testdata/failures.json', import.meta.url)))

/** The errors of a case, as drivers raise them, and as the clients and an ORM wrap them. undefined: no answer. */
const errorsOf = (name) => ({
  program: [new TypeError('made'), new RangeError('made'), new ReferenceError('made'), new SyntaxError('made')],
  'wrong shard': [], // in Node there are none
  timeout: [undefined],
  refused: [Object.assign(new AggregateError([new Error('connect')]), { code: 'ECONNREFUSED' }), new TypeError('fetch failed', { cause: new Error('connect') })],
  lost: [new Error('Connection terminated unexpectedly'), Object.assign(new Error('write'), { code: 'EPIPE' })],
  overloaded: [new Overloaded('full')],
  closed: [new Closed('closed')],
})[name] ?? [raised(name), translate(raised(name)), new Error('query', { cause: raised(name) }), new AggregateError([raised(name)])]

for (const [form, through] of [
  ['node:http', async (options, limiter) => {
    const { request, response } = exchange(), limited = limit(limiter, options)
    const one = async () => {
      const one = exchange()
      await one.through(limited)
      return one.handled > 0 ? 200 : one.response.statusCode
    }
    return { one, limited }
  }],
  ['fetch', async (options, limiter) => {
    const limited = limitFetch(limiter, options, () => new Response())
    return { one: async () => (await limited(new Request('http://localhost'))).status, limited }
  }],
]) {
  test(`${form}: what an error means is one table, which has ${failures.length} cases`, async (t) => {
    const logged = []
    t.mock.method(console, 'warn', (line) => logged.push(line))
    const cases = []
    for (const row of failures) for (const error of errorsOf(row.error)) for (const failure of ['open', 'closed']) for (const keyed of [false, true]) for (const decided of [false, true]) {
      cases.push({ row, error, failure, keyed, decided })
    }
    await Promise.all(cases.map(async ({ row, error, failure, keyed, decided }, i) => {
      const policy = `case-${i}.`
      const limiter = fakeLimiter((call) => {
        if (decided && call === 1) return GRANT
        if (error) throw error
        return new Promise(() => {})
      })
      const { one, limited } = await through({
        charges: () => [{ policy, key: 'k' }], failure, timeoutMs: error ? 60_000 : 20, ...(keyed && { idempotencyKey: () => 'i' }),
      }, limiter)
      if (decided) assert.equal(await one(), 200)
      const chosen = failure === 'open' ? 200 : 503
      const expected = { fault: keyed ? row.keyed : row.status, setup: decided ? chosen : 500, away: chosen }[row.kind]
      const about = JSON.stringify([row, String(error), failure, keyed, decided])
      assert.equal(await one(), expected, about)
      assert.equal(limiter.calls, Number(decided) + (row.kind === 'setup' ? 2 : 1), about)
      assert.deepEqual([...limited.passed], expected === 200 ? [[policy, 1]] : [], about)
      const lines = logged.filter((line) => line.includes(policy))
      assert.equal(lines.length, 1, about)
      if (row.remedy || row.kind === 'setup') assert.match(lines[0], /Grant|Install|Check|alter role/, about)
    }))
    assert.deepEqual(failures.filter(({ error }) => errorsOf(error).length === 0).map(({ error }) => error), ['wrong shard'])
  })
}

test('an error of the set-up that is over after 0.1 s is none, and one whose second call hangs stands', async () => {
  for (const [second, status] of [[() => GRANT, 200], [() => new Promise(() => {}), 500]]) {
    const limiter = fakeLimiter((call) => { if (call === 1) throw raised('42883'); return second() })
    const limited = limitFetch(limiter, { charges, failure: 'open', timeoutMs: 200, onError() {} }, () => new Response())
    assert.equal((await limited(new Request('http://localhost'))).status, status)
  }
})

test('each kind of error is logged once a minute, for each policy', async (t) => {
  let now = 1e6
  t.mock.method(performance, 'now', () => now)
  const { mock } = t.mock.method(console, 'warn', () => {})
  let code = '53300', policy = 'a'
  const limited = decide(fakeLimiter(() => { throw raised(code) }), { charges: () => [{ policy, key: 'k' }], failure: 'open' })
  for (const [change, lines] of [
    [() => {}, 1], [() => {}, 1], [() => { policy = 'b' }, 2], [() => { code = '28P01' }, 3], [() => { now += 59_999 }, 3], [() => { now += 2 }, 4],
  ]) {
    change()
    await limited({})
    assert.equal(mock.calls.length, lines)
  }
  assert.equal(mock.calls[2].arguments[0], `pgratelimit: a request of b passes without a decision (failure: 'open'): raised (28P01). Check the user and the password of the connection, and pg_hba.conf.`)
  assert.deepEqual([...limited.passed], [['a', 2], ['b', 4]])
})

test('the log names the argument and the remedy, also of a request without a policy or an answer', async (t) => {
  const { mock } = t.mock.method(console, 'warn', () => {}), hangs = fakeLimiter(() => new Promise(() => {}))
  for (const [limiter, options, line] of [
    [new Limiter(pool), { charges: () => [{ key: 'k' }] }, 'is refused with 500: invalid policy. policy is undefined. Pass a string. (22023)'],
    [new Limiter(pool), { charges: () => ({ policy: 'p', key: 'k' }) },
      'is refused with 500: invalid charges. charges is no array of charges. Pass such as [{ policy, key, cost: 1 }]. (22023)'],
    [hangs, { charges, timeoutMs: 1 }, "of p passes without a decision (failure: 'open'): no decision in time. The limiter took longer than 1 ms. " +
      'Raise timeoutMs, or find what it waits for: a lock, a free connection of the pool, or connect() of a Client.'],
  ]) {
    await decide(limiter, { failure: 'open', ...options })({})
    assert.equal(mock.calls.at(-1).arguments[0], `pgratelimit: a request ${line}`)
  }
})

test('a function of the program that throws, or rejects, is 500 or changes nothing, and rejects nothing', async (t) => {
  const { mock } = t.mock.method(console, 'warn', () => {})
  const denial = { ...GRANT, allowed: false, retryAfter: 1 }, away = () => { throw raised('53300') }
  for (const fail of [() => { throw new Error('mine') }, async () => { throw new Error('mine') }, () => { throw undefined }]) {
    for (const [options, status, answer] of [
      [{ charges: fail }, 500], [{ idempotencyKey: fail }, 500], [{ observe: fail }, 200], [{ onError: fail }, 200, away],
      [{ refuseWith: fail }, 500, () => denial], [{ charges: fail, onError: fail, observe: fail, refuseWith: fail }, 500],
    ]) {
      const all = { charges, failure: 'open', ...options }, logged = mock.calls.length, name = Object.keys(options).join()
      const one = exchange()
      await one.through(limit(fakeLimiter(answer), all))
      assert.deepEqual([one.handled, one.response.statusCode, one.response.writableEnded], status === 200 ? [1, 200, false] : [0, 500, true], name)
      const response = await limitFetch(fakeLimiter(answer), all, () => new Response())(new Request('http://localhost'))
      assert.equal(response.status, status, name)
      await new Promise(setImmediate)
      assert.equal(mock.calls.length, logged + 2, name) // one of each
    }
  }
})

test('next is called once: what it throws, or rejects with, is 500, or ends the response that has begun', async () => {
  for (const begins of [false, true]) for (const isAsync of [false, true]) {
    const errors = []
    let runs = 0
    const limited = limit(new Limiter(pool), { charges: () => [], failure: 'closed', onError: (error) => errors.push(error.message) })
    const server = http.createServer((request, response) => limited(request, response, () => {
      runs++
      if (begins) response.write('begun')
      if (isAsync) return Promise.reject(new Error('of the handler'))
      throw new Error('of the handler')
    }))
    await listening(server, async (port) => {
      const asked = fetch(`http://127.0.0.1:${port}/`, { signal: AbortSignal.timeout(10_000) }).then(async (response) => [response.status, await response.text()])
      if (begins) await assert.rejects(asked, TypeError) // the connection has ended
      else assert.deepEqual(await asked, [500, '{"type":"about:blank","title":"Internal Server Error","status":500}\n'])
    })
    assert.deepEqual([runs, errors], [1, ['of the handler']])
  }
})

test('a response whose writeHead throws is destroyed', async () => {
  const one = exchange()
  one.response.writeHead = () => { throw new Error('of other middleware') }
  await one.through(limit(fakeLimiter(() => { throw raised('53300') }), { charges, failure: 'closed', onError() {} }))
  assert.deepEqual([one.handled, one.response.destroyed], [0, true])
})

test('an answer that is no decision is 500, and the handler does not run', async () => {
  for (const answer of [undefined, {}, { ...GRANT, remaining: 'many' }]) {
    const one = exchange()
    await one.through(limit({ acquire: async () => answer, acquireAll: async () => answer }, { charges: () => [...charges(), ...charges()], failure: 'open', onError() {} }))
    assert.deepEqual([one.handled, one.response.statusCode], [0, 500])
  }
})

test('a request that is over, by any sign of it, is not charged', async () => {
  for (const over of [
    [{ socket: { destroyed: true } }], [{ socket: { localAddress: '127.0.0.1' } }], [{ signal: AbortSignal.abort() }],
    ...['headersSent', 'writableEnded', 'destroyed'].flatMap((sign) => [[{}, { [sign]: true }], [{}, { raw: { [sign]: true } }]]), [{}, { stream: { destroyed: true } }],
  ]) {
    const decided = decide({ acquire: assert.fail, acquireAll: assert.fail }, { charges: assert.fail, failure: 'open' })
    assert.equal((await decided(...over)).outcome, 'abandoned', JSON.stringify(over))
  }
  for (const open of [[undefined], [{}], [{ socket: {} }, {}], [{ socket: { localAddress: '::1', remoteAddress: '::1' } }, { raw: {} }]]) {
    assert.equal((await decide(fakeLimiter(), { charges, failure: 'open' })(...open)).outcome, 'allowed')
  }
})

test('a client that has hung up is not charged, and not handled; one of a Unix socket has no address, and is', async () => {
  const policy = await definePolicy(10, 1, '1 day'), events = [], byAddress = per(policy, byIP())
  let inCharges
  const limited = limit(new Limiter(pool), {
    charges: async (request) => { await inCharges?.(request); return byAddress(request) }, failure: 'open', observe: ({ outcome }) => events.push(outcome),
  })
  const reset = (client) => client.resetAndDestroy() // before the server's socket knows of it
  const close = (client, { socket }) => new Promise((resolve) => { socket.once('close', resolve); client.destroy() })
  for (const [hangUp, isInCharges] of [[reset, false], [close, false], [close, true]]) {
    let client
    const server = http.createServer(async (request, response) => {
      if (isInCharges) inCharges = (request) => hangUp(client, request)
      else await hangUp(client, request)
      await limited(request, response, assert.fail)
    })
    await listening(server, async (port) => {
      client = net.connect(port, '127.0.0.1', () => client.write('GET / HTTP/1.1\r\nHost: x\r\n\r\n'))
      await eventually(() => events.length === 1)
      assert.deepEqual(events.splice(0), ['abandoned'], String(hangUp))
    })
  }
  inCharges = undefined
  const gone = new AbortController(), options = { charges: () => [{ policy, key: 'ip:unknown' }], failure: 'open' }
  gone.abort()
  assert.equal((await limitFetch(new Limiter(pool), options, assert.fail)(new Request('http://localhost', { signal: gone.signal }))).status, 503)
  for (const key of ['ip:unknown', 'ip:127.0.0.1']) assert.equal(await left(policy, key), 10)

  const socketPath = `${tmpdir()}/ratelimit-${process.pid}`, server = http.createServer((request, response) => limited(request, response, () => response.end()))
  await listening(server, async () => {
    const answer = await new Promise((resolve, reject) => http.get({ socketPath }, resolve).on('error', reject))
    assert.equal(answer.resume().statusCode, 200)
  }, socketPath)
  assert.equal(await left(policy, 'ip:unknown'), 9)
})

test('a response that cannot be rebuilt is handed on unchanged, and others have the fields', async () => {
  const used = new Response('hello')
  await used.text()
  const locked = new Response('hello')
  locked.body.getReader()
  const withStatus = (status, response = new Response()) => Object.defineProperty(response, 'status', { value: status })
  const unchanged = [Response.error(), withStatus(101), withStatus(0), used, locked, undefined, null, 'text', { status: 200 }]
  const limited = limitFetch(fakeLimiter(), { charges, failure: 'closed', onError: assert.fail }, (_request, response) => response)
  for (const response of unchanged) assert.equal(await limited(new Request('http://localhost'), response), response)

  class Own extends Response { own = 5 }
  const foreign = { status: 200, headers: new Headers(), body: { of: 'another realm' } }, own = new Own('hello')
  for (const response of [own, foreign]) {
    assert.equal(await limited(new Request('http://localhost'), response), response)
    assert.equal(response.headers.get('ratelimit'), '"p";r=1;t=1')
  }
  const once = new Response(null, { status: 204 }), cookies = new Response('hello', { headers: [['Set-Cookie', 'a=1'], ['Set-Cookie', 'b=2']] })
  for (const response of [Response.redirect('http://localhost/there'), once, once, cookies]) {
    const answer = await limited(new Request('http://localhost'), response)
    assert.deepEqual([answer.status, answer.headers.get('ratelimit')], [response.status, '"p";r=1;t=1'])
    assert.deepEqual(answer.headers.getSetCookie(), response.headers.getSetCookie())
  }
})

test('a request is charged once under its idempotency key, and a key that does not fit is 400', async () => {
  const policy = await definePolicy(10, 1, '1 day'), errors = []
  const limited = limit(new Limiter(pool), {
    charges: ({ headers }) => Array(headers.charges ?? 1).fill({ policy, key: 'k', cost: headers.cost }), failure: 'open',
    idempotencyKey: async ({ headers }) => headers.key, onError: (error) => errors.push(error.name),
  })
  const status = async (headers) => {
    const one = exchange(headers)
    await one.through(limited)
    return one.handled > 0 ? 200 : one.response.statusCode
  }
  for (const key of ['a', 'a', 'é'.repeat(256), '', undefined]) assert.equal(await status({ key }), 200)
  assert.equal(await left(policy, 'k'), 6)
  for (const key of ['é'.repeat(257), 'a\0', '\ud800', 5, ['a']]) assert.equal(await status({ key }), 400)
  for (const key of ['b', 'b']) assert.equal(await status({ key, charges: 2 }), 200)
  assert.equal(await left(policy, 'k'), 4)
  assert.equal(await status({ key: 'a', cost: 2 }), 409)
  await pool.query('select ratelimit_settle($1, $2, $3, 0)', [policy, 'k', 'a'])
  assert.equal(await status({ key: 'a' }), 409)
  assert.equal(await left(policy, 'k'), 5)
  assert.deepEqual(errors, [...Array(5).fill('InvalidArgument'), 'IdempotencyMismatch', 'Settled'])
})

test('each decision is observed, and refuseWith writes the refusal', async () => {
  const policy = await definePolicy(1, 1, '1 day'), events = []
  const options = { charges: () => [{ policy, key: 'k' }], failure: 'closed', observe: (...event) => events.push(event) }
  const limited = limit(new Limiter(pool), { ...options, refuseWith: ({ status, problem }, _request, response) => response.writeHead(status).end(problem['violated-policies'][0]) })
  await serving(limited, async (get) => {
    assert.equal((await get()).status, 200)
    const denied = await get()
    assert.deepEqual([denied.status, await denied.text()], [429, policy])
    assert.deepEqual(fields(denied), [`"${policy}";q=1`, `"${policy}";r=0;t=86400`, '86400', null])
  })
  const handler = limitFetch(new Limiter(pool), { ...options, refuseWith: ({ status }) => new Response('slowly', { status }) }, () => assert.fail())
  const request = new Request('http://localhost'), refused = await handler(request, 'context')
  assert.deepEqual([refused.status, await refused.text(), fields(refused)[2]], [429, 'slowly', '86400'])
  assert.deepEqual(events.map(([{ outcome, status, decision }]) => [outcome, status, decision.decisions.length]), [['allowed', 0, 1], ['denied', 429, 1], ['denied', 429, 1]])
  assert.deepEqual(events[2].slice(1), [request, 'context'])
  assert.ok(events.every(([{ durationMs, charges: [{ key }] }]) => durationMs > 0 && key === 'k'))
})

test('a refusal has its length, and of HEAD no body', async () => {
  await serving(limit(fakeLimiter(() => { throw raised('53300') }), { charges, failure: 'closed', onError() {} }), async (get) => {
    const body = '{"type":"about:blank","title":"Service Unavailable","status":503}\n'
    for (const method of ['GET', 'HEAD']) {
      const answer = await get({}, method)
      assert.deepEqual([answer.status, answer.headers.get('content-length'), await answer.text()], [503, String(body.length), method === 'GET' ? body : ''])
    }
  })
})

test('the key of an address is that of the shared vectors', () => {
  for (const { peer, forwarded, proxies, key } of vectors('addresses')) {
    const headers = forwarded.length > 0 ? { 'x-forwarded-for': forwarded.join(', ') } : {}
    assert.equal(byIP(proxies)({ headers, socket: { remoteAddress: peer } }), key)
    if (proxies === 0) assert.equal(addressKey(peer), key)
  }
})

test('an IPv6 prefix is of 1 to 128 bits', () => {
  for (const [ipv6Prefix, key] of [
    [1, 'ip:8000::/1'], [16, 'ip:fe80::/16'], [56, 'ip:fe80:2:3:ff00::/56'], [57, 'ip:fe80:2:3:ff80::/57'], [64, 'ip:fe80:2:3:ffff::/64'],
    [undefined, 'ip:fe80:2:3:ffff::/64'], [127, 'ip:fe80:2:3:ffff:5:6:7:8/127'], [128, 'ip:fe80:2:3:ffff:5:6:7:9/128'],
  ]) {
    assert.equal(addressKey('[fe80:2:3:FFFF:5:6:7:9]:80', { ipv6Prefix }), key)
    for (const trusted of [0, 1]) {
      const request = { headers: { 'x-forwarded-for': 'fe80:2:3:ffff:5:6:7:9' }, socket: { remoteAddress: 'fe80:2:3:ffff:5:6:7:9' } }
      assert.equal(byIP(trusted, { ipv6Prefix })(request), key)
    }
  }
  assert.equal(addressKey('::ffff:192.0.2.1', { ipv6Prefix: 1 }), 'ip:192.0.2.1')
  for (const wrong of [0, 129, -1, 1.5, NaN, '64', null]) assert.throws(() => byIP(0, { ipv6Prefix: wrong }), /from 1 to 128/)
  assert.throws(() => byIP(0, { prefix: 64 }), /has prefix/)
})

test('a user is a key, hashed if it does not fit, and otherwise another key is', () => {
  const key = byUser((request) => request.user, () => 'other')
  assert.equal(key({ user: '42' }), 'user:42')
  assert.equal(key({}), 'other')
  for (const user of ['a\0', 'é'.repeat(254)]) assert.match(key({ user }), /^user-sha256:[0-9a-f]{64}$/)
})

test('an error that a client could provoke, and charges of a wrong shape, are 500, also if the choice is open', async () => {
  const policy = await definePolicy(2, 1, '1 hour')
  const wrong = [{ policy, key: 'k' }, 'text', [null], ['text'], [{ policy }], [{ policy, key: 'k', cost: '5' }], [{ policy, key: 'k', costs: 2 }], [{ policy, key: '\0' }]]
  for (const charges of [[{ policy: 'none', key: 'k' }], ...wrong]) {
    const errors = []
    await serving(limit(new Combiner(pool), { charges: () => charges, failure: 'open', onError: (error) => errors.push(error.name) }), async (get) => {
      const answer = await get()
      assert.equal(answer.status, 500, JSON.stringify(charges))
      assert.doesNotMatch(await answer.text(), /none/)
    })
    assert.deepEqual(errors, [wrong.includes(charges) ? 'InvalidArgument' : 'UnknownPolicy'])
  }
  assert.equal(await left(policy, 'k'), 2)
})

test('middleware is refused what it cannot work with, when it is set up', () => {
  const limiter = new Limiter(pool), handler = () => {}, good = { charges, failure: 'open' }
  for (const [made, error] of [
    [() => limit(pool, good), /first argument/], [() => limit(undefined, good), /first argument/], [() => limit({ acquireAll() {} }, good), /first argument/],
    ...[limit, decide].map((made) => [() => made({ method: 'GET' }, { _events: {} }), /first argument must be a Limiter or a Combiner/]), // app.use(limit)
    ...['1', true, -1, 1.5, NaN, null].map((n) => [() => byIP(n), /^RangeError: byIP: trustedProxies is .+: pass a whole number of proxies, 0 or more$/]),
    [() => per('api'), /key must be/], [() => per('api', byIP), /key must be/], [() => per(undefined, byIP()), /policy must be/],
    ...[-1, 1.5, NaN, '1', null].map((cost) => [() => per('api', byIP(), cost), /cost must be/]),
    [() => byUser(handler), /two functions/], [() => byUser(undefined, handler), /two functions/], [() => byUser(handler, byIP), /two functions/],
    [() => limitFetch(limiter, good), /handler must be/],
  ]) assert.throws(made, error, String(made))
  for (const [options, error] of [
    [undefined, /charges must be a function/], [{}, /charges must be a function/], [{ failure: 'open' }, /charges must be a function/],
    [{ failure: 'open', charges: charges() }, /charges must be a function/], [{ charges }, /choose failure/], [{ charges, failure: true }, /choose failure/],
    [{ ...good, timeout: 1 }, /has timeout/], [{ ...good, Observe: handler }, /has Observe/],
    ...[0, -1, NaN, -Infinity, '500', null, 5n].map((timeoutMs) => [{ ...good, timeoutMs }, /timeoutMs/]),
    ...['onError', 'observe', 'refuseWith', 'idempotencyKey'].flatMap((name) => [5, null, 'text'].map((value) => [{ ...good, [name]: value }, new RegExp(`${name} must be`)])),
    ...['api', [5], {}].map((quotas) => [{ ...good, quotas }, /quotas must be/]),
  ]) {
    assert.throws(() => limit(limiter, options), error)
    assert.throws(() => limitFetch(limiter, options, handler), error)
    if (!options?.refuseWith && options?.refuseWith !== null) assert.throws(() => decide(limiter, options), error)
  }
  assert.throws(() => decide(limiter, { ...good, refuseWith: handler }), /has refuseWith/)
})

test('a timeoutMs of 30 days, or Infinity, does not end at once', async (t) => {
  const { mock } = t.mock.method(globalThis, 'setTimeout')
  for (const timeoutMs of [30 * 86_400_000, Infinity]) {
    const limited = decide(fakeLimiter(), { charges, failure: 'closed', timeoutMs })
    assert.equal((await limited({})).outcome, 'allowed')
    assert.equal(mock.calls.at(-1).arguments[1], 86_400_000) // a timer beyond 24.8 days fires at once
  }
})

import assert from 'node:assert/strict'
import http from 'node:http'
import test from 'node:test'
import { Combiner, InvalidArgument, Limiter } from '../index.js'
import { addressKey, byIP, byUser, limit, limitFetch, per } from '../http.js'
import { connect, definePolicy, defineQuota, left, pool, vectors, withLocked } from './kit.js'

/** Serves a handler behind middleware while use asks it, by the path and headers of a request. */
async function serving(middleware, use) {
  const server = http.createServer((request, response) => {
    middleware(request, response, (error) => response.writeHead(error ? 500 : 200).end(error?.message ?? 'hello'))
  })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  try {
    await use((headers) => fetch(`http://127.0.0.1:${server.address().port}/`, { headers }))
  } finally {
    server.closeAllConnections()
    await new Promise((resolve) => server.close(resolve))
  }
}

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

test('a denial that no wait helps has no Retry-After', async () => {
  const policy = await definePolicy(2, 0, '1 hour')
  await serving(limit(new Limiter(pool), { charges: () => [{ policy, key: 'k', cost: 3 }], failure: 'closed' }), async (get) => {
    const denied = await get()
    assert.deepEqual([denied.status, ...fields(denied).slice(0, 3)], [429, `"${policy}";q=2`, `"${policy}";r=2;t=1`, null])
  })
})

test('several charges are all or nothing, each policy is shown once, and only those that refused are named', async () => {
  const [few, many] = [await definePolicy(1, 1, '1 day'), await definePolicy(5, 1, '1 day')]
  await pool.query('select ratelimit_acquire($1, $2, 3)', [many, 'b'])
  const charges = () => [{ policy: many, key: 'a' }, { policy: many, key: 'b' }, { policy: few, key: 'k', cost: 2 }]
  await serving(limit(new Combiner(pool), { charges, failure: 'closed' }), async (get) => {
    const denied = await get()
    assert.equal(denied.headers.get('ratelimit'), `"${many}";r=2;t=86400, "${few}";r=1;t=1`)
    assert.deepEqual((await denied.json())['violated-policies'], [few])
  })
  assert.deepEqual([await left(many, 'a'), await left(few, 'k')], [5, 1])
})

test('a request without charges passes, and an error of the charges goes to next', async () => {
  const charges = ({ headers }) => {
    if (headers['x-bad']) throw new Error('bad')
    return []
  }
  await serving(limit(new Limiter(pool), { charges, failure: 'closed' }), async (get) => {
    assert.equal((await get()).headers.get('ratelimit'), null)
    const failed = await get({ 'X-Bad': '1' })
    assert.deepEqual([failed.status, await failed.text()], [500, 'bad'])
  })
})

test('without a database a request passes or is refused with 503, as chosen', async () => {
  const nowhere = connect({ host: '/nowhere' })
  for (const [failure, status] of [['open', 200], ['closed', 503]]) {
    const errors = []
    await serving(limit(new Combiner(nowhere), { charges: per('api', byIP()), failure, onError: (error) => errors.push(error.code) }), async (get) => {
      const answer = await get()
      assert.deepEqual([answer.status, fields(answer)[0]], [status, null])
      assert.deepEqual(errors, ['ENOENT'])
    })
  }
})

test('a database that does not answer in time is as good as none', async () => {
  const policy = await definePolicy()
  await withLocked(policy, 'k', () =>
    serving(limit(new Limiter(pool), { charges: () => [{ policy, key: 'k' }], failure: 'closed', timeout: 0.05, onError() {} }), async (get) => {
      assert.equal((await get()).status, 503)
    }))
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

test('the key of an address is that of the shared vectors', () => {
  for (const { peer, forwarded, proxies, key } of vectors('addresses')) {
    const headers = forwarded.length > 0 ? { 'x-forwarded-for': forwarded.join(', ') } : {}
    assert.equal(byIP(proxies)({ headers, socket: { remoteAddress: peer } }), key)
    if (proxies === 0) assert.equal(addressKey(peer), key)
  }
})

test('a user is a key, hashed if it does not fit, and otherwise another key is', () => {
  const key = byUser((request) => request.user, () => 'other')
  assert.equal(key({ user: '42' }), 'user:42')
  assert.equal(key({}), 'other')
  for (const user of ['a\0', 'é'.repeat(254)]) assert.match(key({ user }), /^user-sha256:[0-9a-f]{64}$/)
})

test('an error that a client could provoke, and charges of a wrong shape, are 500, also if the choice is open', async () => {
  const policy = await definePolicy(2, 1, '1 hour')
  const wrong = [{ policy, key: 'k' }, 'text', [null], ['text'], [{ policy }], [{ policy, key: 'k', cost: '5' }], [{ policy, key: '\0' }]]
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

test('middleware is refused what it cannot work with', () => {
  for (const made of [() => limit(pool, { charges: () => [], failure: 'open' }), () => per('api'), () => per('api', byIP)]) {
    assert.throws(made, TypeError)
  }
  assert.throws(() => limit(new Limiter(pool), { charges: () => [] }), /choose failure/)
  assert.throws(() => limitFetch(new Limiter(pool), { failure: 'open' }, () => {}), /charges must be a function/)
})

test('options that no method knows are refused', async () => {
  const policy = await definePolicy(2, 1, '1 hour'), limiter = new Limiter(pool)
  for (const options of [5, null, { cots: 2 }, { idempotency_key: 'i' }]) {
    await assert.rejects(limiter.acquire(policy, 'k', options), InvalidArgument, JSON.stringify(options))
  }
  assert.throws(() => new Combiner(pool, { callTimeOut: 1 }), /has callTimeOut/)
  assert.equal(await left(policy, 'k'), 2)
})

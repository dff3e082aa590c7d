// The middleware in the frameworks of others, and the recipes of docs/http.md.
import assert from 'node:assert/strict'
import { readFileSync, rmSync, writeFileSync } from 'node:fs'
import http from 'node:http'
import http2 from 'node:http2'
import test from 'node:test'
import { createAdaptorServer } from '@hono/node-server'
import connect from 'connect'
import cors from 'cors'
import express from 'express'
import express4 from 'express-4'
import fastify from 'fastify'
import { Hono } from 'hono'
import { limit, per } from '../http.js'
import { Limiter } from '../index.js'
import { definePolicy, eventually, left, listening, pool, stuck, withLocked } from './kit.js'

const limiter = new Limiter(pool)
const bare = () => { // the middleware in their order, without a framework
  const used = []
  const run = (i, request, response) => used[i]?.(request, response, () => run(i + 1, request, response))
  return Object.assign((request, response) => void run(0, request, response), { use: (middleware) => used.push(middleware) })
}
const frameworks = { 'Express 5': express, 'Express 4': express4, Connect: connect, 'node:http': bare, 'node:http, HTTP/2': bare }
const serverOf = (name, app) => name.endsWith('HTTP/2') ? http2.createServer(app) : http.createServer(app)

/** Asks by the protocol of the server. status is undefined after a hang-up. */
function open(name, port) {
  const session = name.endsWith('HTTP/2') ? http2.connect(`http://127.0.0.1:${port}`) : undefined
  const request = session?.request({}) ?? http.get({ port, host: '127.0.0.1', agent: false })
  const status = new Promise((resolve) => {
    request.on('response', (answer) => resolve(answer[':status'] ?? answer.resume().statusCode)).on('error', () => {}).on('close', resolve)
  }).finally(() => session?.close())
  if (session) request.resume()
  return { status, hangUp: () => session ? request.close(http2.constants.NGHTTP2_CANCEL) : request.destroy() }
}

for (const [name, framework] of Object.entries(frameworks)) {
  test(`${name}: a request that was answered, or whose client left, while the limiter waited is left alone, and stays charged`, async () => {
    for (const [end, expected] of [
      [(response) => { response.writeHead(503); response.end() }, 503], [(response) => { response.writeHead(503); response.flushHeaders() }, 503],
      [async (response, hangUp) => { hangUp(); await new Promise((resolve) => response.once('close', resolve)) }, undefined],
    ]) {
      const policy = await definePolicy(10, 1, '1 day'), app = framework(), events = []
      const limited = limit(limiter, { charges: per(policy, () => 'k'), failure: 'open', timeoutMs: 60_000, observe: (event) => events.push(event) })
      let begun, done
      app.use((_request, response, next) => { begun = response; next() })
      app.use((...exchange) => { done = limited(...exchange); return done })
      app.use(() => assert.fail('handled'))
      await listening(serverOf(name, app), (port) => withLocked(policy, 'k', async (unlock) => {
        const { status, hangUp } = open(name, port)
        await eventually(async () => (await stuck('ratelimit_acquire')).length === 1)
        await end(begun, hangUp)
        assert.equal(await status, expected)
        await unlock()
        await done
        assert.deepEqual(events.map(({ outcome, decision }) => [outcome, decision.allowed]), [['abandoned', true]])
        assert.equal(begun.getHeader('ratelimit'), undefined)
        begun.end()
      }))
      assert.equal(await left(policy, 'k'), 8)
    }
  })

  test(`${name}: a handler that throws is 500, and runs once`, async () => {
    const fail = () => { throw new Error('of the handler') }, awaits = !['Express 4', 'Connect'].includes(name)
    for (const handler of [fail, ...(awaits ? [async () => fail()] : [])]) {
      const app = framework()
      let runs = 0
      app.use(limit(limiter, { charges: () => [], failure: 'open', onError() {} }))
      app.use(() => { runs++; return handler() })
      app.use(() => assert.fail('next was called twice'))
      await listening(serverOf(name, app), async (port) => assert.equal(await open(name, port).status, 500))
      assert.equal(runs, 1)
    }
  })
}

/** Makes what a recipe of docs/http.md makes of app, with a policy in place of "api". */
async function cook(framework, app, policy) {
  const text = readFileSync(new URL('../../../docs/http.md', import.meta.url), 'utf8')
  const recipe = [...text.matchAll(/^```js\n(.*?)^```$/gms)].map(([, block]) => block).find((block) => block.includes(framework))
  const file = new URL(`recipe-${policy}.mjs`, import.meta.url) // beside the packages that it imports
  const [imports, rest] = recipe.split('\n\n')
  writeFileSync(file, `${imports}\nexport default async (app, limiter) => {\n${rest.replaceAll("'api'", `'${policy}'`)}}\n`)
  try {
    await (await import(file)).default(app, limiter)
  } finally {
    rmSync(file)
  }
}

for (const [name, serving] of Object.entries({
  Express: async (policy, use) => {
    const app = express().use(cors({ exposedHeaders: ['RateLimit', 'RateLimit-Policy', 'Retry-After'] }), limit(limiter, { charges: per(policy, () => 'ip:127.0.0.1'), failure: 'open' }))
    await listening(http.createServer(app.get('/', (_request, response) => response.send('hello'))), use)
  },
  Fastify: async (policy, use) => {
    const app = fastify()
    await cook('@fastify/cors', app, policy)
    app.get('/', async () => 'hello')
    await app.listen({ port: 0, host: '127.0.0.1' })
    await use(app.server.address().port).finally(() => app.close())
  },
  Hono: async (policy, use) => {
    const app = new Hono()
    await cook('hono/cors', app, policy)
    app.get('/', (c) => c.text('hello'))
    await listening(createAdaptorServer({ fetch: app.fetch }), use)
  },
})) {
  test(`${name}: a refusal has the fields of CORS, as an answer has`, async () => {
    const policy = await definePolicy(1, 1, '1 hour')
    await serving(policy, async (port) => {
      const get = () => fetch(`http://127.0.0.1:${port}/`, { headers: { Origin: 'http://example.org' } })
      const answer = await get(), refusal = await get()
      assert.deepEqual([answer.status, await answer.text(), refusal.status], [200, 'hello', 429])
      for (const { headers } of [answer, refusal]) {
        assert.equal(headers.get('access-control-allow-origin'), '*')
        assert.match(headers.get('access-control-expose-headers'), /RateLimit, ?RateLimit-Policy, ?Retry-After/)
        assert.deepEqual([headers.get('ratelimit'), headers.get('ratelimit-policy')], [`"${policy}";r=0;t=3600`, `"${policy}";q=1`])
      }
      assert.equal(refusal.headers.get('retry-after'), '3600')
      assert.match(refusal.headers.get('content-type'), /^application\/problem\+json\b/)
      assert.deepEqual((await refusal.json())['violated-policies'], [policy])
    })
    assert.equal(await left(policy, 'ip:127.0.0.1'), 0)
  })
}

test('Fastify: the recipe leaves a request alone that a time-out has answered', async () => {
  const policy = await definePolicy(10, 1, '1 day'), warnings = [], log = { stream: { write: (line) => warnings.push(line) }, level: 'warn' }
  const app = fastify({ logger: log })
  let begun
  app.addHook('onRequest', async (_request, reply) => { begun = reply })
  await cook('@fastify/cors', app, policy)
  app.get('/', () => assert.fail('handled'))
  await app.listen({ port: 0, host: '127.0.0.1' })
  await withLocked(policy, 'ip:127.0.0.1', async (unlock) => {
    const asked = fetch(`http://127.0.0.1:${app.server.address().port}/`)
    await eventually(async () => (await stuck('ratelimit_acquire')).length === 1)
    begun.raw.writeHead(503).end()
    assert.equal((await asked).status, 503)
    await unlock()
    await eventually(() => begun.sent)
  })
  await eventually(async () => await left(policy, 'ip:127.0.0.1') === 8)
  await app.close()
  assert.deepEqual(warnings, [])
})

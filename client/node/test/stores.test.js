// The stores in the libraries that they are for.
import assert from 'node:assert/strict'
import { fork, spawn } from 'node:child_process'
import { once } from 'node:events'
import { readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import test from 'node:test'
import { fileURLToPath } from 'node:url'
import typescript from 'typescript'
import { NestStorage, PostgresStore, fastifyStore } from '../stores.js'
import { asNobody, connect, definePolicy, eventually, left, listening, pool } from './kit.js'
import { programs } from './limited.js'

const HOUR = 3_600_000
const away = () => connect({ host: '127.0.0.1', port: 1 })
let limits = 1000
const newLimit = () => ++limits // its policy is new, because numbers name it

/** Runs use while processes serve the program of a library. */
async function serving(library, limit, processes, use, ...more) {
  const children = Array.from({ length: processes }, () => fork(new URL('limited.js', import.meta.url), [library, limit, HOUR, ...more]))
  try {
    const ended = (child) => once(child, 'exit').then(([code]) => Promise.reject(new Error(`${library} has ended with ${code}`)))
    const ports = children.map((child) => Promise.race([once(child, 'message').then(([port]) => port), ended(child)]))
    return await use(await Promise.all(ports))
  } finally {
    for (const child of children) child.kill()
  }
}

/** Asks a program so many times, one after another, and returns the answers. */
async function ask(program, path, times) {
  const answers = []
  await listening(await program, async (port) => {
    for (const _ of Array(times)) answers.push(await fetch(`http://127.0.0.1:${port}${path}`))
  })
  return answers
}

const statuses = (answers) => answers.map(({ status }) => status)
const fields = ({ headers }) => ['limit', 'remaining', 'reset'].map((name) => headers.get(`x-ratelimit-${name}`))

function started(limit, options, windowMs = HOUR) {
  const store = new PostgresStore(pool, options)
  store.init({ limit, windowMs })
  return store
}

for (const library of Object.keys(programs)) {
  test(`${library}: of 200 parallel requests to two processes exactly the limit passes, and a restart forgets none`, async () => {
    const limit = 50 + Object.keys(programs).indexOf(library)
    const passed = async (ports) => {
      const answers = await Promise.all(Array.from({ length: 200 }, (_, i) => fetch(`http://127.0.0.1:${ports[i % ports.length]}/`)))
      assert.deepEqual([...new Set(statuses(answers))].sort().filter((status) => status !== 200), [429])
      return answers.filter(({ ok }) => ok).length
    }
    assert.equal(await serving(library, limit, 2, passed), limit)
    assert.equal(await serving(library, limit, 1, passed), 0)
  })

  test(`${library}: without a database a request is an error, as of any store that throws`, async () => {
    assert.deepEqual(statuses(await ask(programs[library](away(), 5, HOUR), '/', 1)), [500])
  })
}

test('express-rate-limit and @fastify/rate-limit let requests pass without a database if they are told to', async () => {
  const logger = { error() {}, warn() {} }
  assert.deepEqual(statuses(await ask(programs.express(away(), 5, HOUR, { passOnStoreError: true, logger }), '/', 1)), [200])
  assert.deepEqual(statuses(await ask(programs.fastify(away(), 5, HOUR, { skipOnError: true }), '/', 1)), [200])
})

test('a store counts the hits of a key, and denied ones above the limit', async () => {
  const limit = newLimit(), store = started(limit), begin = Date.now()
  assert.deepEqual([store.localKeys, store.prefix, await store.get('k')], [false, '', undefined])
  const { totalHits, resetTime } = await store.increment('k')
  assert.equal(totalHits, 1)
  assert.ok(begin + HOUR <= resetTime.getTime() && resetTime.getTime() <= Date.now() + HOUR)
  await pool.query("select ratelimit_charge($1, 'k', $2)", [`${limit} per ${HOUR} ms`, limit - 2])
  const hits = []
  for (const _ of Array(3)) hits.push((await store.increment('k')).totalHits)
  assert.deepEqual([hits, (await store.get('k')).totalHits], [[limit, limit + 1, limit + 2], limit])
  assert.equal((await store.increment('other')).totalHits, 1)
  assert.equal((await started(limit, { prefix: 'p:' }).increment('k')).totalHits, 1, 'another prefix')
  for (const _ of Array(3)) await store.decrement('k') // two denials, which took nothing, and a hit
  assert.equal((await store.get('k')).totalHits, limit - 1)
  await store.resetKey('k')
  assert.deepEqual([await store.get('k'), (await store.get('other')).totalHits], [undefined, 1])
  await store.resetAll()
  assert.equal(await store.get('other'), undefined)
})

test('a window ends, and denials with it', async () => {
  const store = started(1, {}, 2000)
  const { resetTime } = await store.increment('k')
  if ((await store.increment('k')).totalHits === 1) return // on a machine that took 2 s
  await eventually(() => Date.now() > resetTime.getTime())
  assert.deepEqual([(await store.increment('k')).totalHits, (await store.increment('k')).totalHits], [1, 2])
})

test('a policy of your own has its own limit, also for keys, and for a limit that is a function', async () => {
  const policy = await definePolicy(1, 1, '1 hour', true), store = started(() => 5, { policy })
  await pool.query("select ratelimit_override($1, 'paying', capacity => 3, refill => 3)", [policy])
  assert.equal((await store.increment('k')).totalHits, 1)
  assert.ok((await store.increment('k')).totalHits > 1e9)
  const more = started(1, { policy }), hits = []
  for (const _ of Array(4)) hits.push((await more.increment('paying')).totalHits)
  assert.deepEqual(hits, [1, 1, 1, 2], 'above the limit of 1 when its three tokens are taken')
  await assert.rejects(started(() => 5).increment('k'), /invalid limit\. limit is no number: functions are not read/)
  for (const windowMs of ['1 minute', NaN, undefined, 0]) {
    const unlimited = new PostgresStore(pool)
    unlimited.init({ limit: 5, windowMs })
    await assert.rejects(unlimited.increment('k'), /invalid windowMs\. windowMs is .+\. Pass a number of milliseconds, above 0\./)
  }
  await assert.rejects(started(5, { policy: 'none' }).increment('k'), { code: 'RL001' })
  assert.throws(() => new PostgresStore(pool, { windowMs: 5 }), /has windowMs/)
})

test('a limit that is not the capacity of its policy is an error, until it was', async () => {
  const policy = await definePolicy(3, 3, '1 hour', true)
  for (const library of ['express', 'hono', 'fastify']) {
    const store = library === 'fastify' ? fastifyStore(pool, { policy }) : new PostgresStore(pool, { policy })
    const [answer] = await ask(programs[library](pool, 5, HOUR, { store }), '/', 1)
    assert.equal(answer.status, 500)
    assert.match(await answer.text(), /limit is 5, but the policy .* has capacity 3\. Pass 3, or define the policy with capacity 5\./)
  }
  const nest = new NestStorage(pool, { policy })
  await assert.rejects(nest.increment('k', HOUR, 2, HOUR, 'default'), /limit is 2, but the policy .* has capacity 3/)
  await pool.query("select ratelimit_override($1, 'paying', capacity => 2, refill => 2)", [policy])
  await assert.rejects(started(5, { policy }).increment('paying'), /has capacity 3/)
  const store = started(3, { policy })
  await store.get('k')
  await pool.query("select ratelimit_define_policy($1, 5, 5, '1 hour', stepped => true)", [policy])
  assert.ok((await store.increment('k')).totalHits > 0, 'a policy that is changed later decides')
})

test('a connection that breaks while it is idle ends no program', async (t) => {
  const { mock } = t.mock.method(console, 'warn', () => {}), own = connect().removeAllListeners('error'), store = new PostgresStore(own)
  store.init({ limit: newLimit(), windowMs: HOUR })
  await store.increment('k')
  const { rows: [{ pid }] } = await own.query('select pg_backend_pid() as pid')
  await pool.query('select pg_terminate_backend($1)', [pid])
  await eventually(() => mock.callCount() > 0)
  assert.match(mock.calls[0].arguments[0], /an idle connection broke: terminating connection/)
  assert.equal((await store.increment('k')).totalHits, 2)
})

test('any key is counted, and a limit of 0 denies all', async () => {
  const store = started(newLimit())
  for (const key of ['k'.repeat(600), 'a\0b', '\ud800']) assert.equal((await store.increment(key)).totalHits, 1)
  assert.equal((await store.increment('k'.repeat(601))).totalHits, 1)
  assert.equal((await started(0).increment('k')).totalHits, 1)
})

test('a role that may not define the policy gets the statement for its owner, and needs only one function then', () => asNobody(async (own, name) => {
  await pool.query(`grant execute on function ratelimit_acquire, ratelimit_acquire_packed to "${name}"`)
  const store = new PostgresStore(own)
  store.init({ limit: newLimit(), windowMs: HOUR })
  const { code, hint, cause } = await store.increment('k').catch((error) => error)
  assert.equal(code, 'RL001')
  assert.match(cause.hint, /grant execute on function ratelimit_define_policy to <role>/)
  await pool.query(/^Its owner can run: (select ratelimit_define_policy\(.*\);)$/.exec(hint)[1])
  assert.equal((await store.increment('k')).totalHits, 1)
  await assert.rejects(store.resetKey('k'), { hint: /grant execute on function ratelimit_reset\(text, text\)/ })
}))

test('express-rate-limit: a failed request is given back, and a denial gives nothing back', async () => {
  const limit = 2, policy = await definePolicy(limit, limit, '1 hour', true)
  const program = (key) =>
    programs.express(pool, limit, HOUR, { store: new PostgresStore(pool, { policy }), skipFailedRequests: true, keyGenerator: () => key })
  const answers = await ask(program('k'), '/', 5), [first, , denied] = answers
  assert.deepEqual(statuses(answers), [200, 200, 429, 429, 429])
  assert.match(first.headers.get('ratelimit'), /^limit=2, remaining=1, reset=3600$/)
  assert.ok(Number(denied.headers.get('retry-after')) > 3500)
  assert.deepEqual(statuses(await ask(program('other'), '/none', 5)), Array(5).fill(404))
  await eventually(async () => await left(policy, 'other') === limit)
})

test('hono-rate-limiter: a successful request is given back, and a denial gives nothing back', async () => {
  const policy = await definePolicy(2, 2, '1 hour', true), store = new PostgresStore(pool, { policy })
  assert.deepEqual(statuses(await ask(programs.hono(pool, 2, HOUR, { store, skipSuccessfulRequests: true }), '/none', 4)), [404, 404, 429, 429])
  assert.equal(await left(policy, 'of hono'), 0)
  await store.resetKey('of hono')
  assert.deepEqual(statuses(await ask(programs.hono(pool, 2, HOUR, { store, skipSuccessfulRequests: true }), '/', 4)), Array(4).fill(200))
})

test('@fastify/rate-limit: routes count apart, a ban follows denials, and what no window does is refused', async () => {
  const store = fastifyStore(pool, { prefix: 'apart ' })
  const own = await ask(programs.fastify(pool, 60, HOUR, { store, ban: 2 }), '/own', 4)
  assert.deepEqual(statuses(own), [200, 429, 429, 403])
  assert.deepEqual(fields(own[0]), ['1', '0', '3600'])
  const app = await programs.fastify(pool, 60, HOUR, { store })
  assert.equal((await ask(app, '/', 1))[0].headers.get('x-ratelimit-remaining'), '59')
  const read = await new Promise((resolve) => new store({}).read('127.0.0.1', (_error, found) => resolve(found), HOUR, 60))
  assert.equal(read.current, 1)
  await assert.rejects(programs.fastify(pool, 5, HOUR, { continueExceeding: true }), /continueExceeding is not supported/)
})

test('@nestjs/throttler: a denial has Retry-After, and a block that ends elsewhere than its window is refused', async () => {
  const answers = await ask(programs.nest(pool, 3, HOUR), '/', 4)
  assert.deepEqual(statuses(answers), [200, 200, 200, 429])
  assert.deepEqual(fields(answers[0]), ['3', '2', '3600'])
  assert.ok(Number(answers[3].headers.get('retry-after')) > 3500)
  const increment = (blockDuration) => new NestStorage(pool).increment('k', 60_000, 7, blockDuration, 'default')
  assert.deepEqual(await increment(60_000), { totalHits: 1, timeToExpire: 60, isBlocked: false, timeToBlockExpire: 0 })
  await assert.rejects(increment(HOUR), /invalid blockDuration/)
})

const page = readFileSync(new URL('../../../docs/frameworks.md', import.meta.url), 'utf8')
const readme = readFileSync(new URL('../../../README.md', import.meta.url), 'utf8')

/** A program of the page without the lines that begin with a sign, and how many have the other sign. */
function programOf(section, without, other) {
  const [, diff] = new RegExp(`^## ${section}\n\n\`\`\`text\n(.*?)^\`\`\``, 'ms').exec(page), lines = diff.split('\n')
  return [lines.filter((line) => line[0] !== without).map((line) => line.slice(2)).join('\n'), lines.filter((line) => line[0] === other).length]
}

for (const section of ['Express', 'NestJS']) {
  test(`${section}: the lines of docs/frameworks.md bring a program into PostgreSQL`, async () => {
    const passes = async (without, other, times) => {
      const [text, lines] = programOf(section, without, other)
      const options = { compilerOptions: { module: 'es2022', target: 'es2022', experimentalDecorators: true, emitDecoratorMetadata: true } }
      const file = new URL(`page-${section}.mjs`, import.meta.url) // beside the packages that it imports
      const started = text.replace('60_000', HOUR).replace(/^(await )?app\.listen\(3000\)/m, "const server = await app.listen(0, '127.0.0.1')")
      const end = "if (!server.listening) await new Promise((done) => server.on('listening', done))\nconsole.log('port', server.address().port)\n"
      writeFileSync(file, `import 'reflect-metadata'\n${typescript.transpileModule(started, options).outputText}\n${end}`)
      const child = spawn('node', [fileURLToPath(file)], { stdio: ['ignore', 'pipe', 'inherit'] })
      try {
        const port = await new Promise((resolve, reject) => {
          createInterface(child.stdout).on('line', (line) => line.startsWith('port ') && resolve(line.slice(5)))
          child.on('exit', reject)
        })
        const answers = []
        for (let i = 0; i < times; i++) answers.push((await fetch(`http://127.0.0.1:${port}/`)).status)
        return [answers.filter((status) => status === 200).length, answers.at(-1), lines]
      } finally {
        child.kill()
        rmSync(file)
      }
    }
    assert.deepEqual(await passes('+', '-', 101), [100, 429, 1])
    assert.deepEqual(await passes('-', '+', 60), [60, 200, 3])
    assert.deepEqual(await passes('-', '+', 41), [40, 429, 3], 'a restart forgets none')
  })
}

test('each line of the table of README.md for Node.js runs', async () => {
  const [{ rateLimit }, { rateLimiter }, fastify, { ThrottlerModule }] = await Promise.all(
    ['express-rate-limit', 'hono-rate-limiter', '@fastify/rate-limit', '@nestjs/throttler'].map((name) => import(name)))
  const names = { rateLimit, rateLimiter, ThrottlerModule, PostgresStore, NestStorage, fastifyStore, pool, keyGenerator: () => 'k' }
  for (const [library, more] of Object.entries({
    'express-rate-limit': {}, 'hono-rate-limiter': {}, '@nestjs/throttler': {},
    '@fastify/rate-limit': { rateLimit: fastify.default, app: (await import('fastify')).default() },
  })) {
    const [, code] = new RegExp(`^\\| ${library} \\| \`(.*)\` \\|$`, 'm').exec(readme), all = { ...names, ...more }
    assert.ok(await Function(...Object.keys(all), `return ${code}`)(...Object.values(all)), library)
  }
})

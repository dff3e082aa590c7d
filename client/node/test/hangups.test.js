// It goes on for RATELIMIT_TORTURE_MINUTES.
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import http from 'node:http'
import { text } from 'node:stream/consumers'
import test from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { limit } from '../http.js'
import { Limiter } from '../index.js'
import { connect, definePolicy, left, pool, whileOpen } from './kit.js'

const CAPACITY = 1_000_000
const A_SECOND = 200 // requests

/** The process: a time-out middleware, and the limiter behind it. Its standard input ends it. */
function serve(policy) {
  const limiter = new Limiter(connect()), outcomes = {}
  let granted = 0, underWay = 0

  const limited = limit(limiter, {
    charges: () => [{ policy, key: 'k' }], failure: 'closed', timeoutMs: 60_000,
    observe({ outcome, decision }) {
      outcomes[outcome] = (outcomes[outcome] ?? 0) + 1
      if (decision?.allowed) granted++
    },
  })

  const server = http.createServer(async (request, response) => {
    const late = request.url === '/' && setTimeout(() => { response.writeHead(503); response.end() }, 30)
    response.on('close', () => clearTimeout(late))
    underWay++
    await limited(request, response, () => { clearTimeout(late); response.end('hello') })
    underWay--
  })

  server.listen(0, '127.0.0.1', () => process.send(server.address()))
  process.stdin.resume().on('end', async () => {
    server.closeAllConnections()
    while (underWay > 0) await new Promise(setImmediate)
    process.send({ granted, outcomes }, () => process.exit(0))
  })
}

if (process.argv[2]) serve(process.argv[2])
else test('200 requests a second, whose clients hang up or are answered by a time-out, end no process, reject nothing, and tokens are exact', async (t) => {
  const policy = await definePolicy(CAPACITY, 0), seconds = 60 * Number(process.env.RATELIMIT_TORTURE_MINUTES || 4 / 60)
  const server = spawn(process.execPath, [fileURLToPath(import.meta.url), policy], { stdio: ['pipe', 'pipe', 'pipe', 'ipc'] })
  const ended = new Promise((resolve) => server.once('exit', (...how) => resolve(how))), errors = text(server.stderr)
  server.stdout.resume()
  t.after(() => server.kill())
  const { port } = await new Promise((resolve, reject) => server.once('message', resolve).once('exit', (code) => reject(new Error(`exit code ${code}`))))

  let hangUps = 0, isOver = false
  const statuses = {}
  await (await fetch(`http://127.0.0.1:${port}/patient`)).text() // one that is allowed, however slow the machine is
  const ask = () => new Promise((resolve) => {
    const request = http.get({ port, host: '127.0.0.1', agent: false }, (response) => {
      statuses[response.statusCode] = (statuses[response.statusCode] ?? 0) + 1
      response.on('error', resolve).on('close', resolve).resume()
    })
    request.on('error', resolve).on('close', resolve)
    if (Math.random() < 0.5) return
    const hangUp = () => {
      if (request.closed) return
      hangUps++
      if (Math.random() < 0.5) request.destroy()
      else request.socket?.resetAndDestroy()
    }
    if (Math.random() < 0.5) request.once('finish', hangUp) // before the answer, however slow the machine is
    else setTimeout(hangUp, Math.random() * 60)
  })
  const locking = (async () => { // so that requests wait, and their clients leave meanwhile
    while (!isOver) {
      await whileOpen('select ratelimit_acquire($1, $2)', [policy, 'k'], () => sleep(Math.random() * 60))
      await sleep(Math.random() * 100)
    }
  })()
  const asked = [], begin = performance.now()
  while (performance.now() - begin < seconds * 1000) {
    while (asked.length < A_SECOND * (performance.now() - begin) / 1000) asked.push(ask())
    await sleep(5)
  }
  await Promise.all(asked)
  isOver = true
  await locking
  const result = new Promise((resolve) => server.once('message', resolve))
  server.stdin.end()
  const { granted, outcomes } = await Promise.race([result, ended.then(async (how) => assert.fail(`${how} ${await errors}`))])
  const [code] = await ended, taken = CAPACITY - await left(policy, 'k')
  t.diagnostic(JSON.stringify({ seconds, requests: asked.length, hangUps, statuses, outcomes, code, granted, taken }))
  assert.deepEqual([code, await errors], [0, '']) // an unhandled rejection would end the process with 1
  assert.equal(taken, granted)
  assert.ok(hangUps > asked.length / 10 && outcomes.abandoned > 0 && outcomes.allowed > 0 && statuses[503] > 0, JSON.stringify({ hangUps, outcomes, statuses }))
})

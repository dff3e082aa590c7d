// A process of outgoing_test.go: it shares the buckets of the upstream with the others.
import { AsyncLocalStorage } from 'node:async_hooks'
import { createRequire } from 'node:module'
import { Limiter } from '../../client/node/index.js'
import { limitedFetch } from '../../client/node/outgoing.js'

const { Pool } = createRequire(new URL('../../client/node/', import.meta.url))('pg')
const { Name, Upstream, Fewest, Most } = JSON.parse(process.env.RATELIMIT_TEST_OUTGOING)

/** Returns a fetch that waits for a request, and for the tokens that it is estimated to use. */
const newUpstream = (limiter, options) => limitedFetch(limiter, {
  charges: (url, { estimate }) => [
    { policy: 'requests', key: 'account' },
    { policy: 'tokens', key: 'account', cost: estimate },
  ],
  ...options,
})

const request = new AsyncLocalStorage(), now = () => Date.now() * 1000

/** Notes when tokens are asked for, and tells the upstream when a pause is committed. */
class Noting extends Limiter {
  async acquireAll(charges) {
    request.getStore().asked = now()
    return super.acquireAll(charges)
  }

  async pause(...args) {
    await super.pause(...args)
    await fetch(`${Upstream}/paused?at=${now()}`, { method: 'POST' })
  }
}

const between = (fewest, most) => fewest + Math.floor(Math.random() * (most - fewest + 1))
const pool = new Pool(), limiter = new Noting(pool), stop = new AbortController()
const upstream = newUpstream(limiter, {
  fetch: (url, init) => fetch(`${url}&asked=${request.getStore().asked}`, init),
})

async function call() {
  const use = between(Fewest, Most), estimate = between(use, 2 * use)
  const response = await upstream(`${Upstream}?process=${Name}&tokens=${use}`, { method: 'POST', estimate, signal: stop.signal })
  await response.arrayBuffer()
  const used = response.headers.get('Used')
  if (used) await limiter.refund('tokens', 'account', estimate - Number(used))
}

async function caller() {
  while (!stop.signal.aborted) {
    await request.run({}, call).catch((error) => { if (!stop.signal.aborted) throw error })
  }
}

process.stdin.on('end', () => stop.abort()).resume()
await Promise.all(Array.from({ length: 10 }, caller))
await pool.end()

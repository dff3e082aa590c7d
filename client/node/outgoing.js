// Limits for requests to an upstream. The functions are explained in outgoing.d.ts.

import { unless } from './lib/database.js'
import { TooLate } from './lib/errors.js'
import { sleep } from './lib/limiter.js'

export function limitedFetch(limiter, { charges: chargesOf, maxPause = 3600, pauseFor = retryAfter, fetch: send = globalThis.fetch, onError = warn } = {}) {
  if (typeof limiter?.pause !== 'function') throw new TypeError('limitedFetch: the first argument must be a Limiter or a Combiner')
  if (typeof chargesOf !== 'function') throw new TypeError('limitedFetch: charges must be a function of the request')
  const lines = new Map() // by the names of the buckets, when the last request has left
  return async (input, init) => {
    const charges = await chargesOf(input, init)
    if (charges == null || charges.length === 0) return send(input, init)
    const signal = init?.signal ?? input?.signal
    const name = JSON.stringify(charges.map(({ policy, key }) => [policy, key]))
    await inLine(lines, name, signal, () => take(limiter, charges, signal))
    const response = await send(input, init)
    const seconds = Math.min(pauseFor(response), maxPause)
    if (seconds > 0) await limiter.pause(charges[0].policy, charges[0].key, Math.max(seconds, 0.001)).catch(onError)
    return response
  }
}

/** Runs use when all earlier requests with the same buckets have left the line. */
async function inLine(lines, name, signal, use) {
  signal?.throwIfAborted()
  const before = lines.get(name)
  let leave
  const left = Promise.all([before, new Promise((resolve) => { leave = resolve })])
  lines.set(name, left)
  left.then(() => lines.get(name) === left && lines.delete(name))
  try {
    if (before) await unless(signal, before)
    await use()
  } finally {
    leave()
  }
}

/** Returns when the tokens are taken. If it fails, none are. */
async function take(limiter, charges, signal) {
  for (;;) {
    signal?.throwIfAborted()
    const asking = limiter.acquireAll(charges)
    try {
      const decision = await unless(signal, asking)
      if (decision.allowed) return
      if (decision.retryAfter === null) throw new TooLate({ ...decision, wait: null })
      await sleep(decision.retryAfter, signal)
    } catch (error) {
      if (!signal?.aborted) throw error
      asking.then((decision) => giveBack(limiter, charges, decision)).catch(() => {}) // the caller has gone
      throw signal.reason
    }
  }
}

async function giveBack(limiter, charges, { allowed, decisions }) {
  for (const [i, { policy, key, cost = 1 }] of charges.entries()) {
    if (allowed && !decisions[i].shadowed) await limiter.refund(policy, key, cost)
  }
}

export function retryAfter({ status, headers }) {
  const field = (name) => headers.get(name) ?? ''
  const waits = [untilReset(field('RateLimit-Remaining'), field('RateLimit-Reset'))]
  const limit = field('RateLimit')
  for (const item of limit.includes('remaining=') ? [limit.replaceAll(',', ';')] : limit.split(',')) {
    const of = Object.fromEntries(item.split(';').map((parameter) => parameter.trim().split('=')))
    waits.push(untilReset(of.r ?? of.remaining, of.t ?? of.reset))
  }
  if (status >= 400) waits.push(seconds(field('Retry-After')), (date(field('Retry-After')) - (date(field('Date')) || Date.now())) / 1000)
  return Math.max(0, ...waits.filter(Number.isFinite))
}

const untilReset = (remaining, reset) => remaining === '0' ? seconds(reset) : 0

const seconds = (text) => /^\d+(\.\d+)?$/.test(text) ? Math.min(Number(text), 1e9) : 0

/** A date has a weekday: a number of seconds is no year. */
const date = (text) => /^[A-Z]/i.test(text) ? Date.parse(text) : NaN

const warn = (error) => console.warn('bucket not paused:', error)

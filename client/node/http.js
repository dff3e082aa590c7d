// Limits for HTTP: middleware of the form (request, response, next), and handlers of the form (Request) => Response. The fields are
// those of draft-ietf-httpapi-ratelimit-headers-11, as docs/http.md explains them. The functions are explained in http.d.ts.

import { createHash } from 'node:crypto'
import { isIP } from 'node:net'
import { setTimeout as sleep } from 'node:timers/promises'
import { InvalidArgument, NotReady, TimedOut, failureOf, kindOf } from './lib/errors.js'
import { checkCharges, fits, known } from './lib/limiter.js'
import { duration, timer } from './lib/waiting.js'

const AGAIN_AFTER = 100 // ms, after an error of the set-up: an upgrade may be under way
const LOG_EVERY = 60_000 // ms

export function per(policy, key, cost) {
  if (typeof policy !== 'string') throw new TypeError('per: the policy must be a string')
  if (typeof key !== 'function' || key === byIP) throw new TypeError('per: the key must be a function of the request, such as byIP()')
  const isCost = cost === undefined || (/^(number|bigint)$/.test(typeof cost) && Number.isSafeInteger(Number(cost)) && cost >= 0)
  if (!isCost) throw new TypeError('per: the cost must be a whole number of tokens')
  return (...request) => [{ policy, key: key(...request), cost }]
}

export function decide(limiter, options) {
  const { decide } = createDecision(limiter, options)
  known(options, ...DECIDE_OPTIONS)
  return decide
}

export function limit(limiter, { refuseWith = refuse, ...options } = {}) {
  const { decide, report } = createDecision(limiter, { ...options, refuseWith })
  const middleware = async (request, response, next) => { // which never rejects: Express 4 does not look at the promise
    const event = await decide(request, response)
    try {
      if (isOver(request, response)) return
      for (const [name, value] of Object.entries(event.headers)) response.appendHeader(name, value)
      await (event.status === 0 ? next() : refuseWith(event, request, response))
    } catch (error) { // next is not called again, because the handler may have run
      report({ error }, [request, response])
      fail(response)
    }
  }
  return Object.assign(middleware, { passed: decide.passed })
}

/** Answers with 500, or ends what cannot be answered any more. */
function fail(response) {
  try {
    if (!response.headersSent) return refuse({ problem: problemOf(500) }, undefined, response)
  } catch { /* a writeHead that other middleware has replaced */ }
  if (!response.writableEnded) response.destroy?.()
}

function refuse({ problem }, _request, response) {
  const body = textOf(problem)
  response.writeHead(problem.status, { ...PROBLEM, 'Content-Length': String(Buffer.byteLength(body)) }).end(body)
}

export function limitFetch(limiter, { refuseWith = refuseFetch, ...options } = {}, handler) {
  if (typeof handler !== 'function') throw new TypeError('pgratelimit/http: the handler must be a function')
  const { decide, report } = createDecision(limiter, { ...options, refuseWith }, (request) => request?.signal?.aborted)
  const limited = async (...request) => {
    const event = await decide(...request)
    if (event.status === 0) return withFields(await handler(...request), event.headers)
    try {
      return withFields(await refuseWith(event, ...request), event.headers)
    } catch (error) {
      report({ error }, request)
      return refuseFetch({ problem: problemOf(500) })
    }
  }
  return Object.assign(limited, { passed: decide.passed })
}

const refuseFetch = ({ problem }) => new Response(textOf(problem), { status: problem.status, headers: PROBLEM })

/** A response with further fields; or unchanged, if it can have none: an error, a switch of protocols, a body that is being read. */
function withFields(response, headers) {
  if (Object.keys(headers).length === 0) return response
  try {
    const isPlain = Object.getPrototypeOf(response) === Response.prototype
    const changed = isPlain ? new Response(response.body, response) : response // a copy, because a program may return one response twice
    for (const [name, value] of Object.entries(headers)) changed.headers.append(name, value)
    return changed
  } catch {
    return response
  }
}

export function byIP(trusted, options) {
  const trustedProxies = trusted === undefined ? 0 : trusted
  let isTold = trusted !== undefined
  if (!Number.isSafeInteger(trustedProxies) || trustedProxies < 0) {
    const found = typeof trusted === 'number' ? trusted : kindOf(trusted)
    throw new RangeError(`byIP: trustedProxies is ${found}: pass a whole number of proxies, 0 or more`)
  }
  const prefix = prefixOf(options)
  return (request) => {
    const { headers, socket } = request
    if (!socket && trustedProxies === 0) throw new TypeError('byIP: a Request of fetch has no address: pass addressKey() that of the connection')
    const forwarded = headers.get ? headers.get('x-forwarded-for') : headers['x-forwarded-for']
    if (forwarded && !isTold) {
      isTold = true
      console.warn('pgratelimit: a request has X-Forwarded-For, and byIP() trusts no proxy. Behind one, all clients share its address: ' +
        'pass their number, such as byIP(1), or byIP(0) if there is none.')
    }
    const named = trustedProxies > 0 ? keyOf((forwarded ?? '').split(',').at(-trustedProxies) ?? '', prefix) : UNKNOWN
    return named === UNKNOWN ? keyOf(socket?.remoteAddress ?? '', prefix) : named
  }
}

function prefixOf(options) {
  const { ipv6Prefix = 64 } = known(options, 'ipv6Prefix')
  if (!Number.isInteger(ipv6Prefix) || ipv6Prefix < 1 || ipv6Prefix > 128) throw new RangeError('ipv6Prefix must be a whole number from 1 to 128')
  return ipv6Prefix
}

const UNKNOWN = 'ip:unknown'

export const addressKey = (address, options) => keyOf(address, prefixOf(options))

function keyOf(address, prefix) {
  address = address.trim().replace(/^\[(.*)\](:\d+)?$/, '$1').replace(/^([\d.]+):\d+$/, '$1').replace(/%.*$/, '')
  if (isIP(address) === 4) return `ip:${address}`
  if (isIP(address) !== 6) return UNKNOWN
  const canonical = (ip) => new URL(`http://[${ip}]`).hostname.slice(1, -1)
  const [head, tail] = canonical(address).split('::').map((part) => part.split(':').filter(Boolean))
  const groups = tail ? [...head, ...Array(8 - head.length - tail.length).fill('0'), ...tail] : head
  if (groups.slice(0, 6).join(':') === '0:0:0:0:0:ffff') { // IPv4 in IPv6
    return `ip:${groups.slice(6).flatMap((group) => [parseInt(group, 16) >> 8, parseInt(group, 16) & 255]).join('.')}`
  }
  const network = groups.map((group, i) => {
    const bits = Math.min(16, Math.max(0, prefix - 16 * i)) // of this group
    return (parseInt(group, 16) & (0xffff << (16 - bits))).toString(16)
  })
  return `ip:${canonical(network.join(':'))}/${prefix}`
}

export function byUser(user, otherwise) {
  if (typeof user !== 'function' || typeof otherwise !== 'function' || otherwise === byIP) {
    throw new TypeError('byUser: pass two functions of the request, of which the second names a bucket, such as byIP()')
  }
  return (...request) => {
    const name = user(...request)
    if (!name) return otherwise(...request)
    const key = `user:${name}`
    return fits(key) ? key : `user-sha256:${createHash('sha256').update(String(name)).digest('hex')}`
  }
}

const DECIDE_OPTIONS = ['charges', 'failure', 'quotas', 'timeoutMs', 'idempotencyKey', 'observe', 'onError']

/** decide, which never rejects, and report, which tells the program of an event with an error. isOver is a function of the request. */
function createDecision(limiter, options, isRequestOver = isOver) {
  if (typeof limiter?.acquire !== 'function' || typeof limiter.acquireAll !== 'function') {
    throw new TypeError('pgratelimit/http: the first argument must be a Limiter or a Combiner')
  }
  const {
    charges: chargesOf, failure, quotas = [], timeoutMs = 1000, idempotencyKey: idempotencyKeyOf, observe, onError, refuseWith,
  } = known(options, ...DECIDE_OPTIONS, 'refuseWith')
  if (typeof chargesOf !== 'function') throw new TypeError('pgratelimit/http: charges must be a function of the request')
  if (failure !== 'open' && failure !== 'closed') throw new TypeError("pgratelimit/http: choose failure: 'open' or 'closed', for when there is no database")
  for (const [name, hook] of Object.entries({ idempotencyKey: idempotencyKeyOf, observe, onError, refuseWith })) {
    if (hook !== undefined && typeof hook !== 'function') throw new TypeError(`pgratelimit/http: ${name} must be a function`)
  }
  if (!Array.isArray(quotas) || !quotas.every((name) => typeof name === 'string')) throw new TypeError('pgratelimit/http: quotas must be an array of names')
  duration('timeoutMs', timeoutMs)

  const passed = new Map() // requests without a decision, by policy
  const log = newLog()
  let hasDecided = false // before that, an error of the set-up is not known to pass
  const tell = async (hook, ...values) => {
    try {
      await hook(...values)
    } catch (error) {
      log('program', OWN_FAILED, error)
    }
  }
  const report = (event, request) => void tell(onError ? () => onError(event.error, ...request) : () => logEvent(log, event))

  /** Tells the program what further requests would lack, which failure: 'open' would hide. */
  const checkOnce = async (request) => {
    try {
      await limiter.check?.()
    } catch (error) {
      if (error instanceof NotReady) void tell(onError ? () => onError(error, ...request) : () => log('check', `pgratelimit: ${error.message}`))
    }
  }

  const tellImpossible = (charges, { decisions }) => {
    for (const [i, { policy, cost = 1 }] of charges.entries()) {
      const { retryAfter, capacity } = decisions[i]
      if (retryAfter !== null || capacity === 0 || cost <= capacity) continue
      log(`cost ${policy}`, `pgratelimit: a request of ${cost} tokens is never allowed: the capacity of the policy "${policy}" is ${capacity}`)
    }
  }

  const undecided = (error, idempotencyKey) => {
    const { kind, isConflict } = failureOf(error)
    if (kind === 'fault' || (kind === 'setup' && !hasDecided)) return { outcome: 'invalid', status: isConflict && idempotencyKey ? 409 : 500 }
    return failure === 'open' ? { outcome: 'failed open', status: 0 } : { outcome: 'failed closed', status: 503 }
  }

  /** The event of a request; undefined if it has no charges. */
  const eventOf = async (request) => {
    if (isRequestOver(...request)) return ABANDONED
    const charges = await chargesOf(...request)
    if (charges == null || (Array.isArray(charges) && charges.length === 0)) return undefined
    const idempotencyKey = await idempotencyKeyOf?.(...request) || undefined
    if (idempotencyKey && !fits(idempotencyKey)) {
      const error = new InvalidArgument('invalid idempotencyKey', { detail: 'It is no text of 1 to 512 bytes.' })
      return { outcome: 'invalid', status: 400, charges, error }
    }
    if (isRequestOver(...request)) return ABANDONED
    try {
      const decision = await askInTime(limiter, charges, idempotencyKey, timeoutMs)
      const headers = fields(charges, decision, quotas)
      if (!hasDecided) checkOnce(request)
      hasDecided = true
      if (!decision.allowed) tellImpossible(charges, decision)
      if (decision.allowed) return { outcome: 'allowed', status: 0, charges, decision, headers }
      if (decision.retryAfter !== null) headers['Retry-After'] = String(Math.ceil(decision.retryAfter))
      return { outcome: 'denied', status: 429, charges, decision, headers }
    } catch (error) {
      return { ...undecided(error, idempotencyKey), charges, error }
    }
  }

  const decide = async (...request) => {
    const begin = performance.now()
    let event
    try {
      event = await eventOf(request)
      if (!event) return { outcome: 'allowed', status: 0, headers: {}, charges: [], durationMs: performance.now() - begin }
      if (isRequestOver(...request)) event = { ...event, ...ABANDONED }
    } catch (error) { // of charges or idempotencyKey
      event = { outcome: 'invalid', status: 500, error }
    }
    event = { headers: {}, charges: [], ...event, durationMs: performance.now() - begin }
    if (event.status > 0) event.problem = problemOf(event.status, event)
    if (event.outcome === 'failed open') for (const policy of policiesOf(event)) passed.set(policy, (passed.get(policy) ?? 0) + 1)
    if ('error' in event) report(event, request)
    if (observe) void tell(observe, event, ...request)
    return event
  }
  return { decide: Object.assign(decide, { passed }), report }
}

const ABANDONED = { outcome: 'abandoned', status: 503 }

/** Whether the client has gone, or the request was answered. Then there is nothing to decide, and no address to be known. */
function isOver(request, reply) {
  const { signal, socket } = request ?? {}, response = reply?.raw ?? reply // the reply of Fastify has that of node:http
  return signal?.aborted || socket?.destroyed || (socket?.localAddress && !socket.remoteAddress) || // unlike a Unix socket, which has neither
    response?.headersSent || response?.writableEnded || response?.destroyed || response?.stream?.destroyed // of HTTP/2
}

/** Asks once more after an error of the set-up. If that has no answer in time, the error stands. */
async function askInTime(limiter, charges, idempotencyKey, timeoutMs) {
  const leaving = new AbortController(), { signal } = leaving
  let stop, ofSetup
  const late = new Promise((_, reject) => {
    stop = timer(timeoutMs, () => {
      const hint = 'Raise timeoutMs, or find what it waits for: a lock, a free connection of the pool, or connect() of a Client.'
      const error = new TimedOut('no decision in time', { detail: `The limiter took longer than ${timeoutMs} ms.`, hint })
      leaving.abort(error)
      reject(ofSetup ?? error)
    })
  })
  const again = async (error) => {
    if (failureOf(error).kind !== 'setup') throw error
    ofSetup = error
    await sleep(AGAIN_AFTER, undefined, { signal })
    return ask(limiter, charges, { idempotencyKey, signal })
  }
  try {
    return await Promise.race([late, ask(limiter, charges, { idempotencyKey, signal }).catch(again)])
  } finally {
    stop()
  }
}

/** One call for all charges. Its answer has decisions, also about a single charge. */
async function ask(limiter, charges, options) {
  checkCharges(charges)
  if (charges.length !== 1) return limiter.acquireAll(charges, options)
  const [{ policy, key, cost }] = charges
  const decision = await limiter.acquire(policy, key, { cost, ...options })
  return { ...decision, binding: 0, decisions: [decision] }
}

/** RateLimit-Policy and RateLimit: each policy once, with its emptiest bucket. */
function fields(charges, { allowed, retryAfter, decisions }, quotas) {
  const tightest = new Map() // by policy
  charges.forEach(({ policy }, i) => {
    const d = decisions[i], other = tightest.get(policy)
    const isTighter = !other || d.remaining < other.remaining || (d.remaining === other.remaining && d.resetAfter > other.resetAfter)
    tightest.set(policy, { ...(isTighter ? d : other), replayed: d.replayed || (other?.replayed ?? false) })
  })
  const shown = [...tightest].filter(([, d]) => !d.shadowed)
  const policies = shown.map(([policy, d]) => `${quoted(policy)};q=${d.capacity}`)
  const limits = shown.filter(([, d]) => !d.replayed).map(([policy, d]) => { // a replay has the level of its time
    const limit = `${quoted(policy)};r=${Math.max(0, d.remaining)}`
    if (d.resetAfter === null) return limit
    const comeTill = quotas.includes(policy) ? 1 : Math.max(1, d.capacity - d.remaining) // tokens, by resetAfter
    const untilMore = Math.max(1, Math.ceil(Math.round(d.resetAfter * 1e6) / (comeTill * 1e6)))
    return `${limit};t=${allowed || retryAfter === null ? untilMore : Math.min(untilMore, Math.ceil(retryAfter))}`
  })
  return {
    ...(policies.length > 0 && { 'RateLimit-Policy': policies.join(', ') }),
    ...(limits.length > 0 && { RateLimit: limits.join(', ') }),
  }
}

/** The name of a policy as clients see it: bytes outside printable ASCII, and the percent sign, as in a URL. */
const printable = (policy) => policy.replace(/[^ -$&-~]+/gu, encodeURIComponent)

const quoted = (policy) => `"${printable(policy).replace(/["\\]/g, '\\$&')}"`

const PROBLEM = { 'Content-Type': 'application/problem+json', 'X-Content-Type-Options': 'nosniff' }

const TITLES = { 400: 'Bad Request', 409: 'Conflict', 500: 'Internal Server Error', 503: 'Service Unavailable' }

const textOf = (problem) => `${JSON.stringify(problem)}\n`

function problemOf(status, { charges, decision } = {}) {
  if (status !== 429) return { type: 'about:blank', title: TITLES[status], status }
  const type = 'https://iana.org/assignments/http-problem-types#quota-exceeded', title = 'Request cannot be satisfied as assigned quota has been exceeded'
  const violated = charges.filter((_, i) => !decision.decisions[i].allowed).map(({ policy }) => printable(policy))
  return { type, title, status, 'violated-policies': [...new Set(violated)] }
}

const policiesOf = ({ charges }) => new Set(Array.isArray(charges) ? charges.map((charge) => charge?.policy) : [])

function logEvent(log, { error, charges, status, outcome }) {
  if (charges == null || charges.length === 0) return log('program', OWN_FAILED, error)
  const { kind, code, hint } = failureOf(error), policies = [...policiesOf({ charges })].join(', ')
  const fate = status === 0 ? "passes without a decision (failure: 'open')" : outcome === 'abandoned' ? 'is abandoned' : `is refused with ${status}`
  const message = error?.message || error?.errors?.[0]?.message || String(error) // of several addresses, each has its own
  const line = `pgratelimit: a request ${policies && `of ${policies} `}${fate}: ${message}${code ? ` (${code})` : ''}${hint && !message.includes(hint) ? `. ${hint}` : ''}`
  log(`${code ?? error?.code ?? error?.name} ${policies}`, line, ...(kind === 'fault' && !code ? [error] : [])) // with its stack
}

const OWN_FAILED = 'pgratelimit: a function that the middleware called has failed:'

/** Logs each kind of event at most once a minute. */
function newLog() {
  const next = new Map() // by kind
  return (kind, ...text) => {
    const now = performance.now()
    if (now < (next.get(kind) ?? 0)) return
    if (next.size >= 1000) next.clear()
    next.set(kind, now + LOG_EVERY)
    console.warn(...text)
  }
}

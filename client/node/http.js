// Limits for HTTP: middleware of the form (request, response, next), and handlers of the form (Request) => Response. The fields are
// those of draft-ietf-httpapi-ratelimit-headers-11, as docs/http.md explains them. The functions are explained in http.d.ts.

import { createHash } from 'node:crypto'
import { isIP } from 'node:net'
import { IdempotencyMismatch, InvalidArgument, TimedOut, UnknownPolicy } from './lib/errors.js'
import { areCharges } from './lib/limiter.js'

export function per(policy, key, cost) {
  if (typeof key !== 'function' || key === byIP) throw new TypeError('per: the key must be a function of the request, such as byIP()')
  return (...request) => [{ policy, key: key(...request), cost }]
}

export function limit(limiter, options) {
  const decide = decider(limiter, options)
  return async (request, response, next) => {
    let refusal, headers
    try {
      ({ refusal, headers } = await decide(request, response))
    } catch (error) {
      return next(error) // of the function that names the charges
    }
    for (const [name, value] of Object.entries(headers)) response.appendHeader(name, value)
    if (!refusal) return next()
    response.writeHead(refusal.status, refusal.headers).end(refusal.body)
  }
}

export function limitFetch(limiter, options, handler) {
  const decide = decider(limiter, options)
  return async (request, ...more) => {
    const { refusal, headers } = await decide(request, ...more)
    if (refusal) return new Response(refusal.body, { status: refusal.status, headers: { ...headers, ...refusal.headers } })
    let response = await handler(request, ...more)
    if (Object.keys(headers).length > 0) response = new Response(response.body, response) // whose header may be changed
    for (const [name, value] of Object.entries(headers)) response.headers.append(name, value)
    return response
  }
}

export function byIP(trustedProxies = 0) {
  if (!Number.isSafeInteger(trustedProxies) || trustedProxies < 0) throw new RangeError('byIP: a number of proxies')
  return (request) => {
    const { headers, socket } = request
    if (!socket && trustedProxies === 0) throw new TypeError('byIP: a Request of fetch has no address: pass addressKey() that of the connection')
    const forwarded = headers.get ? headers.get('x-forwarded-for') : headers['x-forwarded-for']
    const named = trustedProxies > 0 ? addressKey((forwarded ?? '').split(',').at(-trustedProxies) ?? '') : UNKNOWN
    return named === UNKNOWN ? addressKey(socket?.remoteAddress ?? '') : named
  }
}

const UNKNOWN = 'ip:unknown'

export function addressKey(address) {
  address = address.trim().replace(/^\[(.*)\](:\d+)?$/, '$1').replace(/^([\d.]+):\d+$/, '$1').replace(/%.*$/, '')
  if (isIP(address) === 4) return `ip:${address}`
  if (isIP(address) !== 6) return UNKNOWN
  const canonical = (ip) => new URL(`http://[${ip}]`).hostname.slice(1, -1)
  const [head, tail] = canonical(address).split('::').map((part) => part.split(':').filter(Boolean))
  const groups = tail ? [...head, ...Array(8 - head.length - tail.length).fill('0'), ...tail] : head
  if (groups.slice(0, 6).join(':') === '0:0:0:0:0:ffff') { // IPv4 in IPv6
    return `ip:${groups.slice(6).flatMap((group) => [parseInt(group, 16) >> 8, parseInt(group, 16) & 255]).join('.')}`
  }
  return `ip:${canonical([...groups.slice(0, 4), 0, 0, 0, 0].join(':'))}/64`
}

export const byUser = (user, otherwise) => (...request) => {
  const name = user(...request)
  if (!name) return otherwise(...request)
  const key = `user:${name}`
  const fits = key.length <= 512 && Buffer.byteLength(key) <= 512 && !key.includes('\0') && key.isWellFormed()
  return fits ? key : `user-sha256:${createHash('sha256').update(String(name)).digest('hex')}`
}

/** Returns a function of a request that resolves to the header fields of its answer, and its refusal if it has one. */
function decider(limiter, { charges: chargesOf, failure, quotas = [], timeout = 1, onError = warn() } = {}) {
  if (typeof limiter?.acquireAll !== 'function') throw new TypeError('pgratelimit/http: the first argument must be a Limiter or a Combiner')
  if (typeof chargesOf !== 'function') throw new TypeError('pgratelimit/http: charges must be a function of the request')
  if (failure !== 'open' && failure !== 'closed') throw new TypeError("pgratelimit/http: choose failure: 'open' or 'closed', for when there is no database")
  return async (...request) => {
    const charges = await chargesOf(...request)
    if (charges == null || charges.length === 0) return { headers: {} }
    let decided
    try {
      decided = await ask(limiter, charges, timeout)
    } catch (error) {
      onError(error, ...request)
      // A client that could provoke the error would get past the limit.
      const isInvalid = [UnknownPolicy, InvalidArgument, IdempotencyMismatch].some((kind) => error instanceof kind)
      if (isInvalid) return { headers: {}, refusal: problem(500, 'Internal Server Error') }
      return { headers: {}, refusal: failure === 'open' ? undefined : problem(503, 'Service Unavailable') }
    }
    const headers = fields(charges, decided, quotas)
    if (decided.allowed) return { headers }
    if (decided.retryAfter !== null) headers['Retry-After'] = String(Math.ceil(decided.retryAfter))
    const violated = charges.filter((_, i) => !decided.decisions[i].allowed).map(({ policy }) => printable(policy))
    const title = 'Request cannot be satisfied as assigned quota has been exceeded', type = 'https://iana.org/assignments/http-problem-types#quota-exceeded'
    return { headers, refusal: problem(429, title, type, { 'violated-policies': [...new Set(violated)] }) }
  }
}

/** One call for all charges. Its answer has decisions, also about a single charge. */
async function ask(limiter, charges, timeout) {
  const leaving = new AbortController(), signal = leaving.signal
  const giveUp = () => leaving.abort(new TimedOut('no decision in time', { detail: `The limiter took longer than ${timeout} s.` }))
  const timer = setTimeout(giveUp, timeout * 1000)
  try {
    if (charges.length !== 1 || !areCharges(charges)) return await limiter.acquireAll(charges, { signal }) // which refuses others
    const [{ policy, key, cost }] = charges
    const decision = await limiter.acquire(policy, key, { cost, signal })
    return { ...decision, decisions: [decision] }
  } finally {
    clearTimeout(timer)
  }
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

function problem(status, title, type = 'about:blank', more) {
  const headers = { 'Content-Type': 'application/problem+json', 'X-Content-Type-Options': 'nosniff' }
  return { status, headers, body: `${JSON.stringify({ type, title, status, ...more })}\n` }
}

/** Logs failures, at most one a second. */
function warn() {
  let next = 0
  return (error) => {
    if (performance.now() < next) return
    next = performance.now() + 1000
    console.warn('rate limit not checked:', error)
  }
}

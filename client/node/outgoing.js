// Limits for requests to an upstream. The functions are explained in outgoing.d.ts.

import { unless } from './lib/database.js'
import { InvalidArgument, TooLate } from './lib/errors.js'
import { known, sleep } from './lib/limiter.js'

const LONGEST = 365 * 86_400 // s, as the database takes

export function limitedFetch(limiter, options) {
  if (typeof limiter?.pause !== 'function') throw new TypeError('limitedFetch: the first argument must be a Limiter or a Combiner')
  const { charges: chargesOf, maxPauseMs = 3_600_000, pauseForMs = (response) => retryAfter(response) * 1000, fetch: send = globalThis.fetch, onError = warn } =
    known(options, 'charges', 'maxPauseMs', 'pauseForMs', 'fetch', 'onError')
  for (const [name, value] of Object.entries({ charges: chargesOf, pauseForMs, fetch: send, onError })) {
    if (typeof value !== 'function') throw new TypeError(`limitedFetch: ${name} must be a function`)
  }
  if (typeof maxPauseMs !== 'number' || !(maxPauseMs > 0)) {
    throw new InvalidArgument('invalid maxPauseMs', {
      detail: `maxPauseMs is ${String(maxPauseMs)}.`,
      hint: 'Pass milliseconds above 0, or Infinity; without pauses, a pauseForMs that returns 0.',
    })
  }
  const tell = async (error) => {
    try {
      await onError(error)
    } catch (own) {
      console.warn('limitedFetch: onError has failed:', own)
    }
  }
  const lines = new Map() // by the names of the buckets, when the last request has left
  return async (input, init) => {
    const charges = await chargesOf(input, init)
    if (charges == null || charges.length === 0) return send(input, init)
    const signal = init?.signal ?? input?.signal
    const name = JSON.stringify(charges.map(({ policy, key }) => [policy, key]))
    await inLine(lines, name, signal, () => take(limiter, charges, signal))
    const response = await send(input, init)
    try {
      const ms = Math.min(await pauseForMs(response), maxPauseMs, LONGEST * 1000)
      if (ms > 0) await limiter.pause(charges[0].policy, charges[0].key, Math.max(ms, 1))
    } catch (error) {
      void tell(error) // the answer does not wait for it
    }
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
      if (decision.retryAfter === null) throw new TooLate({ ...decision, wait: null }, charges[decision.binding])
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
  const field = (name) => headers.get(name) ?? '' // of several lines a list
  const clocks = [date(field('Date')), Date.now() / 1000] // the first that is near an instant measures it
  const wait = (name, text) => {
    const n = number(text)
    if (n <= (name.startsWith('X-') ? 86_400 : LONGEST)) return n // behind X- no standard says seconds: 600000 has been seen for milliseconds
    for (const now of clocks) {
      for (const at of [n, n / 1000, date(text)]) {
        if (Math.abs(at - now) <= LONGEST) return Math.max(0, at - now)
      }
    }
  }
  if (status >= 400) {
    const asked = wait('Retry-After', field('Retry-After'))
    if (asked !== undefined) return asked
    const ms = ['Retry-After-Ms', 'X-Ms-Retry-After-Ms'].map((name) => number(field(name))).find((n) => n <= LONGEST * 1000)
    if (ms !== undefined) return ms / 1000
  }
  const waits = [0]
  const untilReset = (name, remaining, reset) => number(remaining) === 0 && waits.push(wait(name, reset) ?? 0)
  for (const prefix of ['RateLimit-', 'X-RateLimit-', 'X-Rate-Limit-']) untilReset(prefix, field(`${prefix}Remaining`), field(`${prefix}Reset`))
  const list = field('RateLimit').replace(/"(?:[^"\\]|\\.?)*"?/g, '')
  for (const item of list.includes('remaining=') ? [list.replaceAll(',', ';')] : list.split(',')) { // the members of a dictionary are of one policy
    const of = new Map(item.split(';').map((parameter) => parameter.trim().split('=')))
    untilReset('RateLimit', of.get('r'), of.get('t'))
    untilReset('RateLimit', of.get('remaining'), of.get('reset'))
  }
  return Math.max(...waits)
}

const number = (text) => /^[ \t]*\d+(\.\d+)?[ \t]*$/.test(text) ? Number(text) : NaN

const MONTHS = 'JanFebMarAprMayJunJulAugSepOctNovDec'
const toISO = (year, month, day, time) =>
  `${year.padStart(4, '20')}-${String(Math.floor(MONTHS.indexOf(month) / 3) + 1).padStart(2, '0')}-${day.replace(' ', '0')}T${time}Z`

/** Unix time of the three forms of an HTTP date, and of RFC 3339 with or without seconds. */
function date(text = '') {
  const iso = text.trim()
    .replace(/^(?:Sun|Mon|Tue|Wed|Thu|Fri|Sat)[a-z]*, (\d\d)([ -])([A-Z][a-z]{2})\2(\d{4}|\d\d) (\S+) GMT$/, (_, day, _dash, month, year, time) => toISO(year, month, day, time))
    .replace(/^(?:Sun|Mon|Tue|Wed|Thu|Fri|Sat) ([A-Z][a-z]{2}) ([ \d]\d) (\S+) (\d{4})$/, (_, month, day, time, year) => toISO(year, month, day, time))
  const [, day] = iso.match(/^(\d{4}-\d\d-\d\d)T(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d)$/) ?? []
  return day && new Date(day).toJSON()?.startsWith(day) ? Date.parse(iso) / 1000 : NaN // Date.parse takes 31 November for 1 December
}

const warn = (error) => console.warn('bucket not paused:', error)

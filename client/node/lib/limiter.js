import { randomUUID } from 'node:crypto'
import { check } from './check.js'
import { Database, unless } from './database.js'
import { DECISION, JOINT, PARTIAL, RESERVATION, SETTLEMENT, seconds } from './decision.js'
import { InvalidArgument, TooLate, invalid, kindOf } from './errors.js'
import { Strays, hold, release, renew } from './hold.js'
import { duration, timer } from './waiting.js'

const MAX_LENGTH = 512 // bytes, of policies, keys and idempotency keys
const MAX_CHARGES = 1000
const LONGEST_WAIT = 365 * 86_400_000 // ms
const GIVE_BACK_PATIENCE = 5000 // ms, of the caller
const ASK_PAUSE = 1 // s, on average: holders release before their leases end

/** The options of a Limiter. */
export const OPTIONS = ['schema', 'retry', 'callTimeoutMs']

/** Asks for tokens, one call for each request. index.d.ts explains each method. A Combiner has its own _ask, and uses _database. */
export class Limiter {
  #strays
  _packs = false // whether requests share calls

  constructor(db, options) {
    this._database = new Database(db, known(options, ...OPTIONS))
    this.#strays = new Strays(this._database)
  }

  async acquire(policy, key, options) {
    const { cost, idempotencyKey, signal } = known(options, 'cost', 'idempotencyKey', 'signal')
    signal?.throwIfAborted()
    return this._ask(newRequest([{ policy, key, cost }], idempotencyKey, false), signal)
  }

  async acquireAll(charges, options) {
    const { idempotencyKey, signal } = known(options, 'idempotencyKey', 'signal')
    signal?.throwIfAborted()
    checkCharges(charges)
    return this._ask(newRequest(charges, idempotencyKey, true), signal)
  }

  _ask(request, signal) { return unless(signal, ask(this._database, request)) }

  async peek(policy, key, options) {
    const { cost, signal } = known(options, 'cost', 'signal')
    const values = [...bucket(policy, key), tokens('cost', cost ?? 1)]
    return this.#call(DECISION, 'ratelimit_peek($1::text, $2::text, $3::bigint)', values, { signal })
  }

  async charge(policy, key, cost, options) {
    const { idempotencyKey, signal } = known(options, 'idempotencyKey', 'signal')
    const values = [...bucket(policy, key), tokens('cost', cost), optional('idempotencyKey', idempotencyKey)]
    return this.#call(DECISION, 'ratelimit_charge($1::text, $2::text, $3::bigint, $4::text)', values, { signal, once: idempotencyKey != null })
  }

  async settle(policy, key, idempotencyKey, cost, options) {
    const { signal } = known(options, 'signal')
    const values = [...bucket(policy, key), text('idempotencyKey', idempotencyKey), tokens('cost', cost)]
    return this.#call(DECISION, 'ratelimit_settle($1::text, $2::text, $3::text, $4::bigint)', values, { signal, once: true })
  }

  async settleAll(settlements, idempotencyKey, options) {
    const { signal } = known(options, 'signal')
    if (!areCharges(settlements)) throw invalid('settlements', 'is no array of settlements.', 'Pass such as [{ policy, key, cost: 1 }].')
    const values = [[], [], text('idempotencyKey', idempotencyKey), []]
    for (const { policy, key, cost } of settlements) {
      values[0].push(text('policy', policy))
      values[1].push(text('key', key))
      values[3].push(tokens('cost', cost))
    }
    const call = 'ratelimit_settle_all($1::text[], $2::text[], $3::text, $4::bigint[])'
    return this.#call(SETTLEMENT, call, values, { signal, once: true })
  }

  async reserve(policy, key, maxWaitMs, options) {
    const { cost, idempotencyKey, signal } = known(options, 'cost', 'idempotencyKey', 'signal')
    const call = 'ratelimit_reserve($1::text, $2::text, $3::text::interval, $4::bigint, $5::text)'
    const maxWait = Math.min(duration('maxWaitMs', maxWaitMs, { least: 0, remedy: '0 or more, or Infinity' }), LONGEST_WAIT)
    const values = [...bucket(policy, key), interval(maxWait), tokens('cost', cost ?? 1), optional('idempotencyKey', idempotencyKey)]
    return this.#call(RESERVATION, call, values, { signal, once: idempotencyKey != null })
  }

  async acquireUpTo(policy, key, atMost, options) {
    const { atLeast, idempotencyKey, signal } = known(options, 'atLeast', 'idempotencyKey', 'signal')
    const call = 'ratelimit_acquire_up_to($1::text, $2::text, $3::bigint, $4::bigint, $5::text)'
    const values = [...bucket(policy, key), tokens('atMost', atMost), tokens('atLeast', atLeast ?? 1), optional('idempotencyKey', idempotencyKey)]
    return this.#call(PARTIAL, call, values, { signal, once: idempotencyKey != null })
  }

  async refund(policy, key, amount, options) {
    const { signal } = known(options, 'signal')
    const values = [...bucket(policy, key), tokens('amount', amount)]
    return this.#call(DECISION, 'ratelimit_refund($1::text, $2::text, $3::bigint)', values, { signal })
  }

  async pause(policy, key, pauseForMs, options) {
    const { signal } = known(options, 'signal')
    const pauseFor = duration('pauseForMs', pauseForMs, { least: 1, most: LONGEST_WAIT, remedy: '1 to 31,536,000,000 (365 days)' })
    const values = [...bucket(policy, key), interval(pauseFor)]
    return this.#call(DECISION, 'ratelimit_pause($1::text, $2::text, $3::text::interval)', values, { signal })
  }

  async wait(policy, key, options) {
    const { cost, timeoutMs = Infinity, signal } = known(options, 'cost', 'timeoutMs', 'signal')
    signal?.throwIfAborted()
    const longest = Math.min(duration('timeoutMs', timeoutMs), LONGEST_WAIT), begin = performance.now()
    for (let left = longest; ; left = Math.max(0, longest - (performance.now() - begin))) {
      const reserved = await this.#reserveAndSleep(policy, key, left, cost ?? 1, signal)
      if (reserved.allowed) return reserved
    }
  }

  /** Reserves, and sleeps for the wait. If a quota refuses, sleeps until its turn, and up to a second more: not all ask at once. */
  async #reserveAndSleep(policy, key, longest, cost, signal) {
    const idempotencyKey = randomUUID()
    const reserving = this.reserve(policy, key, longest, { cost, idempotencyKey })
    let reserved
    try {
      reserved = await unless(signal, reserving)
      const { allowed, wait, capacity } = reserved
      if (!allowed && (wait === null || wait * 1000 > longest || cost > capacity)) throw new TooLate(reserved, { policy, cost })
      await sleep(allowed ? wait : wait + Math.random() * Math.min(1, (longest / 1000 - wait) / 2), signal)
      return reserved
    } catch (error) {
      if (!signal?.aborted) throw error
      const givingBack = reserving.catch(() => {}).then(() => this.settle(policy, key, idempotencyKey, 0)).catch(() => {})
      // givingBack goes on when the caller leaves, so no token is lost. Without an answer, reserving may last.
      if (reserved) await unless(AbortSignal.timeout(GIVE_BACK_PATIENCE), givingBack).catch(() => {})
      throw signal.reason
    }
  }

  async hold(policy, key, options) {
    const { cost, holder, signal } = known(options, 'cost', 'holder', 'signal')
    signal?.throwIfAborted()
    if (!this._database.isPool) {
      throw new InvalidArgument('hold needs a pool', {
        detail: 'It renews its lease while other statements run.',
        hint: 'Pass a Pool of pg, or for another pool { retry: true }; in a transaction call the SQL function ratelimit_hold.',
      })
    }
    const own = holder === undefined ? undefined : text('holder', holder)
    return hold(this._database, this.#strays, ...bucket(policy, key), tokens('cost', cost ?? 1), own, signal)
  }

  async holdWait(policy, key, options) {
    for (;;) {
      const held = await this.hold(policy, key, options)
      if (held.allowed) return held
      const { remaining, capacity, retryAfter } = held
      const never = { allowed: false, remaining, wait: null, resetAfter: null, capacity, replayed: false, shadowed: false }
      if (retryAfter === null) throw new TooLate(never, { policy, cost: options?.cost })
      await sleep(Math.min(retryAfter, ASK_PAUSE * (0.75 + Math.random() / 2)), options?.signal)
    }
  }

  async renew(policy, key, holder, options) {
    const { signal } = known(options, 'signal')
    signal?.throwIfAborted()
    return seconds(await unless(signal, renew(this._database, ...bucket(policy, key), text('holder', holder))))
  }

  async release(policy, key, holder, options) {
    const { signal } = known(options, 'signal')
    signal?.throwIfAborted()
    return unless(signal, release(this._database, ...bucket(policy, key), text('holder', holder)))
  }

  async check(options) {
    const { policies = [], calls = ['acquire', 'acquireAll'], signal } = known(options, 'policies', 'calls', 'signal')
    for (const [name, list] of Object.entries({ policies, calls })) {
      if (!Array.isArray(list)) throw invalid(name, `is ${kindOf(list)}.`, 'Pass an array of names.')
    }
    return unless(signal, check(this, this._database, policies, calls, this._packs))
  }

  async #call(kind, call, values, { signal, once }) {
    signal?.throwIfAborted()
    return unless(signal, this._database.row({ ...kind, call, values, once }))
  }
}

/** Sends one request in a call of its own. */
export function ask(database, { charges, joint, keyed, idempotencyKey }, unended) {
  const [{ policy, key, cost } = {}] = charges
  const statement = joint
    ? {
        ...JOINT,
        call: 'ratelimit_acquire_all($1::text[], $2::text[], $3::bigint[], $4::text)',
        values: [charges.map((c) => c.policy), charges.map((c) => c.key), charges.map((c) => c.cost), idempotencyKey],
      }
    : { ...DECISION, call: 'ratelimit_acquire($1::text, $2::text, $3::bigint, $4::text)', values: [policy, key, cost, idempotencyKey] }
  return database.row({ ...statement, once: keyed }, { unended })
}

/** A request for tokens of one bucket, or of several (joint), as the queue and the calls need it. */
function newRequest(charges, idempotencyKey, isJoint) {
  const request = {
    charges: [],
    joint: isJoint,
    keyed: idempotencyKey != null,
    idempotencyKey: optional('idempotencyKey', idempotencyKey),
    elements: charges.length,
    bucket: isJoint ? '\0' : '', // no text has a zero byte
    canShare: 0 < charges.length && charges.length <= MAX_CHARGES && isShort(idempotencyKey ?? ''),
    isGone: false,
    resolve: undefined,
    reject: undefined,
  }
  for (const { policy, key, cost } of charges) {
    request.charges.push({ policy: text('policy', policy), key: text('key', key), cost: tokens('cost', cost ?? 1) })
    request.bucket += `\0${policy}\0${key}`
    request.canShare &&= isShort(policy) && isShort(key)
  }
  return request
}

/** Throws for what is no array of charges, and for a name that no charge has: a misspelt cost would be 1. */
export function checkCharges(charges) {
  if (!areCharges(charges)) throw invalid('charges', 'is no array of charges.', 'Pass such as [{ policy, key, cost: 1 }].')
  for (const charge of charges) checkNames('charge', charge, CHARGE)
}

const CHARGE = ['policy', 'key', 'cost']

const areCharges = (charges) => Array.isArray(charges) && charges.every((charge) => charge !== null && typeof charge === 'object')

/** Whether a text can be a key. */
export const fits = (key) =>
  typeof key === 'string' && key.length <= MAX_LENGTH && Buffer.byteLength(key) <= MAX_LENGTH && !key.includes('\0') && key.isWellFormed()

const isShort = (t) => t.length * 3 <= MAX_LENGTH || Buffer.byteLength(t) <= MAX_LENGTH

/** Returns the options. Throws for a name that the method does not know, because a misspelt option would change nothing. */
export function known(options = {}, ...names) {
  if (options === null || typeof options !== 'object') throw invalid('options', `is ${String(options)}.`, `Pass an object that may have ${names.join(', ')}.`)
  checkNames('options', options, names)
  const { signal } = options
  if (signal != null && typeof signal.throwIfAborted !== 'function') {
    throw invalid('signal', `is ${kindOf(signal)}.`, 'Pass an AbortSignal, such as AbortSignal.timeout(500), or the signal of an AbortController.')
  }
  return options
}

function checkNames(what, object, names) {
  for (const name in object) {
    if (!names.includes(name)) throw invalid(what, `has ${name}.`, `Known names are ${names.join(', ')}.`)
  }
}

function text(name, value) {
  if (typeof value !== 'string') throw invalid(name, `is ${kindOf(value)}.`, 'Pass a string.')
  if (value.includes('\0')) throw invalid(name, 'has a zero byte, which no text in PostgreSQL can hold.', 'Pass a hash of it.')
  if (!value.isWellFormed()) throw invalid(name, 'has half of a surrogate pair, which UTF-8 cannot hold.', 'Pass a hash of it.')
  return value
}

const bucket = (policy, key) => [text('policy', policy), text('key', key)]

const optional = (name, value) => value == null ? null : text(name, value)

function tokens(name, value) {
  const hint = 'Pass a whole number of tokens.'
  if (typeof value !== 'number' && typeof value !== 'bigint') throw invalid(name, `is ${kindOf(value)}.`, hint)
  if (!Number.isSafeInteger(Number(value))) throw invalid(name, `is ${value}.`, hint)
  return String(value) // as all drivers send a bigint
}

const interval = (ms) => `${Math.round(ms * 1000)} microseconds`

/** Sleeps for so many seconds at least. A timer may be early. */
export async function sleep(seconds, signal) {
  const due = performance.now() + seconds * 1000
  for (let left, clear; (left = due - performance.now()) > 0;) {
    signal?.throwIfAborted()
    await unless(signal, new Promise((resolve) => { clear = timer(left, resolve) }), () => clear())
  }
}

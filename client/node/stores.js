// Stores with which limiters of other libraries count hits in PostgreSQL. stores.d.ts explains them.

import { createHash } from 'node:crypto'
import { Combiner } from './lib/combiner.js'
import { InvalidArgument, UnknownPolicy, invalid } from './lib/errors.js'
import { fits, known } from './lib/limiter.js'

const LEAST_SWEEP = 1000 // keys
const ABOVE_ANY_LIMIT = 1e15

/** Hits of keys in windows: tokens taken from buckets of a stepped policy that the limit and the window name. */
class Hits {
  #limiter
  #policy
  #prefix
  #defining = new Map() // promises, by policy
  #fitting = new Set() // policies and limits that were once alike
  #denied = new Map() // hits that took no token, which decrement takes back first, by policy and key, until their window ends
  #sweepAt = LEAST_SWEEP

  constructor(db, options) {
    const { policy, prefix = '' } = known(options, 'policy', 'prefix')
    this.#limiter = typeof db?.acquire === 'function' ? db : new Combiner(db)
    if (db.listenerCount?.('error') === 0) db.on('error', idleBroke) // or else a restart of the database ends the program
    this.#policy = policy
    this.#prefix = prefix
  }

  /** The hits of a key in its window, with this one, and ms until the window ends. */
  async hit(key, limit, windowMs) {
    if (limit < 1) return { hits: 1, isDenied: true, waitMs: windowMs }
    const [policy, bucket] = this.#bucket(key, limit, windowMs)
    const decision = await this.#ask(policy, bucket, limit, windowMs)
    const isDenied = !decision.allowed
    const waitMs = Math.ceil((isDenied ? decision.retryAfter ?? windowMs / 1000 : decision.resetAfter ?? 0) * 1000)
    if (!isDenied) return { hits: Math.max(1, used(decision, limit)), isDenied, waitMs }
    return { hits: (Number.isFinite(limit) ? Math.floor(limit) : ABOVE_ANY_LIMIT) + this.#deny(policy, bucket, waitMs), isDenied, waitMs }
  }

  /** As hit, without a hit. */
  async look(key, limit, windowMs) {
    const decision = await this.#ask(...this.#bucket(key, limit, windowMs), limit, windowMs, 0)
    return { hits: used(decision, limit), waitMs: Math.ceil((decision.resetAfter ?? 0) * 1000) }
  }

  async takeBack(key, limit, windowMs) {
    const [policy, bucket] = this.#bucket(key, limit, windowMs), denied = this.#denied.get(`${policy}\0${bucket}`)
    if (denied?.hits > 0 && performance.now() < denied.until) denied.hits--
    else await this.#limiter.refund(policy, bucket, 1)
  }

  async reset(key, limit, windowMs) {
    const [policy, bucket] = this.#bucket(key, limit, windowMs)
    this.#denied.delete(`${policy}\0${bucket}`)
    await this.#limiter._database.row({ columns: 'true', call: 'ratelimit_reset($1::text, $2::text)', values: [policy, bucket] })
  }

  async resetAll(limit, windowMs) {
    this.#denied.clear()
    await this.#limiter._database.call('ratelimit_reset_all($1::text)', [this.#bucket('', limit, windowMs)[0]])
  }

  #bucket(key, limit, windowMs) {
    if (!this.#policy && !Number.isFinite(limit)) {
      const hint = 'Pass a number, or to the store the name of a policy whose capacity it is.'
      throw new InvalidArgument('invalid limit', { detail: 'limit is no number: functions are not read.', hint })
    }
    if (!this.#policy && !(windowMs > 0 && Number.isFinite(windowMs))) throw invalid('windowMs', `is ${windowMs}.`, 'Pass a number of milliseconds, above 0.')
    const name = `${this.#prefix}${key}`
    return [
      this.#policy ?? `${Math.floor(limit)} per ${windowMs} ms`,
      fits(name) ? name : `sha256:${createHash('sha256').update(name).digest('hex')}`,
    ]
  }

  /** The decision. Throws if the limit is not the capacity of the policy, unless it was once: a policy that is changed later decides. */
  async #ask(policy, bucket, limit, windowMs, cost) {
    const decision = await this.#acquire(policy, bucket, limit, windowMs, cost), whole = Math.floor(limit), pair = `${policy}\0${whole}`
    if (!Number.isFinite(limit) || this.#fitting.has(pair)) return decision
    let { capacity } = decision
    if (capacity !== whole) ({ capacity } = await this.#limiter.acquire(policy, 'check', { cost: 0 })) // that of the key may be an override's
    if (capacity !== whole) {
      throw invalid('limit', `is ${whole}, but the policy "${policy}" has capacity ${capacity}.`, `Pass ${capacity}, or define the policy with capacity ${whole}.`)
    }
    this.#fitting.add(pair)
    return decision
  }

  async #acquire(policy, bucket, limit, windowMs, cost = 1) {
    try {
      return await this.#limiter.acquire(policy, bucket, { cost })
    } catch (error) {
      if (this.#policy || !(error instanceof UnknownPolicy)) throw error
    }
    if (!this.#defining.has(policy)) {
      const done = () => this.#defining.delete(policy)
      this.#defining.set(policy, this.#define(policy, Math.floor(limit), windowMs).finally(done))
    }
    await this.#defining.get(policy)
    return this.#limiter.acquire(policy, bucket, { cost })
  }

  async #define(policy, limit, windowMs) {
    const call = 'ratelimit_define_policy($1::text, $2::bigint, $2::bigint, $3::text::interval, stepped => true)'
    const values = [policy, String(limit), `${windowMs} ms`]
    try {
      await this.#limiter._database.row({ columns: 'true', call, values })
    } catch (error) {
      if (error.code !== '42501') throw error
      const hint = `Its owner can run: select ratelimit_define_policy('${policy}', ${limit}, ${limit}, '${windowMs} ms', stepped => true);`
      const detail = `No policy is named "${policy}", and this role may not define it.`
      throw new UnknownPolicy('unknown policy', { code: 'RL001', detail, hint, cause: error })
    }
  }

  /** Counts a denied hit of this process in the window of its bucket. */
  #deny(policy, bucket, waitMs) {
    const now = performance.now(), name = `${policy}\0${bucket}`
    if (this.#denied.size >= this.#sweepAt) {
      for (const [other, { until }] of this.#denied) if (until <= now) this.#denied.delete(other)
      this.#sweepAt = Math.max(LEAST_SWEEP, this.#denied.size * 2)
    }
    const before = this.#denied.get(name), hits = before && now < before.until ? before.hits + 1 : 1
    this.#denied.set(name, { hits, until: now + waitMs })
    return hits
  }
}

const idleBroke = ({ message }) => console.warn(`pgratelimit: an idle connection broke: ${message}`)

/** The hits that a library has to see to decide as the bucket did, whose capacity may be another for a key. */
const used = ({ capacity, remaining }, limit) => Number.isFinite(limit) ? Math.max(0, Math.floor(limit) - remaining) : capacity - remaining

export class PostgresStore {
  #hits
  #limit
  #windowMs
  localKeys = false

  constructor(db, options) {
    this.#hits = new Hits(db, options)
    this.prefix = options?.prefix ?? ''
  }

  init({ limit, windowMs }) {
    this.#limit = typeof limit === 'number' ? limit : Infinity
    this.#windowMs = windowMs
  }

  async increment(key) { return state(await this.#hits.hit(key, this.#limit, this.#windowMs)) }

  async get(key) {
    const found = await this.#hits.look(key, this.#limit, this.#windowMs)
    return found.hits > 0 ? state(found) : undefined
  }

  decrement(key) { return this.#hits.takeBack(key, this.#limit, this.#windowMs) }

  resetKey(key) { return this.#hits.reset(key, this.#limit, this.#windowMs) }

  resetAll() { return this.#hits.resetAll(this.#limit, this.#windowMs) }
}

const state = ({ hits, waitMs }) => ({ totalHits: hits, resetTime: new Date(Date.now() + waitMs) })

export function fastifyStore(db, options) {
  const hits = new Hits(db, options)
  return class FastifyStore {
    #prefix

    constructor(parameters, prefix = '') {
      for (const name of ['continueExceeding', 'exponentialBackoff']) {
        if (parameters?.[name]) throw new TypeError(`pgratelimit/stores: ${name} is not supported: a window ends when it ends`)
      }
      this.#prefix = prefix
    }

    incr(key, callback, timeWindow, max) { answer(hits.hit(this.#prefix + key, max, timeWindow), callback) }

    read(key, callback, timeWindow, max) { answer(hits.look(this.#prefix + key, max, timeWindow), callback) }

    child(parameters) {
      const { method = '', url = '' } = parameters.routeInfo ?? {}
      return new FastifyStore(parameters, `${method}${url}-`)
    }
  }
}

function answer(promise, callback) {
  promise.then(({ hits, waitMs }) => callback(null, { current: hits, ttl: waitMs }), (error) => callback(error))
}

export class NestStorage {
  #hits

  constructor(db, options) { this.#hits = new Hits(db, options) }

  async increment(key, ttl, limit, blockDuration = ttl) {
    if (blockDuration > 0 && blockDuration !== ttl) {
      const detail = `blockDuration is ${blockDuration}, and ttl ${ttl}.`
      throw new InvalidArgument('invalid blockDuration', { detail, hint: 'Leave it out: a block ends with its window.' })
    }
    const { hits, isDenied, waitMs } = await this.#hits.hit(key, limit, ttl), seconds = Math.ceil(waitMs / 1000)
    return { totalHits: hits, timeToExpire: seconds, isBlocked: isDenied, timeToBlockExpire: isDenied ? seconds : 0 }
  }
}

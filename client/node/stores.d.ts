import type { Limiter, Queryable } from './index.js'

/**
 * Stores with which limiters of other libraries count hits in PostgreSQL, exactly, for all processes. The first argument is a pool, for
 * which a Combiner is made, or a Limiter or Combiner. If nobody listens to the errors of a pool of pg, the store does: of idle connections
 * that break, such as at a restart of the database, they would end the program.
 *
 * A limit and a window are a stepped policy, such as "100 per 60000 ms". It is defined when it is first used, if the role may execute
 * ratelimit_define_policy; otherwise the error has the statement for its owner. The windows of a key follow each other from its first hit
 * on, until the key was idle and cleaned up, where a library's own store begins a window with the first hit after the last window. So of
 * what the library calls a window, up to twice the limit may pass; of any other span that long, with its own store, too.
 *
 * A hit that is denied takes nothing. It counts in its process only, to the end of the window.
 */
export interface StoreOptions {
  /**
   * A policy of your own, in place of one that limit and window name. If its capacity is not the limit, requests fail with InvalidArgument,
   * until a request has found the two alike. A single key may have another capacity. A limit that is a function is not compared.
   */
  policy?: string | undefined
  /** Text before each key. Two limiters with the same limit and window share their keys unless their prefixes differ. */
  prefix?: string | undefined
}

interface Hits {
  totalHits: number
  resetTime: Date
}

/**
 * The store of express-rate-limit and hono-rate-limiter. Of what they call a window, up to twice the limit may pass: see StoreOptions. A
 * limit that is a function needs a policy. decrement needs EXECUTE on ratelimit_refund, resetKey on ratelimit_reset, and resetAll, which
 * resets the policy whatever the prefix, on ratelimit_reset_all.
 */
export class PostgresStore {
  constructor(db: Queryable | Limiter, options?: StoreOptions)
  readonly localKeys: false
  readonly prefix: string
  init(options: { windowMs: number; limit: unknown }): void
  increment(key: string): Promise<Hits>
  get(key: string): Promise<Hits | undefined>
  decrement(key: string): Promise<void>
  resetKey(key: string): Promise<void>
  resetAll(): Promise<void>
}

interface FastifyStore {
  incr(key: string, callback: FastifyCallback, timeWindow: number, max: number): void
  read(key: string, callback: FastifyCallback, timeWindow: number, max: number): void
  child(parameters: object): FastifyStore
}
type FastifyCallback = (error: Error | null, result?: { current: number; ttl: number }) => void

/**
 * The store of @fastify/rate-limit. Of what it calls a window, up to twice the limit may pass: see StoreOptions. Its routes have prefixes of
 * their own. continueExceeding and exponentialBackoff are errors.
 */
export function fastifyStore(db: Queryable | Limiter, options?: StoreOptions): new (parameters: object) => FastifyStore

/**
 * The storage of @nestjs/throttler. Of what it calls a window, up to twice the limit may pass: see StoreOptions. A client is blocked to the
 * end of the window that it has exceeded; a blockDuration other than the ttl is an error.
 */
export class NestStorage {
  constructor(db: Queryable | Limiter, options?: StoreOptions)
  increment(key: string, ttl: number, limit: number, blockDuration: number, throttlerName: string): Promise<{
    totalHits: number
    timeToExpire: number
    isBlocked: boolean
    timeToBlockExpire: number
  }>
}

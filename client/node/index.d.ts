/// <reference lib="esnext.disposable" />
// Tokens are whole numbers. A duration that is passed is in milliseconds, and its name ends with Ms; unless it says so, 0 is an error.
// Times of answers are seconds, as numbers; a time that is null never comes.

/** What a limiter needs of a database handle. A pool and a client of pg have it; README.md has adapters for other drivers. */
export interface Queryable {
  query(text: string, values: any[]): Promise<{ rows: any[] }>
}

export interface Options {
  /** The schema that has the ratelimit_* functions. Defaults to the functions that search_path finds. */
  schema?: string | undefined
  /**
   * Each statement is a transaction of its own, and the handle has other connections when one is lost: so serialization failures,
   * deadlocks and calls of a function that an upgrade replaced are tried again, and with an idempotency key lost connections, too; three
   * tries in all. Defaults to whether the handle is a Pool of pg.
   */
  retry?: boolean | undefined
  /**
   * How long each try of a call may take. Then the call fails with TimedOut; on a Pool of pg it is cancelled, and its connection destroyed. Defaults to
   * Infinity, which is no bound, in a Combiner to 5000.
   */
  callTimeoutMs?: number | undefined
}

export interface CombinerOptions extends Options {
  /** How many shared calls may be under way, each on a connection. Defaults to 2. Of a Pool of pg, one connection is left for others. */
  callsInFlight?: number | undefined
  /** How many requests may wait for a call. Further ones fail with Overloaded. Defaults to 10,000. */
  maxWaiting?: number | undefined
}

/** Options of every method. */
export interface CallOptions {
  /**
   * Frees the caller, who gets its reason. A request that has not been sent is not sent. One that has been sent may be granted, and its
   * tokens taken: with an idempotency key, asking again settles that. Its call goes on, with its connection, until it has an answer or
   * callTimeoutMs is over. Any number of calls may share a signal.
   */
  signal?: AbortSignal | undefined
}

export interface CostOptions extends CallOptions {
  /** How many tokens are asked for. Defaults to 1. With 0 the request is allowed, and takes nothing. */
  cost?: number | bigint | undefined
}

export interface HoldOptions extends CostOptions {
  /**
   * A name of your own in place of a new uuid, of 1 to 512 bytes, such as the id of an attempt at a job, for a lease that two tasks or
   * programs pass on. A holder that holds already begins its lease anew. After a lost answer its slots are not released: repeat the call.
   */
  holder?: string | undefined
}

export interface KeyedOptions extends CallOptions {
  /**
   * Names the operation of the program, so that the request can be sent again: the first grant under it is returned again, marked
   * replayed, and nothing is taken. Choose it in the program, one for each operation: a client that chooses it is always allowed.
   */
  idempotencyKey?: string | null | undefined
}

export interface State {
  /** Whole tokens in the bucket after the call; below zero in debt. */
  remaining: number
  /** Until the bucket is full, if no other caller takes tokens; null: never. */
  resetAfter: number | null
  /** Tokens in a full bucket. */
  capacity: number
  /** The first answer of this idempotency key was returned again, and nothing was taken. */
  replayed: boolean
  /** The policy only watches, and would have denied: the request is allowed, and nothing was taken. */
  shadowed: boolean
}

export interface Decision extends State {
  /** Whether the tokens were taken. */
  allowed: boolean
  /** Until the same request is allowed, if no other caller takes tokens; 0 when allowed; null if no wait helps. */
  retryAfter: number | null
}

export interface Charge {
  policy: string
  key: string
  /** Defaults to 1. */
  cost?: number | bigint | undefined
}

/** The decision about a request of several charges: remaining, resetAfter and capacity are of the binding charge. */
export interface JointDecision extends Decision {
  /** The index of the charge that decides: the longest wait of a denial, the scarcest bucket of a grant. */
  binding: number
  /** Of each charge, as if it were asked alone. */
  decisions: Decision[]
}

export interface Settlement extends Charge {
  cost: number | bigint
}

export interface JointSettlement {
  /** Nothing was settled this time: a bucket was settled before, at the same cost. */
  replayed: boolean
  /** Of each settlement its bucket, after the whole. */
  decisions: Decision[]
}

export interface Reservation extends State {
  allowed: boolean
  /** How long to wait before acting; of a refusal, how long it would have been; null if no wait helps. */
  wait: number | null
}

export interface PartialDecision extends Decision {
  /** How many tokens were taken. */
  taken: number
}

/** Slots that are held until they are released, or a denial. In `await using` they are released at the end of the block. */
export interface Hold extends AsyncDisposable {
  /** Whether the slots are held. */
  readonly allowed: boolean
  /** Slots that are free after the call; below zero after the capacity was lowered. */
  readonly remaining: number
  /** Until the same request is allowed, if no holder holds, renews or releases; 0 when allowed; null if no wait helps. */
  readonly retryAfter: number | null
  /** The length of the lease; 0 when denied. */
  readonly heldFor: number
  /** Slots of a key. */
  readonly capacity: number
  /** The call was repeated after a lost answer, and the slots were held already. */
  readonly renewed: boolean
  /** The policy only watches, and would have denied: nothing is held, and no more calls are made. */
  readonly shadowed: boolean
  /** A uuid. Where only the holder may write, call ratelimit_renew with it in the same transaction, and roll back if that is null. */
  readonly holder: string
  /**
   * For the work under the slots. It is aborted by release, with the signal of the call, and when the lease is lost, with LeaseLost;
   * of a denial it is aborted from the start. The lease is counted by a monotonic clock from before the call that granted or renewed
   * it: after a freeze that was longer, `aborted` and `throwIfAborted` see that at once, and listeners a moment later. Time in which the
   * machine sleeps is not counted on most systems. Work that goes on has no slots: another holder may have them.
   */
  readonly signal: AbortSignal
  /**
   * Aborts the signal, and then frees the slots, after a renewal that is under way. It is safe to repeat: once it has succeeded it does
   * nothing, and after an error it tries again. Without it the slots are free when the lease ends. A lost lease is no error.
   */
  release(): Promise<void>
}

/**
 * Asks for tokens, in one call for each request. On a pool each call is a transaction of its own. On a client it is part of the
 * transaction that is open there, whose rollback gives the tokens back, and whose end unlocks the bucket.
 *
 * All methods reject with the errors below, and with errors of the driver as they came.
 */
export class Limiter {
  constructor(db: Queryable, options?: Options)

  /** Takes tokens from a bucket if it holds enough. A denial is an answer, too. */
  acquire(policy: string, key: string, options?: CostOptions & KeyedOptions): Promise<Decision>

  /** Takes the tokens of all charges, 1 to 1,000, if each bucket holds enough, and otherwise none. */
  acquireAll(charges: Charge[], options?: KeyedOptions): Promise<JointDecision>

  /** The decision that acquire would return. Takes nothing. */
  peek(policy: string, key: string, options?: CostOptions): Promise<Decision>

  /** Takes tokens even if the bucket holds fewer, as debt. It is for usage that is known only when it is over. */
  charge(policy: string, key: string, cost: number | bigint, options?: KeyedOptions): Promise<Decision>

  /** Replaces the cost of a grant by its real cost, once. 0 gives all tokens back. Returns the state of the bucket. */
  settle(policy: string, key: string, idempotencyKey: string, cost: number | bigint, options?: CallOptions): Promise<Decision>

  /**
   * Replaces the costs of the grants of acquireAll under an idempotency key by their real costs, of all buckets or of none; a bucket that is
   * named twice is settled once, at the sum. It can be sent again: a bucket that is settled at the same cost moves no more.
   */
  settleAll(settlements: Settlement[], idempotencyKey: string, options?: CallOptions): Promise<JointSettlement>

  /**
   * Takes tokens now if the bucket will have them within maxWaitMs, and returns how long to wait before acting. With 0 it takes only what is
   * there; more than 365 days, and Infinity, are 365 days.
   */
  reserve(policy: string, key: string, maxWaitMs: number, options?: CostOptions & KeyedOptions): Promise<Reservation>

  /** Takes as many tokens as there are, up to atMost; with fewer than atLeast (1), none. */
  acquireUpTo(policy: string, key: string, atMost: number | bigint, options?: KeyedOptions & { atLeast?: number | bigint | undefined }): Promise<PartialDecision>

  /** Gives tokens back, up to full. Sent twice, it gives back twice. */
  refund(policy: string, key: string, amount: number | bigint, options?: CallOptions): Promise<Decision>

  /**
   * Stops the bucket for so many milliseconds, 1 to 31,536,000,000 (365 days), such as 1000 times the Retry-After of an upstream. After
   * them it refills from 0. A longer pause stays. Reservations made before are not stopped.
   */
  pause(policy: string, key: string, pauseForMs: number, options?: CallOptions): Promise<Decision>

  /**
   * Reserves tokens, and returns when they are there. If they would come after timeoutMs (365 days at most), it fails at once with TooLate. A
   * caller that stops waiting gives its tokens back, and leaves after 5 seconds at the latest. A quota lends nothing: at its next turn, and
   * up to a second later at random, wait reserves again. Not for transactions.
   */
  wait(policy: string, key: string, options?: CostOptions & { timeoutMs?: number | undefined }): Promise<Reservation>

  /**
   * Takes slots of a policy with a lease, 1 or more, if enough are free, under a new uuid. A denial is an answer, too. The lease is
   * renewed when a third of it is over, and if that fails again and again until it ends; this keeps no process alive. When the signal
   * is aborted, nothing is renewed any more. When that is during the call, and when the call fails without an answer, what may have been
   * granted is released in the background: again and again for a day, if the database is away, or while pg_stat_activity shows such a
   * call under way. It needs a pool: in a transaction call the SQL function ratelimit_hold with a holder of your own.
   */
  hold(policy: string, key: string, options?: HoldOptions): Promise<Hold>

  /**
   * hold, again and again until the slots are free or the signal is aborted: when retryAfter is over, or after about a second if that is
   * earlier. Callers who wait are in no order. It fails with TooLate if no wait helps.
   */
  holdWait(policy: string, key: string, options?: HoldOptions): Promise<Hold>

  /** Begins the lease of a holder anew, and returns its length; null if it does not hold, or not any more. It never takes slots. */
  renew(policy: string, key: string, holder: string, options?: CallOptions): Promise<number | null>

  /**
   * Rejects with NotReady if the database lacks what calls need: the package, a grant, a policy. Call it at the start of a program. calls are
   * names of methods, by default acquire and acquireAll. If all are about slots, the policies must lend slots; if none is, they must not.
   * It takes nothing.
   */
  check(options?: CallOptions & { policies?: string[] | undefined; calls?: string[] | undefined }): Promise<void>

  /** Frees the slots of a holder, and returns whether it held them until now. After a lost answer it is sent again, and returns false. */
  release(policy: string, key: string, holder: string, options?: CallOptions): Promise<boolean>
}

/**
 * A Limiter for many callers at once: requests of acquire and acquireAll that wait at the same moment share one call. The other methods
 * make a call each.
 *
 * A bucket that another transaction has locked holds up the requests of its call, and no other call. Set lock_timeout for the sessions
 * of the pool: when it ends the call, only requests for the locked bucket fail, with Locked.
 */
export class Combiner extends Limiter {
  constructor(db: Queryable, options?: CombinerOptions)
  /** How many requests wait for a call. */
  readonly waiting: number
  /** Admits no more requests, and returns when all earlier ones are answered. The pool stays open. */
  close(): Promise<void>
}

/** An error to branch on, with instanceof. Its message has detail and hint. */
export class RateLimitError extends Error {
  /** The SQLSTATE; undefined if the error was found without the server. */
  readonly code?: string
  readonly detail?: string
  readonly hint?: string
}

/** No policy of that name is defined (RL001). */
export class UnknownPolicy extends RateLimitError {}
/** The idempotency key was used before with another cost, or the holder holds with another cost (RL002). Nothing was taken. */
export class IdempotencyMismatch extends RateLimitError {}
/** No grant is remembered under the idempotency key, or it is not committed yet (RL003). Nothing was charged. */
export class NoGrant extends RateLimitError {}
/** The grant under the idempotency key was settled, so the operation is over (RL004). Nothing was taken. */
export class Settled extends RateLimitError {}
/** An argument is outside its range, or text that the database cannot hold. Nothing was taken. */
export class InvalidArgument extends RateLimitError {}
/** Another transaction has held the bucket for longer than lock_timeout (55P03). Nothing was taken. */
export class Locked extends RateLimitError {}
/** The lease has ended: it was not renewed in time, or the slots were reset or their policy dropped. cause is the error of the last renewal, if it failed. */
export class LeaseLost extends RateLimitError {}
/** As many requests wait as may. Nothing was sent. */
export class Overloaded extends RateLimitError {}
/** The database lacks what a limiter needs. */
export class NotReady extends RateLimitError {
  /** One line each, most of them statements that help. */
  readonly lacks: string[]
}
/** The Combiner was closed. Nothing was sent. */
export class Closed extends RateLimitError {}
/** The call had no answer within callTimeoutMs. Its tokens may be taken. */
export class TimedOut extends RateLimitError {}
/** The tokens would come after the timeoutMs of wait, or never. Nothing was taken. */
export class TooLate extends RateLimitError {
  readonly reservation: Reservation
}
/** A guard inside the database has refused a statement (RL429), which gave its tokens back. */
export class Denied extends RateLimitError {
  readonly policy: string
  readonly cost: number
  readonly remaining: number
  readonly retryAfter: number | null
  readonly capacity: number
}

/**
 * The error of a driver as one of these classes, or itself; it may be the cause of another error. It is for errors of the program's own
 * statements, where guards raise Denied.
 */
export function translate(error: unknown): unknown

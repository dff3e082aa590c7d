/**
 * An error to branch on, with `instanceof`. Every other error (no connection, no privilege, a read-only transaction) is the driver's
 * own, as it came.
 */
export class RateLimitError extends Error {
  constructor(message, { code, detail, hint, cause } = {}) {
    super([message, detail, hint].filter(Boolean).join('. ').replaceAll('.. ', '. '), { cause })
    this.code = code // SQLSTATE; undefined if the error was found without the server
    this.detail = detail
    this.hint = hint
  }

  get name() { return this.constructor.name }
}

/** No policy of that name is defined (SQLSTATE RL001). */
export class UnknownPolicy extends RateLimitError {}

/** The idempotency key was used before with another cost (SQLSTATE RL002). Nothing was taken. */
export class IdempotencyMismatch extends RateLimitError {}

/** No grant is remembered under the idempotency key, or it is not committed yet (SQLSTATE RL003). Nothing was charged. */
export class NoGrant extends RateLimitError {}

/** The grant under the idempotency key was settled, so the operation is over (SQLSTATE RL004). Nothing was taken. */
export class Settled extends RateLimitError {}

/** An argument is outside its range, or text that the database cannot hold. Nothing was taken. */
export class InvalidArgument extends RateLimitError {}

/** Another transaction has held the bucket for longer than the session's lock_timeout (SQLSTATE 55P03). Nothing was taken. */
export class Locked extends RateLimitError {}

/** A Combiner has as many waiting requests as it may have. Nothing was sent. */
export class Overloaded extends RateLimitError {}

/** The tokens would come after the timeout of `wait`, or never. Nothing was taken. `reservation.wait` is how long it would have been. */
export class TooLate extends RateLimitError {
  constructor(reservation) {
    super('the tokens would come too late')
    this.reservation = reservation
  }
}

/** The Combiner was closed. Nothing was sent. */
export class Closed extends RateLimitError {}

/** The call had no answer within `callTimeout`, and its connection was destroyed. Its tokens may be taken. */
export class TimedOut extends RateLimitError {}

/**
 * The refusal of a guard inside the database (SQLSTATE RL429): of `ratelimit_enforce`, or a trigger that calls `ratelimit_guard`. The
 * statement failed with it, and its tokens are given back.
 */
export class Denied extends RateLimitError {
  constructor(message, driverError) {
    super(message, driverError)
    const { policy, cost, remaining, retry_after: retryAfter, capacity } = JSON.parse(driverError.detail)
    if ([policy, cost, remaining, capacity].includes(undefined)) throw new TypeError('no decision')
    Object.assign(this, { policy, cost, remaining, retryAfter, capacity }) // retryAfter is null if no wait helps
  }
}

const kinds = {
  RL001: UnknownPolicy,
  RL002: IdempotencyMismatch,
  RL003: NoGrant,
  RL004: Settled,
  RL429: Denied,
  22023: InvalidArgument, // invalid_parameter_value
  22007: InvalidArgument, // invalid_datetime_format
  22008: InvalidArgument, // datetime_field_overflow
  '22P02': InvalidArgument, // invalid_text_representation
  22021: InvalidArgument, // character_not_in_repertoire
  '22P05': InvalidArgument, // untranslatable_character
  '55P03': Locked, // lock_not_available
}

/** The error of a driver as one of the classes above, or itself. Programs use it for the errors of their own statements: guards raise Denied. */
export function translate(error) {
  const Kind = kinds[error?.code]
  if (!Kind || error instanceof RateLimitError) return error
  const { message, code, detail, hint } = error
  try {
    return new Kind(message, { code, detail, hint, cause: error })
  } catch {
    return error // RL429 of other code: its detail is no decision
  }
}

/** Whether the cause is text that this database cannot hold. */
export const isText = (error) => error.code === '22021' || error.code === '22P05'

/** Whether nothing happened, and the same call may succeed: serialization_failure, deadlock_detected. */
export const isTransient = (error) => error.code === '40001' || error.code === '40P01'

/**
 * Whether the call may have happened or not: the server gave no answer, or ended the session with it. Drivers know the severity in the
 * server's language only, so sessions that end are told by their codes, too.
 */
export const isUnknown = (error) =>
  !(error instanceof RateLimitError) && (!error.severity || /^(FATAL|PANIC)$/.test(error.severity) || /^(57P0|08)/.test(error.code))

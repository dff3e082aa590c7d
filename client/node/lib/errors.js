// The classes are explained in index.d.ts.

export class RateLimitError extends Error {
  constructor(message, { code, detail, hint, cause } = {}) {
    super([message, detail, hint].filter(Boolean).join('. ').replaceAll('.. ', '. '), { cause })
    this.code = code // SQLSTATE; undefined if the error was found without the server
    this.detail = detail
    this.hint = hint
  }

  get name() { return this.constructor.name }
}

export class UnknownPolicy extends RateLimitError {}
export class IdempotencyMismatch extends RateLimitError {}
export class NoGrant extends RateLimitError {}
export class Settled extends RateLimitError {}
export class InvalidArgument extends RateLimitError {}
export class Locked extends RateLimitError {}
export class LeaseLost extends RateLimitError {}
export class Overloaded extends RateLimitError {}

export class TooLate extends RateLimitError {
  constructor(reservation, { policy, cost } = {}) {
    const { capacity } = reservation
    super(0 < capacity && capacity < cost
      ? `a request of ${cost} tokens is never allowed: the capacity of the policy "${policy}" is ${capacity}`
      : 'the tokens would come too late')
    this.reservation = reservation
  }
}

export class NotReady extends RateLimitError {
  constructor(lacks) {
    super('the database lacks what this limiter needs', { detail: lacks.join('\n') })
    this.lacks = lacks
  }
}

export class Closed extends RateLimitError {}
export class TimedOut extends RateLimitError {}

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

export function translate(error) {
  for (let cause = error; cause instanceof Error; cause = cause.cause) {
    if (cause instanceof RateLimitError) return cause
    const Kind = kinds[cause.code], { message, code, detail, hint } = cause
    try {
      if (Kind) return new Kind(message, { code, detail, hint, cause: error })
    } catch {
      return error // RL429 of other code: its detail is no decision
    }
  }
  return error
}

/** The error of an argument or option, with its name. */
export const invalid = (name, detail, hint) => new InvalidArgument(`invalid ${name}`, { detail: `${name} ${detail}`, hint })

/** What a value is that an argument cannot be. It may be a secret, and is not shown. */
export const kindOf = (value) => value == null ? String(value) : `of type ${typeof value}`

/** The error of one of many requests, which the server tells beside the answers to the others. */
export const refusal = (code, message, detail, hint) =>
  translate(Object.assign(new Error(message), { code, detail, hint, severity: 'ERROR' }))

/** Whether the cause is text that this database cannot hold. */
export const isText = (error) => error.code === '22021' || error.code === '22P05'

/** Whether nothing happened, and the same call may succeed: a conflict, a deadlock, an upgrade replaced the function, or a shard of Citus moved. */
export const isTransient = ({ code, message }) =>
  code === '40001' || code === '40P01' || (code === 'XX000' && /^(cache lookup failed for function|the shard has moved$)/.test(message))

/**
 * Whether the call may have happened or not: the server gave no answer, or ended the session with it. Drivers know the severity in the
 * server's language only, so sessions that end are told by their codes, too.
 */
export const isUnknown = (error) =>
  !(error instanceof RateLimitError) && (!error.severity || /^(FATAL|PANIC)$/.test(error.severity) || /^(57P0|08)/.test(error.code))

// What an error of a limiter means for a request that has no decision. ../testdata/failures.json has every case.

const FOUND_HERE = new Map([ // errors that were found without the server, as its codes
  [UnknownPolicy, 'RL001'], [IdempotencyMismatch, 'RL002'], [NoGrant, 'RL003'], [Settled, 'RL004'], [InvalidArgument, '22023'],
])
const SQLSTATE = /^(?!E)(?=.*[0-9])[0-9A-Z]{5}$/ // EPIPE is the system's
const PROGRAM = /^(Eval|Range|Reference|Syntax|Type|URI)Error$/ // by name, because each realm has its own classes
const SETUP = /^(42501|42883|42P01|42703|3F000)$/
const AWAY = /^(08|0A000|25006|28|3D|40|53|55P03|57|58|XX)/
const REMEDIES = [
  [/^42501/, 'Grant the role of this program EXECUTE on the function.'],
  [SETUP, 'Install pgratelimit in this database, put its schema on search_path, or name it with the option schema.'],
  [/^28/, 'Check the user and the password of the connection, and pg_hba.conf.'],
  [/^3D/, 'Check the database that the connection names.'],
  [/^08P01/, 'A pooler refuses settings that a connection brings, such as options: set them with alter role.'],
]
const DEEPEST = 10 // causes, or first errors of a group, which might form a circle

/**
 * The kind of an error: 'fault' of the request or the program, 'setup', or 'away', when the database gives no answer; and whether it is
 * about the idempotency key. Where the user can mend it, the error has the remedy as hint. code is its SQLSTATE.
 */
export function failureOf(error) {
  let name
  for (let cause = error, depth = 0; cause !== null && typeof cause === 'object' && depth < DEEPEST; cause = cause.cause ?? cause.errors?.[0], depth++) {
    name = cause.name
    const code = cause.code ?? FOUND_HERE.get(cause.constructor)
    if (SQLSTATE.test(code)) {
      const [, remedy] = REMEDIES.find(([codes]) => codes.test(code)) ?? []
      if (remedy && !cause.hint) Reflect.set(cause, 'hint', remedy)
      return { kind: SETUP.test(code) ? 'setup' : AWAY.test(code) ? 'away' : 'fault', isConflict: code === 'RL002' || code === 'RL004', code, hint: cause.hint }
    }
    if (cause instanceof RateLimitError) break
  }
  return { kind: PROGRAM.test(name) ? 'fault' : 'away', isConflict: false }
}

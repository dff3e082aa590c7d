// What an error of a limiter means for the request that has no decision. ../testdata/failures.json has every case.

import { IdempotencyMismatch, InvalidArgument, NoGrant, RateLimitError, Settled, UnknownPolicy } from './errors.js'

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

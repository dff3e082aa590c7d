export { Combiner } from './lib/combiner.js'
export { Limiter } from './lib/limiter.js'
export {
  Closed, Denied, IdempotencyMismatch, InvalidArgument, LeaseLost, Locked, NoGrant, NotReady, Overloaded, RateLimitError, Settled, TimedOut, TooLate,
  UnknownPolicy, translate,
} from './lib/errors.js'

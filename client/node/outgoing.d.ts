import type { Charge, Limiter } from './index.js'

export interface OutgoingOptions<Input, Init> {
  /**
   * The buckets that a request is charged to, all or nothing. A pause stops the first one, so name first the bucket that all requests to
   * the upstream are charged to. A request without charges is sent, and its answer pauses nothing.
   */
  charges: (input: Input, init: Init) => Charge[] | undefined | Promise<Charge[] | undefined>
  /** The longest pause in seconds, whatever the upstream asks for. Defaults to 3600. */
  maxPause?: number
  /** How many seconds an answer pauses the first bucket, 0 for not at all. It must not read the body. Defaults to retryAfter. */
  pauseFor?: (response: Response) => number
  /** Sends the requests. Defaults to fetch. */
  fetch?: (input: Input, init: Init) => Promise<Response>
  /** Is called when a pause failed. Defaults to console.warn. */
  onError?: (error: unknown) => void
}

/**
 * Returns a fetch that takes the charges of a request in one acquireAll, or waits until they are there. In a process, requests with the
 * same buckets wait in line, and one of them asks. It sends nothing if the signal is aborted, if no wait helps (TooLate), or if the
 * limiter fails. Tokens that are granted after an abort are refunded.
 *
 * There are no retries. The caller gets each response, a 429 too, when its pause is committed. A request that was granted before the
 * pause is sent.
 */
export function limitedFetch<Input extends string | URL | Request = string | URL | Request, Init extends RequestInit | undefined = RequestInit | undefined>(
  limiter: Limiter, options: OutgoingOptions<Input, Init>,
): (input: Input, init?: Init) => Promise<Response>

/**
 * The longest wait in seconds that a response names, or 0: Retry-After of a status of 400 or more, as seconds or as a date, and RateLimit
 * or RateLimit-Reset when nothing is left.
 */
export function retryAfter(response: { status: number; headers: Headers }): number

import type { Charge, Limiter } from './index.js'

export interface OutgoingOptions<Input, Init> {
  /**
   * The buckets that a request is charged to, all or nothing. A pause stops the first one, so name first the bucket that all requests to
   * the upstream are charged to. A request without charges is sent, and its answer pauses nothing.
   */
  charges: (input: Input, init: Init) => Charge[] | undefined | Promise<Charge[] | undefined>
  /** The longest pause in milliseconds, whatever the upstream asks for: above 0. No pause is longer than 365 days. Defaults to an hour. */
  maxPauseMs?: number
  /**
   * How many milliseconds an answer pauses the first bucket, 0 or less for not at all, such as for the fields of one vendor. It must not
   * read the body. Defaults to 1000 times retryAfter.
   */
  pauseForMs?: (response: Response) => number | Promise<number>
  /** Sends the requests. Defaults to fetch. */
  fetch?: (input: Input, init: Init) => Promise<Response>
  /** Is called when a pause, or pauseForMs, failed. Defaults to console.warn. */
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
 * How many seconds a response asks its client to wait, or 0. Retry-After of a status of 400 or more wins if it can be read, then
 * Retry-After-Ms or X-Ms-Retry-After-Ms, of such a status, too. Otherwise it is the longest wait of RateLimit, and of RateLimit-Reset,
 * X-RateLimit-Reset and X-Rate-Limit-Reset, if nothing is left.
 *
 * A value is a number of decimal digits with or without a fraction, an HTTP date, or a date of RFC 3339. A number up to 365 days, behind
 * X- up to a day, is seconds; a number within 365 days of now is Unix time in seconds or milliseconds. Now is the response's Date, or
 * the local clock if there is no Date within 365 days of the instant. Any other value, a list, or a field that is sent twice is no wait.
 */
export function retryAfter(response: { status: number; headers: Headers }): number

import type { Charge, JointDecision, Limiter } from './index.js'

/** What byIP() and the middleware need of a request of node:http, Express or Connect. */
interface NodeRequest {
  headers: Record<string, string | string[] | undefined>
  socket: { remoteAddress?: string | undefined }
}

interface NodeResponse {
  appendHeader(name: string, value: string): unknown
  writeHead(status: number, headers: Record<string, string>): { end(body: string): unknown }
}

/** How the middleware handled a request. */
export interface LimitEvent {
  /**
   * allowed: the tokens were taken. denied: a bucket does not cover its charge. failed open, failed closed: there was no decision.
   * invalid: the fault of the request, the program or its set-up. abandoned: the client had gone, or the request was answered, before
   * there was a decision; tokens that were taken by then stay taken.
   */
  outcome: 'allowed' | 'denied' | 'failed open' | 'failed closed' | 'invalid' | 'abandoned'
  /** Of the refusal: 429, 400, 409, 500 or 503; 0 if the handler may run. */
  status: number
  /** RateLimit-Policy, RateLimit and Retry-After, for the answer of the handler, too. */
  headers: Record<string, string>
  /** The body of a refusal, application/problem+json. It names the policies that refused, and no key. */
  problem?: { type: string; title: string; status: number; 'violated-policies'?: string[] }
  /** They have the keys, which are not for clients. */
  charges: Charge[]
  decision?: JointDecision
  /** Why there is no decision. Its text may have the key. */
  error?: unknown
  durationMs: number
}

export interface DecideOptions<Args extends unknown[]> {
  /** The buckets that a request is charged to, all or nothing. A request without charges passes. */
  charges: (...request: Args) => Charge[] | null | undefined | Promise<Charge[] | null | undefined>
  /**
   * Whether a request passes when the database gives no decision, or is refused with 503. There is no default. A fault of the request or
   * the program is 500 with either, as is one of the set-up until there was a first decision.
   */
  failure: 'open' | 'closed'
  /** The policies that are quotas: of these t is the time until the turn. */
  quotas?: string[] | undefined
  /** Milliseconds until a request is without a decision. Defaults to 1000. */
  timeoutMs?: number | undefined
  /**
   * Names the operation, so that the same request sent again is not charged again; an empty string is no key. The program chooses it: a
   * function that returns a field of the client, such as Idempotency-Key, lets that client pass as often as it likes for one charge.
   * A key that is no text of 1 to 512 bytes is 400. A key used before with another cost, or settled, is 409.
   */
  idempotencyKey?: ((...request: Args) => string | null | undefined | Promise<string | null | undefined>) | undefined
  /** Is called with each request that has charges, before the handler runs or the refusal is written. */
  observe?: ((event: LimitEvent, ...request: Args) => unknown) | undefined
  /** Is called with each error. Defaults to console.warn with the remedy, for each kind of error at most once a minute. */
  onError?: ((error: unknown, ...request: Args) => unknown) | undefined
}

export interface HttpOptions<Args extends unknown[], Refusal = unknown> extends DecideOptions<Args> {
  /**
   * Answers a request that is refused: of limit() it writes the response, which has event.headers already; of limitFetch() it returns a
   * Response, which gets them. Defaults to event.problem.
   */
  refuseWith?: ((event: LimitEvent, ...request: Args) => Refusal) | undefined
}

/** Requests of failure: 'open' that passed without a decision since the start, by policy. */
interface Counted {
  readonly passed: ReadonlyMap<string, number>
}

/**
 * Middleware of Express, Connect, or node:http. A denial is 429, with the fields of docs/http.md. next is called once, without an
 * argument, or never: a request that was answered elsewhere while the limiter waited is left alone. If next throws, the answer is 500.
 * The promise never rejects.
 */
export function limit<Request extends NodeRequest, Response extends NodeResponse>(
  limiter: Limiter, options: HttpOptions<[request: Request, response: Response]>,
): ((request: Request, response: Response, next: () => unknown) => Promise<void>) & Counted

/** A handler of Request, or of a class of it, such as NextRequest: the parameters of a method may be narrower. */
type FetchHandler = { handle(request: Request, ...more: any[]): Response | Promise<Response> }['handle']

/**
 * A fetch handler that is asked when the limit allows it. The charges get the same arguments, such as the context of Next.js. A response
 * that can have no further fields is returned as it is.
 */
export function limitFetch<Handler extends FetchHandler>(
  limiter: Limiter, options: HttpOptions<Parameters<Handler>, Response | Promise<Response>>, handler: Handler,
): ((...request: Parameters<Handler>) => Promise<Response>) & Counted
export function limitFetch<Args extends [request: Request, ...more: unknown[]]>(
  limiter: Limiter, options: HttpOptions<Args, Response | Promise<Response>>, handler: (request: Args[0]) => Response | Promise<Response>,
): ((...request: Args) => Promise<Response>) & Counted

/**
 * For other frameworks: returns a function of a request, or whatever charges takes, that resolves to what to answer. It never rejects.
 * Pass the response or the reply as second argument, if there is one, so that a request that was answered is not charged.
 */
export function decide<Args extends unknown[]>(
  limiter: Limiter, options: DecideOptions<Args>,
): ((...request: [...Args, ...more: unknown[]]) => Promise<LimitEvent>) & Counted

/** Charges tokens of a policy, 1 by default, to the bucket that key names. */
export function per<Args extends unknown[]>(
  policy: string, key: (...request: Args) => string, cost?: number | bigint,
): (...request: Args) => Charge[]

export interface AddressOptions {
  /** The length of the network that shares a bucket, 1 to 128 bits of an IPv6 address. Defaults to 64. */
  ipv6Prefix?: number | undefined
}

/**
 * Names the bucket of the client's address, such as "ip:192.0.2.1", or for IPv6 its /64. Behind n trusted proxies that append to
 * X-Forwarded-For, it is the n-th address from the end of that field. Without an argument it trusts none, and
 * warns once if a request has the field. A fetch handler has no other: use addressKey() without a proxy.
 */
export function byIP(trustedProxies?: number, options?: AddressOptions): (request: NodeRequest | Request) => string

/** The key of an address, perhaps with a port: "ip:192.0.2.1", "ip:2001:db8::/64", or "ip:unknown". */
export function addressKey(address: string, options?: AddressOptions): string

/**
 * Names the bucket of the user that a function returns, "user:" and the name, or its hash if that fits no key. Without a user it is
 * the other key. The function must return a name that the program has verified.
 */
export function byUser<Args extends unknown[]>(
  user: (...request: Args) => string | null | undefined, otherwise: (...request: Args) => string,
): (...request: Args) => string

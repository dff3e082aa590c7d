import type { Charge, Limiter } from './index.js'

/** What byIP() and the middleware need of a request of node:http, Express or Connect. */
interface NodeRequest {
  headers: Record<string, string | string[] | undefined>
  socket: { remoteAddress?: string }
}

interface NodeResponse {
  appendHeader(name: string, value: string): unknown
  writeHead(status: number, headers: Record<string, string>): { end(body: string): unknown }
}

export interface HttpOptions<Args extends unknown[]> {
  /** The buckets that a request is charged to, all or nothing. A request without charges passes. */
  charges: (...request: Args) => Charge[] | undefined | Promise<Charge[] | undefined>
  /** Whether a request without a decision passes, or is refused with 503. There is no default. */
  failure: 'open' | 'closed'
  /** The policies that are quotas: of these t is the time until the turn. */
  quotas?: string[]
  /** Seconds until a request is without a decision. Defaults to 1. */
  timeout?: number
  /** Is called with each error of the limiter. Defaults to console.warn, at most once a second. */
  onError?: (error: unknown, ...request: Args) => void
}

/** Middleware of Express, Connect, or node:http. A denial is 429, with the fields of docs/http.md. */
export function limit<Request extends NodeRequest, Response extends NodeResponse>(
  limiter: Limiter, options: HttpOptions<[Request, Response]>,
): (request: Request, response: Response, next: (error?: any) => void) => Promise<void>

/** A fetch handler that is asked when the limit allows it. The charges get the same arguments, such as the context of Next.js. */
export function limitFetch<Handler extends (request: Request, ...more: any[]) => Response | Promise<Response>>(
  limiter: Limiter, options: HttpOptions<Parameters<Handler>>, handler: Handler,
): (...request: Parameters<Handler>) => Promise<Response>
export function limitFetch<More extends unknown[]>(
  limiter: Limiter, options: HttpOptions<[Request, ...More]>, handler: (request: Request) => Response | Promise<Response>,
): (request: Request, ...more: More) => Promise<Response>

/** Charges tokens of a policy, 1 by default, to the bucket that key names. */
export function per<Args extends unknown[]>(policy: string, key: (...request: Args) => string, cost?: number): (...request: Args) => Charge[]

/**
 * Names the bucket of the client's address, such as "ip:192.0.2.1", or for IPv6 its /64. Behind n trusted proxies that append to
 * X-Forwarded-For, it is the n-th address from the end of that field. A fetch handler has no other: use addressKey() without a proxy.
 */
export function byIP(trustedProxies?: number): (request: NodeRequest | Request) => string

/** The key of an address, perhaps with a port: "ip:192.0.2.1", "ip:2001:db8::/64", or "ip:unknown". */
export function addressKey(address: string): string

/**
 * Names the bucket of the user that a function returns, "user:" and the name, or its hash if that fits no key. Without a user it is
 * the other key. The function must return a name that the program has verified.
 */
export function byUser<Args extends unknown[]>(
  user: (...request: Args) => string | null | undefined, otherwise: (...request: Args) => string,
): (...request: Args) => string

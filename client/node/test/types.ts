// Not run: tsc --noEmit compiles it.
import { Combiner, Denied, Limiter, NotReady, TooLate, translate, type JointDecision } from 'pgratelimit'
import { addressKey, byIP, byUser, decide, limit, limitFetch, per } from 'pgratelimit/http'
import { limitedFetch, retryAfter } from 'pgratelimit/outgoing'
import { NestStorage, PostgresStore, fastifyStore } from 'pgratelimit/stores'
import fastifyRateLimit from '@fastify/rate-limit'
import { ThrottlerModule } from '@nestjs/throttler'
import { rateLimit } from 'express-rate-limit'
import fastify from 'fastify'
import { rateLimiter } from 'hono-rate-limiter'

declare const pool: { query(text: string, values?: unknown[]): Promise<{ rows: any[]; rowCount: number | null }> }
const limiter: Limiter = new Combiner(pool, { callsInFlight: 3, maxWaiting: 10, callTimeoutMs: 1000, schema: 'public', retry: true })

export async function use(signal: AbortSignal | undefined, schema: string | undefined, n: number | undefined) {
  const perhaps = new Combiner(pool, { schema, retry: undefined, callTimeoutMs: n, callsInFlight: n, maxWaiting: n })
  await perhaps.acquireAll([{ policy: 'api', key: 'k', cost: n }], { idempotencyKey: schema, signal })
  await perhaps.acquireUpTo('api', 'k', 5, { atLeast: n, signal })
  const { allowed, retryAfter } = await limiter.acquire('api', 'user:42', { cost: 5n, idempotencyKey: 'x', signal })
  if (!allowed && retryAfter !== null) retryAfter.toFixed()
  // @ts-expect-error null means never
  retryAfter.toFixed()
  const joint: JointDecision = await limiter.acquireAll([{ policy: 'api', key: 'k' }])
  joint.decisions[joint.binding]?.remaining
  // @ts-expect-error no option of that name
  await limiter.acquire('api', 'k', { idempotencykey: 'x' })
  // @ts-expect-error a key is text
  await limiter.acquire('api', 42)
  const { taken } = await limiter.acquireUpTo('api', 'k', 5, { atLeast: 2 })
  await limiter.wait('api', 'k', { timeoutMs: n, cost: taken }).catch((error) => error instanceof TooLate && error.reservation.wait)
  await using held = await limiter.hold('jobs', 'tenant:7', { cost: 2, signal })
  if (held.allowed) await fetch('https://example.org', { signal: held.signal }).then(() => held.release())
  const heldFor = await limiter.renew('jobs', 'k', held.holder)
  // @ts-expect-error null: it does not hold
  heldFor.toFixed()
  const freed: boolean = await limiter.release('jobs', 'k', held.holder)
  await limiter.check({ policies: ['api'], calls: ['acquire'], signal }).catch((error) => error instanceof NotReady && error.lacks.join())
  const error = translate(new Error())
  if (error instanceof Denied) error.cost.toFixed()
}

export const middleware = limit(limiter, { charges: per('api', byIP(1)), failure: 'open' })
export const handler = limitFetch(limiter, {
  charges: (request: Request, info: { address: string }) => [{ policy: 'api', key: byUser(() => request.headers.get('x'), () => addressKey(info.address))() }],
  failure: 'closed',
}, () => new Response('hello'))
export const route = limitFetch(limiter, { charges: (request) => [{ policy: 'api', key: request.url }], failure: 'open' },
  async (_request, context: { params: Promise<{ id: string }> }) => Response.json(await context.params))
class NextRequest extends Request { nextUrl = new URL(this.url) }
export const nextRoute: (request: NextRequest, context: { params: Promise<{ id: string }> }) => Promise<Response> = limitFetch(limiter, {
  charges: ({ nextUrl }) => [{ policy: 'api', key: nextUrl.pathname }], failure: 'open',
}, async (request: NextRequest, { params }: { params: Promise<{ id: string }> }) => Response.json([request.nextUrl, await params]))
export const nextPage = limitFetch(limiter, { charges: per('api', byIP(1, { ipv6Prefix: 56 })), failure: 'open' }, (request: NextRequest) => Response.json(request.nextUrl))
interface Socket { readonly remoteAddress?: string | undefined } // as in @types/node
type Express = [request: { headers: Record<string, string | undefined>; socket: Socket; user?: string }, response: Exchange[1], next: (error?: any) => void]
export const express: (...exchange: Express) => void = limit(limiter, {
  charges: per('api', byUser((request: Express[0]) => request.user, byIP())), failure: 'open', timeoutMs: 500, idempotencyKey: () => undefined,
  observe: ({ outcome, decision }) => outcome === 'denied' && decision?.retryAfter,
  refuseWith: ({ status, problem }, _request, response) => response.writeHead(status, {}).end(problem?.title ?? ''),
})
export const passes: number | undefined = middleware.passed.get('api')
export const decided = decide(limiter, { charges: (context: { address: string }) => [{ policy: 'api', key: addressKey(context.address) }], failure: 'closed' })
decided({ address: '192.0.2.1' }).then(({ status, headers }) => [status, headers])
type Exchange = Parameters<typeof middleware>
export const hook = (request: Exchange[0], response: Exchange[1], done: (error?: Error) => void) => { middleware(request, response, done) }
// @ts-expect-error there is no default for when there is no database
limit(limiter, { charges: per('api', byIP()) })

const upstream = limitedFetch(limiter, {
  charges: (_url: string, init: RequestInit & { tokens: number }) => [{ policy: 'requests', key: 'k' }, { policy: 'tokens', key: 'k', cost: init.tokens }],
  maxPauseMs: 60_000,
  pauseForMs: async (response) => retryAfter(response) * 1000,
})
upstream('https://example.org', { method: 'POST', tokens: 5 }).then((response: Response) => response.status)
// @ts-expect-error the charges need tokens
upstream('https://example.org', { method: 'POST' })
export const plain: typeof fetch = limitedFetch(limiter, { charges: () => [{ policy: 'requests', key: 'k' }], onError: console.error })

export const stores = [
  rateLimit({ windowMs: 1000, limit: 2, store: new PostgresStore(pool, { prefix: 'a' }) }),
  rateLimiter({ windowMs: 1000, limit: 2, keyGenerator: () => 'k', store: new PostgresStore(limiter, { policy: 'api' }) }),
  ThrottlerModule.forRoot({ throttlers: [{ ttl: 1000, limit: 2 }], storage: new NestStorage(pool) }),
  fastify().register(fastifyRateLimit, { max: 2, timeWindow: 1000, store: fastifyStore(pool) }),
]

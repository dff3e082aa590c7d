// An API that asks pgratelimit's server over gRPC. One connection carries all requests.
//
//   npm install
//   node grpc.mjs
//   curl -i -H 'X-User: 42' localhost:3000/
import http from 'node:http'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import grpc from '@grpc/grpc-js'
import protoLoader from '@grpc/proto-loader'

const SERVER = process.env.RATELIMIT_GRPC ?? 'localhost:8081'
const TOKEN = process.env.RATELIMIT_TOKEN // one of the server's TOKENS, if it has any
const PROTO = fileURLToPath(new URL('../../../server/proto/pgratelimit/v1/ratelimiter.proto', import.meta.url)) // copy it into your project

const { pgratelimit } = grpc.loadPackageDefinition(protoLoader.loadSync(PROTO, { keepCase: true, longs: Number, enums: String, defaults: true }))
const limiter = new pgratelimit.v1.RateLimiter(SERVER, grpc.credentials.createInsecure())
const call = promisify(limiter.Acquire.bind(limiter))

function acquire(key, cost) {
  const metadata = new grpc.Metadata()
  if (TOKEN) metadata.set('authorization', `Bearer ${TOKEN}`)
  return call({ policy: 'api', logical_key: key, cost }, metadata, { deadline: Date.now() + 1000 })
}

// What each path costs, in tokens.
const COSTS = { '/': 1, '/export': 10 }

http.createServer(async (request, response) => {
  const cost = COSTS[request.url]
  const user = request.headers['x-user'] // an API of yours knows whom it has authenticated
  if (!cost || !user) {
    response.writeHead(cost ? 401 : 404).end()
    return
  }
  let d
  try {
    d = await acquire(`user:${user}`, cost)
  } catch (error) {
    console.error('no decision:', error.message)
    response.writeHead(503).end() // or go on without a limit: that is for you to decide
    return
  }
  if (d.verdict !== 'ALLOWED') {
    // Absent means that no wait helps: the cost exceeds the capacity, or nothing refills the bucket.
    const wait = d.retry_after
    if (wait) response.setHeader('Retry-After', wait.seconds + (wait.nanos > 0 ? 1 : 0))
    response.writeHead(429).end('too many requests\n')
    return
  }
  response.end(`hello, ${user}: ${d.remaining} tokens left\n`)
}).listen(process.env.PORT ?? 3000, '127.0.0.1')

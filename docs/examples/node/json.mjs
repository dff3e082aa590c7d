// An API that asks pgratelimit's server over JSON, with nothing but Node.
//
//   node json.mjs
//   curl -i -H 'X-User: 42' localhost:3000/
import http from 'node:http'

const SERVER = process.env.RATELIMIT_URL ?? 'http://localhost:8080'
const TOKEN = process.env.RATELIMIT_TOKEN // one of the server's TOKENS, if it has any

async function acquire(key, cost) {
  const response = await fetch(`${SERVER}/v1/acquire`, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json', ...(TOKEN && { Authorization: `Bearer ${TOKEN}` }) },
    body: JSON.stringify({ policy: 'api', key, cost }),
    signal: AbortSignal.timeout(1000),
  })
  const answer = await response.json()
  if (!response.ok) throw new Error(`pgratelimit: ${answer.title}: ${answer.detail}`)
  return answer
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
    console.error('no decision:', error.message, error.cause?.code ?? '')
    response.writeHead(503).end() // or go on without a limit: that is for you to decide
    return
  }
  if (!d.allowed) {
    // Null means that no wait helps: the cost exceeds the capacity, or nothing refills the bucket.
    if (d.retry_after !== null) response.setHeader('Retry-After', Math.ceil(d.retry_after))
    response.writeHead(429).end('too many requests\n')
    return
  }
  response.end(`hello, ${user}: ${d.remaining} tokens left\n`)
}).listen(process.env.PORT ?? 3000, '127.0.0.1')

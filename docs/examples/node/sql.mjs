// An API that asks the database itself, with pg.
//
//   npm install
//   PGHOST=localhost PGUSER=app PGPASSWORD=… PGDATABASE=app node sql.mjs
//   curl -i -H 'X-User: 42' localhost:3000/
import http from 'node:http'
import pg from 'pg'

const pool = new pg.Pool({ connectionTimeoutMillis: 1000, options: '-c lock_timeout=500' })
pool.on('error', console.error) // of an idle connection: without a listener it would end the program

const ACQUIRE = `select allowed,
       least(remaining, 2147483647)::integer as remaining,
       least(ceil(extract(epoch from retry_after)), 2147483647)::integer as retry_after_seconds,
       retry_after is null as never
  from ratelimit_acquire($1::text, $2::text, $3::bigint)`

async function acquire(key, cost) {
  const { rows: [d] } = await pool.query(ACQUIRE, ['api', key, cost])
  return d
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
  if (!d.allowed) {
    if (!d.never) response.setHeader('Retry-After', d.retry_after_seconds)
    response.writeHead(429).end('too many requests\n')
    return
  }
  response.end(`hello, ${user}: ${d.remaining} tokens left\n`)
}).listen(process.env.PORT ?? 3000, '127.0.0.1')

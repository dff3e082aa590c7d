// An API that asks the database itself, with the Node client.
//
//   npm install
//   PGHOST=localhost PGUSER=app PGPASSWORD=… PGDATABASE=app node sql.mjs
//   curl -i -H 'X-User: 42' localhost:3000/
import http from 'node:http'
import pg from 'pg'
import { Combiner } from 'pgratelimit'
import { limit } from 'pgratelimit/http'

const pool = new pg.Pool({ connectionTimeoutMillis: 1000, options: '-c lock_timeout=500' })
pool.on('error', console.error) // of an idle connection: without a listener it would end the program

// What each path costs, in tokens.
const COSTS = { '/': 1, '/export': 10 }

const userOf = (request) => request.headers['x-user'] // an API of yours knows whom it has authenticated

const limited = limit(new Combiner(pool), {
  charges: (request) => [{ policy: 'api', key: `user:${userOf(request)}`, cost: COSTS[request.url] }],
  failure: 'closed', // or open: that is for you to decide
  timeoutMs: 1000,
})

http.createServer((request, response) => {
  if (!COSTS[request.url]) response.writeHead(404).end()
  else if (!userOf(request)) response.writeHead(401).end()
  else limited(request, response, () => response.end(`hello, ${userOf(request)}\n`))
}).listen(process.env.PORT ?? 3000, '127.0.0.1')

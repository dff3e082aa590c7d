// The process of hangups.test.js: a time-out middleware, and the limiter behind it. Its standard input ends it.
import http from 'node:http'
import { Limiter } from '../index.js'
import { limit } from '../http.js'
import { connect } from './kit.js'

const limiter = new Limiter(connect()), outcomes = {}
let granted = 0, underWay = 0

const limited = limit(limiter, {
  charges: () => [{ policy: process.argv[2], key: 'k' }], failure: 'closed', timeoutMs: 60_000,
  observe({ outcome, decision }) {
    outcomes[outcome] = (outcomes[outcome] ?? 0) + 1
    if (decision?.allowed) granted++
  },
})

const server = http.createServer(async (request, response) => {
  const late = setTimeout(() => { response.writeHead(503); response.end() }, 30)
  response.on('close', () => clearTimeout(late))
  underWay++
  await limited(request, response, () => { clearTimeout(late); response.end('hello') })
  underWay--
})

server.listen(0, '127.0.0.1', () => process.send(server.address()))
process.stdin.resume().on('end', async () => {
  server.closeAllConnections()
  while (underWay > 0) await new Promise(setImmediate)
  process.send({ granted, outcomes }, () => process.exit(0))
})

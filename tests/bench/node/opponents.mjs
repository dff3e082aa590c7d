// Limiters for Node.js on PostgreSQL, as processes of the benchmark (see ../elsewhere.go). A line of JSON orders a run, and a line
// answers.
//
//   node opponents.mjs LIMITER SOCKET_DIRECTORY DATABASE CONNECTIONS
import readline from 'node:readline'
import pg from 'pg'
import { RateLimiterPostgres } from 'rate-limiter-flexible'
import { Combiner, Limiter } from '../../../client/node/index.js'

const [, , name, host, database, connections] = process.argv
const pool = new pg.Pool({ host, database, user: 'postgres', max: Number(connections), options: '-c synchronous_commit=off' })

const CAPACITY = 100_000_000 // no bucket runs dry
const KEYS = { uniform: () => `user:${1 + Math.floor(Math.random() * 100_000)}`, hot: () => 'hot' }

const taking = (limiter) => async (key) => {
  const { allowed } = await limiter.acquire('durable', key)
  if (!allowed) throw new Error('denied, though the bucket was not to run dry')
}

// Each takes one token of a key, and throws if it is denied.
const limiters = {
  // A window that is fixed: it begins with the first request of a key, and all of it is there again when it ends. One statement counts
  // up, without looking whether there is room: a denial is written, too.
  async 'rate-limiter-flexible'() {
    return new Promise((resolve, reject) => {
      const limiter = new RateLimiterPostgres({ storeClient: pool, keyPrefix: 'flexible', tableName: 'flexible', points: CAPACITY, duration: 86_400 },
        (error) => error ? reject(error) : resolve((key) => limiter.consume(key)))
    })
  },

  async plain() { return taking(new Limiter(pool)) },

  async combined() { return taking(new Combiner(pool)) },
}

// run returns what ../elsewhere.go calls a tale.
async function run(acquire, task) {
  let count = 0, counting = false, ended = false
  const callers = Array.from({ length: task.Callers }, async () => {
    while (!ended) {
      await acquire(KEYS[task.Keys]())
      if (counting) count++
    }
  })
  const all = Promise.all(callers)
  all.catch(() => { ended = true })
  const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000))
  await pause(task.Warm)
  counting = true
  await pause(task.Window)
  counting = false
  ended = true
  await all
  return { Count: count }
}

const acquire = await limiters[name]()
console.log('ready')
for await (const line of readline.createInterface({ input: process.stdin })) {
  let tale
  try {
    tale = await run(acquire, JSON.parse(line))
  } catch (error) {
    tale = { Error: `${name}: ${error.message ?? JSON.stringify(error)}` }
  }
  console.log(JSON.stringify(tale))
}
await pool.end()
process.exit() // rate-limiter-flexible has timers

// What tests/queues runs: node drive.mjs pg-boss reserve, for example. Each start of a job is a row of starts.
import pg from 'pg'
import { PgBoss } from 'pg-boss'
import { Logger, makeWorkerUtils, run } from 'graphile-worker'
import * as forBoss from './pg-boss.mjs'
import * as forGraphile from './graphile-worker.mjs'

const pool = new pg.Pool({ max: 20 })
const pollMs = 500 // the shortest of pg-boss

const queues = {
  async 'pg-boss'() {
    const boss = new PgBoss({ schedule: false, supervise: false, max: 20 })
    boss.on('error', fail)
    await boss.start()
    await boss.createQueue('calls')
    const record = ({ data, id }) => pool.query(`
      insert into starts (kind, n, key, instant, fetched) select $1, $2, $3, start_after, started_on from pgboss.job where id = $4`,
    [data.kind, data.n, data.key, id]).then(started)
    return {
      jobs: 'pgboss.job',
      due: 'start_after',
      enqueue: (client, data, options) => forBoss.enqueue(boss, client, 'calls', data, options),
      add: (jobs) => boss.insert('calls', jobs.map(({ data, at }) => ({ data, startAfter: at }))),
      work: () => boss.work('calls', { pollingIntervalSeconds: pollMs / 1000, batchSize: 200, burstWhenBatchFull: true },
        (jobs) => Promise.all(jobs.map(record))),
      limited: (work = record) => boss.work('calls', { pollingIntervalSeconds: pollMs / 1000, localConcurrency: 60 },
        forBoss.limited(boss, pool, 'calls', 'calls', work)),
      batch: () => forBoss.limited(boss, pool, 'calls', 'calls', () => {})([{ id: '1', data: { key: 'k' } }, { id: '2', data: { key: 'k' } }]),
      dieWhileDenied() {
        boss.complete = die
        return this.limited()
      },
      async recover() {
        await pool.query("update pgboss.job set started_on = started_on - interval '1 day' where state = 'active'")
        await boss.supervise('calls')
      },
      stop: () => boss.stop(),
    }
  },
  async 'graphile-worker'() {
    const logger = new Logger(() => (level, message) => level === 'error' && fail(message))
    const utils = await makeWorkerUtils({ pgPool: pool, logger })
    await utils.migrate()
    const record = ({ kind, n, key }, { job }) => pool.query(`
      insert into starts (kind, n, key, instant, fetched) select $1, $2, $3, run_at, locked_at from graphile_worker.jobs where id = $4`,
    [kind, n, key, job.id]).then(started)
    let runner
    const work = async (task) => {
      runner = await run({ pgPool: pool, logger, taskList: { calls: task }, concurrency: 10, pollInterval: pollMs, noHandleSignals: true })
    }
    return {
      jobs: 'graphile_worker.jobs',
      due: 'run_at',
      enqueue: (client, data, options) => forGraphile.enqueue(client, 'calls', data, options),
      add: (jobs) => pool.query(`
        select graphile_worker.add_job('calls', job->'data', run_at => (job->>'at')::timestamptz, job_key => gen_random_uuid()::text)
          from json_array_elements($1) as job`, [JSON.stringify(jobs)]),
      work: () => work(record),
      limited: (then = record) => work(forGraphile.limited(pool, 'calls', then)),
      dieWhileDenied: () => work((...job) => forGraphile.limited(pool, 'calls', record)(...job).then(die)),
      recover: () => pool.query('update graphile_worker._private_jobs set locked_at = null, locked_by = null, run_at = now()'), // a day later
      async stop() {
        await runner?.stop()
        await utils.release()
      },
    }
  },
}

function fail(error) {
  console.error(error)
  process.exit(1)
}

function die() {
  process.kill(process.pid, 'SIGKILL')
  return new Promise(() => {})
}

let left, allStarted
const started = () => --left === 0 && allStarted()
const starting = (count) => new Promise((resolve) => [left, allStarted] = [count, resolve])

async function transaction(enqueue, end) {
  const client = await pool.connect()
  await client.query('begin')
  const id = await enqueue(client)
  await client.query(end)
  client.release()
  return id
}

const [name, subject] = process.argv.slice(2)
const queue = await queues[name]()
const at = new Date(Date.now() - 60_000).toISOString()
const subjects = {
  // 1,000 jobs of one key, and for the instant of each that waits a job without a reservation.
  async reserve() {
    const options = { policy: 'calls', key: 'k', maxWait: '1 hour' }
    await pool.query("select ratelimit_charge('calls', 'k', 510)") // the line begins in 5 seconds
    const all = starting(1000 + 1) // 1 until the others are added
    await queue.work()
    let n = 0
    await Promise.all(Array.from({ length: 8 }, async () => {
      while (n < 1000) {
        const data = { kind: 'reserved', n: n++, key: 'k' }
        await transaction((client) => queue.enqueue(client, data, options), 'commit')
      }
    }))
    const { rows } = await pool.query(`
      select to_char(${queue.due} at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as at from ${queue.jobs}
       where ${queue.due} > now() + interval '1 second'`)
    left += rows.length
    await queue.add(rows.map(({ at }, n) => ({ data: { kind: 'alone', n, key: 'k' }, at })))
    started()
    await all
  },
  // Three keys, of which one is limited.
  async work() {
    await queue.add(Array.from({ length: 180 }, (_, n) => ({ data: { kind: 'limited', n, key: ['slow', 'b', 'c'][n % 3] }, at })))
    const all = starting(180)
    await queue.limited()
    await all
  },
  async rollback() {
    console.log(await transaction((client) => queue.enqueue(client, { key: 'k' }, { policy: 'calls', key: 'k', maxWait: '0' }), 'rollback'))
  },
  async deny() {
    for (let i = 0; i < 2; i++) {
      console.log(await transaction((client) => queue.enqueue(client, { key: 'k' }, { policy: 'calls', key: 'k', maxWait: '0' }), 'commit'))
    }
  },
  batch: () => queue.batch(),
  async 'die granted'() {
    await queue.add([{ data: { kind: 'crash', n: 1, key: 'k' }, at }])
    await queue.limited(die)
    await starting(1)
  },
  async 'die denied'() {
    await queue.add([{ data: { kind: 'crash', n: 1, key: 'k' }, at }])
    await queue.dieWhileDenied()
    await starting(1)
  },
  async recover() {
    await queue.recover()
    const all = starting(1)
    await queue.limited()
    await all
  },
}
await subjects[subject]()
await queue.stop()
await pool.end()

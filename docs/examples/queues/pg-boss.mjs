import { Limiter } from 'pgratelimit'

/** Reserves a token and sends the job, in the transaction that is open on the client. After a denial it sends nothing, and returns null. */
export async function enqueue(boss, client, queue, data, { policy, key, maxWait }) {
  // The instant is text of the server. A number would count from the start of the transaction, and a Date has no microseconds.
  const { rows: [{ allowed, at }] } = await client.query(`
    select allowed, to_char((clock_timestamp() + wait) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as at
      from ratelimit_reserve($1, $2, $3)`, [policy, key, maxWait])
  return allowed ? boss.send(queue, data, { startAfter: at, db: { executeSql: (sql, values) => client.query(sql, values) } }) : null
}

/** A handler for boss.work, which does a job when the bucket of its key has a token, and until then puts it off. */
export const limited = (boss, pool, queue, policy, work) => async ([job, ...more]) => {
  if (more.length > 0) throw new Error('limited does one job: its batchSize must be 1') // pg-boss would complete them all
  const { allowed, retryAfter } = await new Limiter(pool).acquire(policy, job.data.key, { idempotencyKey: job.id })
  if (allowed) return work(job)
  if (retryAfter === null) throw new Error(`${policy} never lets ${job.data.key} pass`)
  // A denied job is completed, and a copy sent, in one transaction: a crash leaves one of the two. A retry of pg-boss would count as a
  // failure. A job that crashes after its grant is tried again under its id, so the grant is replayed, and nothing is charged.
  const transaction = await boss.getDb().beginTransaction()
  try {
    await boss.send(queue, job.data, { startAfter: retryAfter, db: transaction.db })
    const { affected } = await boss.complete(queue, job, null, { db: transaction.db })
    if (affected !== 1) throw new Error(`job ${job.id} has expired`) // and is done elsewhere
    await transaction.commit()
  } finally {
    await transaction.rollback() // which does nothing after a commit
  }
}

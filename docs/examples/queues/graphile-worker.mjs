import { Limiter } from 'pgratelimit'

/** Reserves a token and adds the job, in one statement. After a denial it adds nothing, and returns null. */
export async function enqueue(client, task, payload, { policy, key, maxWait }) {
  // Not now() + wait: now() is the start of the transaction, and the wait counts from the reservation.
  const { rows } = await client.query(`
    select (graphile_worker.add_job($1, $2, run_at => clock_timestamp() + wait, job_key => gen_random_uuid()::text)).id
      from ratelimit_reserve($3, $4, $5)
     where allowed`, [task, payload, policy, key, maxWait])
  return rows[0]?.id ?? null
}

/** A task that does a job when the bucket of its key has a token, and until then puts it off. */
export const limited = (pool, policy, work) => async (payload, helpers) => {
  const { job } = helpers
  const { allowed, retryAfter } = await new Limiter(pool).acquire(policy, payload.key, { idempotencyKey: job.id })
  if (allowed) return work(payload, helpers)
  if (retryAfter === null) throw new Error(`${policy} never lets ${payload.key} pass`)
  if (job.key === null) throw new Error(`job ${job.id} has no job_key`)
  // add_job under the key of the running job adds a copy, and lets the running one never start again: a crash leaves one of the two.
  // An error would count as a failure. A job that crashes after its grant is tried again under its id, so the grant is replayed, and
  // nothing is charged.
  await helpers.query(`
    select graphile_worker.add_job($1, $2, $3, now() + $4::float8 * interval '1 second', $5, job_key => $6, priority => $7)`,
  [job.task_identifier, payload, await helpers.getQueueName(), retryAfter, job.max_attempts, job.key, job.priority])
}

-- Shows the jobs, their last runs, and the rows that are due. When pg_cron is in another database, run the first
-- query there.
--
-- The next line makes psql end with status 3 on an error. Leave it out with any other client.
\set ON_ERROR_STOP on

-- The jobs, with their last run and the failures of the last 24 hours.
select j.jobname                  as job,
       j.database,
       j.username                as role,
       j.schedule,
       j.active,
       last.status                as last_status,
       last.return_message        as last_message,
       last.start_time            as last_start,
       last.end_time - last.start_time as last_took,
       (select count(*)
          from cron.job_run_details as d
         where d.jobid = j.jobid
           and d.status = 'failed'
           and d.start_time > now() - interval '24 hours') as failed_in_24_hours
  from cron.job as j
  left join lateral (select *
                       from cron.job_run_details as d
                      where d.jobid = j.jobid
                      order by d.runid desc
                      limit 1) as last on true
 where j.jobname like 'ratelimit-cleanup%'
 order by j.jobname;

-- The rows that clean-up would read now, because they have been due for five minutes. A number that grows from
-- minute to minute means that clean-up does not run, or cannot keep up.
select 'buckets' as table_name, count(*) as due, min(due_at) as since
  from ratelimit.buckets where due_at <= now() - interval '5 minutes'
union all
select 'ephemeral_buckets', count(*), min(due_at)
  from ratelimit.ephemeral_buckets where due_at <= now() - interval '5 minutes'
union all
select 'idempotency_keys', count(*), min(expires_at)
  from ratelimit.idempotency_keys where expires_at <= now() - interval '5 minutes'
union all
select 'ephemeral_idempotency_keys', count(*), min(expires_at)
  from ratelimit.ephemeral_idempotency_keys where expires_at <= now() - interval '5 minutes';

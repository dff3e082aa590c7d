-- Shows the jobs, their last runs, what the doctor finds, and the emptiest buckets. When pg_cron is in another database, run
-- the first query there. The functions of the package must be on search_path.
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

-- What makes limits slow or tables large, such as rows overdue for clean-up, and what helps. No row: all is well.
select * from ratelimit_doctor();

-- The emptiest buckets. This reads every bucket.
select * from ratelimit_status(max_rows => 10);

-- Removes the jobs of schedule.sql and their run history, in the same database. The file can be run again at
-- any time.
--
-- The next line makes psql end with status 3 on an error. Leave it out with any other client.
\set ON_ERROR_STOP on

do $$
begin
  if to_regclass('cron.job') is null then
    raise notice 'pg_cron is not in database %: nothing is scheduled from here', current_database();
    return;
  end if;

  delete from cron.job_run_details as r
   using cron.job as j
   where j.jobid = r.jobid
     and j.jobname in ('ratelimit-cleanup', 'ratelimit-cleanup-history');

  perform cron.unschedule(j.jobid)
     from cron.job as j
    where j.jobname in ('ratelimit-cleanup', 'ratelimit-cleanup-history');
end;
$$;

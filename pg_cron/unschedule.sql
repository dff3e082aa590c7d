-- Undoes schedule.sql, in the same database, and forgets the run history of its jobs.
-- Can be run again at any time. A client other than psql leaves out the line below.
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

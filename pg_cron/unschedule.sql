-- Undoes schedule.sql, in the same database, and forgets the run history of its jobs.
-- Plain SQL: any client can run it, as often as it likes.
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

-- Undoes schedule_elsewhere.sql, run in the same database, as often as you like:
--
--   psql "$DATABASE_URL" -f pg_cron/unschedule_elsewhere.sql
--
-- A role that may not read cron.database_name adds -v cron_database=...
\set ON_ERROR_STOP on
\set QUIET on

select pg_catalog.format('ratelimit-cleanup:%s', current_database())         as cleanup,
       pg_catalog.format('ratelimit-cleanup-history:%s', current_database()) as history
\gset
\if :{?cron_database}
\else
  select current_setting('cron.database_name') as cron_database
  \gset
\endif

\connect :cron_database

delete from cron.job_run_details as r
 using cron.job as j
 where j.jobid = r.jobid
   and j.jobname in (:'cleanup', :'history');

select count(cron.unschedule(j.jobid)) as jobs
  from cron.job as j
 where j.jobname in (:'cleanup', :'history')
\gset

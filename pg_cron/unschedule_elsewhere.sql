-- Removes the jobs of schedule_elsewhere.sql and their run history. For psql, in the database that has the
-- package. The file can be run again at any time:
--
--   psql "$DATABASE_URL" -f pg_cron/unschedule_elsewhere.sql
--
-- A role that may not read the setting cron.database_name adds -v cron_database=...
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

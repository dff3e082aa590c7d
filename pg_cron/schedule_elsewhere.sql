-- Schedules clean-up when pg_cron is in another database of the same server. For psql, in the database that
-- has the package. The file can be run again at any time:
--
--   psql "$DATABASE_URL" -f pg_cron/schedule_elsewhere.sql
--
-- The file reconnects to pg_cron's database and schedules from there. The role needs EXECUTE on
-- cron.schedule_in_database, which pg_cron grants to no role. The jobs run as schedule.sql says.
-- A role that may not read the setting cron.database_name adds -v cron_database=...
\set ON_ERROR_STOP on
\set QUIET on

select pg_catalog.max(pg_catalog.format('call %I.%I()', n.nspname, p.proname)) as call,
       pg_catalog.max(job.role::text)                                          as role,
       pg_catalog.bool_and((job.role = current_user or o.rolcanlogin)
                           and pg_catalog.has_function_privilege(job.role, p.oid, 'execute')
                           and pg_catalog.has_schema_privilege(job.role, r.oid, 'usage')
                           and (select pg_catalog.has_function_privilege(job.role, b.oid, 'execute')
                                  from pg_catalog.pg_proc as b where b.pronamespace = r.oid and b.proname = 'cleanup_batch')) as runs,
       current_user                                                            as me,
       current_database()                                                      as database,
       pg_catalog.format('ratelimit-cleanup:%s', current_database())           as cleanup,
       pg_catalog.format('ratelimit-cleanup-history:%s', current_database())   as history
  from pg_catalog.pg_proc as p
  join pg_catalog.pg_namespace as n on n.oid = p.pronamespace
  join pg_catalog.pg_namespace as r on r.nspname = 'ratelimit' and r.nspowner = p.proowner
  join pg_catalog.pg_roles as o on o.oid = p.proowner
  join pg_catalog.pg_roles as me on me.rolname = current_user
 cross join lateral (select case when me.rolsuper and not o.rolsuper then o.rolname else current_user end as role) as job
 where p.proname = 'ratelimit_cleanup_all'
\gset
\if :{?call}
\else
  do $$
  begin
    raise exception 'pgratelimit is not installed in this database'
      using errcode = 'object_not_in_prerequisite_state',
            hint    = 'Install it first: psql -f migrations/psql/install.sql, or make install DATABASE_URL=...';
  end;
  $$;
\endif

\if :runs
\else
  do $$
  begin
    raise exception 'the role may not clean up'
      using errcode = 'insufficient_privilege',
            detail  = 'It lacks a grant; or a superuser ran this, and the owner of the package may not log in.',
            hint    = 'Run this file as a role that may log in and has the grants for clean-up of docs/operating.md.';
  end;
  $$;
\endif

\if :{?cron_database}
\else
  select max(s.setting) as cron_database from pg_catalog.pg_settings as s where s.name = 'cron.database_name'
  \gset
\endif
\if :{?cron_database}
\else
  do $$
  begin
    raise exception 'pg_cron is not on this server'
      using errcode = 'object_not_in_prerequisite_state',
            detail  = 'The server has not loaded it, or this role may not see where it is.',
            hint    = 'Add -v cron_database=... if you know; pg_cron/README.md tells how to install it, and how to clean up without it.';
  end;
  $$;
\endif

\connect :cron_database

-- Jobs that another role had scheduled, as far as this one sees them.
delete from cron.job_run_details as r
 using cron.job as j
 where j.jobid = r.jobid
   and j.jobname in (:'cleanup', :'history')
   and j.username <> case j.jobname when :'cleanup' then :'role' else :'me' end;
select count(cron.unschedule(j.jobid)) as jobs
  from cron.job as j
 where j.jobname in (:'cleanup', :'history')
   and j.username <> case j.jobname when :'cleanup' then :'role' else :'me' end
\gset

select case when :'role' = :'me' then cron.schedule_in_database(:'cleanup', '* * * * *', :'call', :'database')
            else cron.schedule_in_database(:'cleanup', '* * * * *', :'call', :'database', :'role') end as job
\gset

-- pg_cron keeps a row of every run and never deletes it. This job does, after 7 days.
select cron.schedule(:'history', '17 3 * * *', pg_catalog.format(
    'delete from cron.job_run_details'
    ' where coalesce(end_time, start_time) < now() - interval ''7 days'''
    ' and jobid in (select jobid from cron.job where jobname in (%L, %L))', :'cleanup', :'history')) as job
\gset
\echo Clean-up of database :database is scheduled every minute, as role :role.

-- Schedules clean-up with pg_cron, every minute, in the database that has both the package and pg_cron.
-- The file can be run again at any time.
--
-- The jobs run as the role that runs this file. But the owner of the package can put anything into its procedure: a superuser schedules
-- clean-up as the owner. The file finds existing jobs by name and replaces them: a superuser replaces the jobs of all roles, another role
-- sees and replaces its own jobs only. pg_cron keeps the port and the database of a job that is scheduled again: jobs of a dump would run
-- on the server it was made of.
--
-- The next line makes psql end with status 3 on an error. Leave it out with any other client.
\set ON_ERROR_STOP on

do $$
declare
  v_home   text := (select s.setting from pg_catalog.pg_settings as s where s.name = 'cron.database_name');
  v_call   text;
  v_role   name;      -- that runs it
  v_runs   boolean;   -- it can
  v_others bigint[];  -- jobs that are replaced
begin
  select pg_catalog.format('call %I.%I()', n.nspname, p.proname), job.role,
         (job.role = current_user or o.rolcanlogin)
         and pg_catalog.has_function_privilege(job.role, p.oid, 'execute')
         and pg_catalog.has_schema_privilege(job.role, r.oid, 'usage')
         and (select pg_catalog.has_function_privilege(job.role, b.oid, 'execute')
                from pg_catalog.pg_proc as b where b.pronamespace = r.oid and b.proname = 'cleanup_batch')
    into v_call, v_role, v_runs
    from pg_catalog.pg_proc as p
    join pg_catalog.pg_namespace as n on n.oid = p.pronamespace
    join pg_catalog.pg_namespace as r on r.nspname = 'ratelimit' and r.nspowner = p.proowner
    join pg_catalog.pg_roles as o on o.oid = p.proowner
    join pg_catalog.pg_roles as me on me.rolname = current_user
   cross join lateral (select case when me.rolsuper and not o.rolsuper then o.rolname else current_user end as role) as job
   where p.proname = 'ratelimit_cleanup_all';
  if v_call is null then
    raise exception 'pgratelimit is not installed in this database'
      using errcode = 'object_not_in_prerequisite_state',
            detail  = pg_catalog.format('Database %I has no procedure ratelimit_cleanup_all.', current_database()),
            hint    = 'Install it first: psql -f migrations/psql/install.sql, or make install DATABASE_URL=...';
  end if;

  if not v_runs then
    raise exception 'the role may not clean up'
      using errcode = 'insufficient_privilege',
            detail  = pg_catalog.format('Role %I lacks a grant, or owns the package and may not log in.', v_role),
            hint    = 'Run this file as a role that may log in and has the grants for clean-up of docs/operating.md.';
  end if;

  perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('ratelimit-cleanup'));  -- concurrent runs of this file take turns from here

  if not exists (select from pg_catalog.pg_extension as e where e.extname = 'pg_cron') then
    if v_home = current_database() then
      create extension pg_cron;  -- the server has loaded pg_cron for this database
    elsif v_home is not null then
      raise exception 'pg_cron is not in this database'
        using errcode = 'object_not_in_prerequisite_state',
              detail  = pg_catalog.format('It is in database %I; this is %I.', v_home, current_database()),
              hint    = 'Run pg_cron/schedule_elsewhere.sql instead.';
    else
      raise exception 'pg_cron is not in this database'
        using errcode = 'object_not_in_prerequisite_state',
              detail  = 'The server has not loaded it, or this role may not see where it is.',
              hint    = pg_catalog.format('A superuser runs, once the server has loaded it: create extension pg_cron; grant usage on schema cron to %I; '
                                          'pg_cron/README.md tells how to install it, and how to clean up without it.', current_user);
    end if;
  end if;
  if not pg_catalog.has_schema_privilege('cron', 'usage') then
    raise exception 'the role may not use pg_cron'
      using errcode = 'insufficient_privilege',
            detail  = pg_catalog.format('Role %I has no USAGE on schema cron.', current_user),
            hint    = pg_catalog.format('As a superuser: grant usage on schema cron to %I;', current_user);
  end if;

  v_others := array(select j.jobid
                      from cron.job as j
                     where j.jobname in ('ratelimit-cleanup', 'ratelimit-cleanup-history')
                       and (j.username <> case j.jobname when 'ratelimit-cleanup' then v_role else current_user end
                         or j.nodeport <> pg_catalog.current_setting('port')::int4
                         or j.database <> current_database()));
  delete from cron.job_run_details as r where r.jobid = any (v_others);
  perform cron.unschedule(j.jobid) from pg_catalog.unnest(v_others) as j (jobid);

  if v_role = current_user then
    perform cron.schedule('ratelimit-cleanup', '* * * * *', v_call);
  else
    perform cron.schedule_in_database('ratelimit-cleanup', '* * * * *', v_call, current_database(), v_role);
  end if;

  -- pg_cron keeps a row of every run and never deletes it. This job does, after 7 days.
  perform cron.schedule('ratelimit-cleanup-history', '17 3 * * *',
    'delete from cron.job_run_details'
    ' where coalesce(end_time, start_time) < now() - interval ''7 days'''
    ' and jobid in (select jobid from cron.job where jobname in (''ratelimit-cleanup'', ''ratelimit-cleanup-history''))');
end;
$$;

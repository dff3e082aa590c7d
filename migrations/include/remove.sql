-- Removes what any version of pgratelimit has, but for the version table and the schema. Without cascade: an object outside the package
-- that depends on one of these stops the removal, and so does, later, a table that is not of the package.
do $remove$
declare
  v_path   text := pg_catalog.current_setting('search_path');
  v_owner  oid;
  v_home   oid;  -- the schema of the public functions
  v_object record;
  v_before bigint;
  v_left   bigint;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspowner into v_owner from pg_namespace as n where n.nspname = 'ratelimit';
  select p.pronamespace
    into v_home
    from pg_proc as p
   where p.proname = 'ratelimit_acquire'
     and p.proowner = v_owner
     and p.prorettype = to_regtype('ratelimit.decision');
  if current_setting('lock_timeout') = '0' then
    perform set_config('lock_timeout', '3s', true);  -- all calls wait behind it
  end if;
  if to_regclass('ratelimit.policies') is not null then
    lock table ratelimit.policies in access exclusive mode;  -- the first that calls lock
  end if;
  loop
    v_before := v_left;
    v_left   := 0;
    for v_object in
      select 'routine' as kind, p.oid::regprocedure::text as name
        from pg_proc as p
       where p.proowner = v_owner
         and (p.pronamespace = to_regnamespace('ratelimit') or p.pronamespace = v_home and starts_with(p.proname, 'ratelimit_'))
      union all
      select case c.relkind when 'r' then 'table' else 'type' end, c.oid::regclass::text
        from pg_class as c
       where c.relnamespace = to_regnamespace('ratelimit')
         and (c.relkind = 'c'
           or c.relkind = 'r'
              and c.relname ~ '^(ephemeral_)?(policies|overrides|buckets|idempotency_keys|usage|slots|leases|shard|pre_request|schema_version)$')
    loop
      begin
        execute format('drop %s %s', v_object.kind, v_object.name);
      exception
        when dependent_objects_still_exist then
          v_left := v_left + 1;
          if v_left = v_before then  -- as many as in the round before
            raise;
          end if;
      end;
    end loop;
    exit when v_left = 0;
  end loop;
  perform set_config('search_path', v_path, true);
end;
$remove$;

-- Unschedules the jobs of pg_cron/schedule.sql.
do $cron$
declare
  v_path   text := pg_catalog.current_setting('search_path');
  v_there  boolean := pg_catalog.to_regnamespace('ratelimit') is not null;  -- else who removed it may have left jobs of other roles
  v_jobs   bigint[];
  v_doubt  text;
  v_remedy text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  begin
    if exists (select from pg_extension as e where e.extname = 'pg_cron') then
      v_remedy := 'If it is, run pg_cron/unschedule.sql as the role that scheduled it, or as a superuser.';
      v_jobs := array(select j.jobid from cron.job as j where j.jobname in ('ratelimit-cleanup', 'ratelimit-cleanup-history'));
      delete from cron.job_run_details as r where r.jobid = any (v_jobs);
      perform cron.unschedule(j.jobid) from unnest(v_jobs) as j (jobid);
      if cardinality(v_jobs) < 2 and not (select r.rolsuper from pg_roles as r where r.rolname = current_user) then
        v_doubt := 'Jobs of other roles are not visible to this role.';
      end if;
    else
      v_remedy := 'If it is, run pg_cron/unschedule_elsewhere.sql.';
      perform current_setting('cron.database_name', true);  -- fails if pg_cron is loaded and this role may not read where
      select format('pg_cron is in database %I.', s.setting)
        into v_doubt
        from pg_settings as s
       where s.name = 'cron.database_name'
         and s.setting <> current_database();
    end if;
  exception
    when insufficient_privilege then
      v_doubt := sqlerrm || '.';
  end;
  if v_doubt is not null and v_there then
    raise warning 'clean-up may still be scheduled with pg_cron' using detail = v_doubt, hint = v_remedy;
  end if;
  perform set_config('search_path', v_path, true);
end;
$cron$;

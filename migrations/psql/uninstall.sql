-- Removes pgratelimit with all policies and buckets, in one transaction; running it again is harmless. For psql:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f uninstall.sql
--
-- The role must be the owner of schema ratelimit. psql ends with status 3 where it fails.
--
-- Generated from the migrations: make psql.
\set pgratelimit_stop :ON_ERROR_STOP
\set pgratelimit_quiet :QUIET
\set ON_ERROR_STOP on
\set QUIET on
do $begin$
begin
  if pg_catalog.now() operator(pg_catalog.<>) pg_catalog.statement_timestamp() then
    raise exception 'this file cannot run inside a transaction'
      using errcode = '25001',
            hint    = 'Leave out --single-transaction, or commit first.';
  end if;
end;
$begin$;

begin transaction isolation level read committed;
select pg_catalog.to_regnamespace('ratelimit') is not null as pgratelimit_installed
\gset
\if :pgratelimit_installed
do $prepare$
declare
  v_path    text := pg_catalog.current_setting('search_path');
  v_schema  oid;
  v_owner   oid;
  v_version integer;
  v_member  boolean;  -- of the extension
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  perform pg_advisory_xact_lock(9628173550095224);  -- as tern does
  select n.oid, n.nspowner into v_schema, v_owner from pg_namespace as n where n.nspname = 'ratelimit';
  if not found then
    create schema ratelimit;
  elsif exists (select from pg_class as c where c.relnamespace = v_schema and c.relowner <> v_owner) then
    raise exception 'schema ratelimit holds objects of several roles'
      using errcode = '42501',
            detail  = 'They would run with your rights.',
            hint    = 'Drop what does not belong to the owner of the schema.';
  else
    v_member := exists (select
                          from pg_depend as d
                         where d.classid = 'pg_namespace'::regclass
                           and d.objid = v_schema
                           and d.refclassid = 'pg_extension'::regclass
                           and d.deptype = 'e');
    if v_member or pg_get_userbyid(v_owner) <> current_user then
      if exists (select
                   from pg_class as c
                   join pg_attribute as a on a.attrelid = c.oid
                  where c.relnamespace = v_schema
                    and c.relname = 'schema_version'
                    and c.relkind = 'r'
                    and not c.relrowsecurity
                    and a.attname = 'version'
                    and a.atttypid = 'integer'::regtype
                    and has_schema_privilege(v_schema, 'usage')
                    and has_table_privilege(c.oid, 'select')) then
        select v.version into v_version from only ratelimit.schema_version as v;
      end if;
      if v_version is null or true then
        if v_member then
          raise exception 'pgratelimit is an extension in this database'
            using errcode = '55000',
                  hint    = 'Run: drop extension pgratelimit';
        end if;
        raise exception 'schema ratelimit belongs to another role'
          using errcode = '42501',
                detail  = format('It belongs to %s.', v_owner::regrole),
                hint    = format('Connect as %1$s, for example with PGOPTIONS=''-c role=%1$s''; or drop the schema if it was planted.', v_owner::regrole);
      end if;
    end if;
  end if;
  if not exists (select from pg_class as c where c.relnamespace = 'ratelimit'::regnamespace and c.relname = 'schema_version') then
    create table ratelimit.schema_version (version int4 not null);
    insert into ratelimit.schema_version values (0);
  end if;
  perform set_config('search_path', v_path, true);
end;
$prepare$;
do $newer$
declare
  v_version integer := (select v.version from ratelimit.schema_version as v);
begin
  if v_version operator(pg_catalog.>) 2 then
    raise exception 'a newer schema is installed'
      using errcode = '55000',
            detail  = pg_catalog.format('Schema version %s is installed; this file knows versions up to 2.', v_version),
            hint    = 'Use the file of the release that installed it, or of a later one.';
  end if;
end;
$newer$;

select v.version operator(pg_catalog.>=) 2 as pgratelimit_there from ratelimit.schema_version as v
\gset
\if :pgratelimit_there
-- 002_several_limits.sql
set local lock_timeout = '3s';
lock table ratelimit.policies in access exclusive mode;

-- All functions that version 1 lacks, or has with other arguments or columns.
set local ratelimit.changed =
  'ratelimit_define_policy ratelimit_policies ratelimit_acquire ratelimit_acquire_many ratelimit_peek ratelimit_refund '
  'ratelimit_acquire_packed ratelimit_acquire_all ratelimit_acquire_all_many ratelimit_override ratelimit_remove_override '
  'ratelimit_overrides ratelimit_charge ratelimit_settle ratelimit_reserve ratelimit_acquire_up_to '
  'ratelimit_acquire_up_to_many ratelimit_enforce ratelimit_guard ratelimit_pre_request ratelimit_status ratelimit_doctor '
  'ratelimit_shard ratelimit_define_shard ratelimit_reset_all ratelimit_hold ratelimit_renew ratelimit_release '
  'ratelimit_holders ratelimit_peek_many ratelimit_pause';
\ir ../include/002_drop_changed.sql
\ir ../include/002_back.sql
update ratelimit.schema_version set version = 2 - 1;
\endif
\unset pgratelimit_there

select v.version operator(pg_catalog.>=) 1 as pgratelimit_there from ratelimit.schema_version as v
\gset
\if :pgratelimit_there
-- 001_install.sql
-- Without cascade: an object outside the package that depends on one of these stops the removal.
do $down$
declare
  v_path     text := pg_catalog.current_setting('search_path');
  v_function record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_function in
    select p.oid::pg_catalog.regprocedure as signature
      from pg_catalog.pg_proc as p
      join pg_catalog.pg_proc as home on home.prorettype = 'ratelimit.decision'::pg_catalog.regtype
                                     and home.proname = 'ratelimit_acquire'
                                     and home.proowner = p.proowner
     where p.pronamespace = 'ratelimit'::pg_catalog.regnamespace
        or p.pronamespace = home.pronamespace
       and p.proname in ('ratelimit_define_policy', 'ratelimit_drop_policy', 'ratelimit_policies', 'ratelimit_acquire',
                         'ratelimit_acquire_many', 'ratelimit_peek', 'ratelimit_refund', 'ratelimit_reset',
                         'ratelimit_cleanup', 'ratelimit_cleanup_all', 'ratelimit_version')
     order by p.pronamespace = 'ratelimit'::pg_catalog.regnamespace
  loop
    execute pg_catalog.format('drop routine %s', v_function.signature);
  end loop;
  perform pg_catalog.set_config('search_path', v_path, true);
end;
$down$;
drop table ratelimit.ephemeral_idempotency_keys, ratelimit.ephemeral_buckets,
           ratelimit.idempotency_keys, ratelimit.buckets, ratelimit.policies;
drop type ratelimit.decision;
comment on schema ratelimit is null;  -- the schema stays, with the version table

-- Unschedules the jobs of pg_cron/schedule.sql.
do $cron$
declare
  v_path   text := pg_catalog.current_setting('search_path');
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
      if v_jobs = '{}' and not (select r.rolsuper from pg_roles as r where r.rolname = current_user) then
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
  if v_doubt is not null then
    raise warning 'clean-up may still be scheduled with pg_cron' using detail = v_doubt, hint = v_remedy;
  end if;
  perform set_config('search_path', v_path, true);
end;
$cron$;
update ratelimit.schema_version set version = 1 - 1;
\endif
\unset pgratelimit_there

drop table ratelimit.schema_version;
drop schema ratelimit;
\endif
\unset pgratelimit_installed
commit;

\echo pgratelimit: not installed any more.
\set ON_ERROR_STOP :pgratelimit_stop
\set QUIET :pgratelimit_quiet
\unset pgratelimit_stop
\unset pgratelimit_quiet

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

-- Remembers who may execute the functions that are dropped here, to grant it again at the end, and drops them.
do $drop$
declare
  v_path   text := pg_catalog.current_setting('search_path');
  v_home   text;
  v_grants jsonb := '[]';
  v_proc   record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspname
    into strict v_home
    from pg_proc as p
    join pg_namespace as n on n.oid = p.pronamespace
    join pg_namespace as package on package.nspname = 'ratelimit' and package.nspowner = p.proowner
   where p.proname = 'ratelimit_acquire'
     and p.prorettype = 'ratelimit.decision'::regtype;
  for v_proc in
    select p.oid::regprocedure as signature, p.proname, p.proacl, p.proowner
      from pg_proc as p
     where p.pronamespace = quote_ident(v_home)::regnamespace
       and p.proname in ('ratelimit_define_policy', 'ratelimit_policies', 'ratelimit_acquire', 'ratelimit_acquire_many', 'ratelimit_peek',
                         'ratelimit_refund',
                         'ratelimit_acquire_packed', 'ratelimit_acquire_all', 'ratelimit_acquire_all_many', 'ratelimit_override',
                         'ratelimit_remove_override', 'ratelimit_overrides', 'ratelimit_charge', 'ratelimit_settle',
                         'ratelimit_reserve', 'ratelimit_acquire_up_to', 'ratelimit_acquire_up_to_many', 'ratelimit_enforce', 'ratelimit_guard', 'ratelimit_pre_request',
                         'ratelimit_status', 'ratelimit_doctor', 'ratelimit_shard', 'ratelimit_define_shard', 'ratelimit_reset_all',
                         'ratelimit_hold', 'ratelimit_renew', 'ratelimit_release', 'ratelimit_holders', 'ratelimit_peek_many', 'ratelimit_pause')
  loop
    v_grants := v_grants || coalesce((
      select jsonb_agg(jsonb_build_object('name', v_proc.proname, 'grantable', a.is_grantable,
                                          'grantee', case a.grantee when 0 then 'public' else a.grantee::regrole::text end))
        from aclexplode(v_proc.proacl) as a
       where a.grantee <> v_proc.proowner), '[]');
    execute format('drop routine %s', v_proc.signature);
  end loop;
  perform set_config('ratelimit.grants', v_grants::text, true);
  perform set_config('ratelimit.home', v_home, true);
  perform set_config('search_path', v_path, true);
end;
$drop$;
drop table if exists ratelimit.pre_request;  -- docs/postgrest/install.sql created it, and the function ratelimit_pre_request

-- Snapshot 001 makes its functions anew. By clock it knows that it is installed already, two are needed below, and one may have
-- been granted.
do $functions$
declare
  v_path text := pg_catalog.current_setting('search_path');
  v_proc pg_catalog.regprocedure;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_proc in
    select p.oid
      from pg_proc as p
     where p.pronamespace = 'ratelimit'::regnamespace
       and p.proname not in ('clock', 'floor_level', 'deepest_debt', 'cleanup_batch')
  loop
    execute format('drop routine %s', v_proc);
  end loop;
  perform set_config('search_path', v_path, true);
end;
$functions$;
drop type ratelimit.decision, ratelimit.reservation, ratelimit.partial_decision, ratelimit.hold, ratelimit.packed, ratelimit.charged, ratelimit.part, ratelimit.asked;
alter type ratelimit.retired_decision rename to decision;

-- Without slots, what is held of a key is missing in its bucket. Slots come back within a lease, and so do the tokens.
insert into ratelimit.buckets (policy_id, key, level, refilled_at, due_at)
select p.id, l.key, p.full_level - sum(l.cost) * 1000000, pg_catalog.clock_timestamp(), pg_catalog.clock_timestamp()
  from ratelimit.policies as p
  join ratelimit.leases as l on l.policy_id = p.id
 where l.ends_at > pg_catalog.clock_timestamp()
 group by p.id, p.full_level, l.key;
insert into ratelimit.ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
select p.id, l.key, p.full_level - sum(l.cost) * 1000000, pg_catalog.clock_timestamp(), pg_catalog.clock_timestamp()
  from ratelimit.policies as p
  join ratelimit.ephemeral_leases as l on l.policy_id = p.id
 where l.ends_at > pg_catalog.clock_timestamp()
 group by p.id, p.full_level, l.key;
update ratelimit.policies
   set refill = capacity,
       every  = (calendar).lease
 where (calendar).lease is not null;
-- Without refill 0, such a policy refills as slowly as one can.
update ratelimit.policies
   set refill = 1,
       every  = least(interval '365250 days', make_interval(secs => 315576000000 / greatest(capacity, 1)::double precision))
 where refill = 0;
-- Without saturation, a debt below the floor of its policy may be too deep for the time it takes.
update ratelimit.buckets as b
   set level = ratelimit.floor_level(p.gain, p.every_us)::bigint
  from ratelimit.policies as p
 where p.id = b.policy_id
   and b.level < ratelimit.floor_level(p.gain, p.every_us);
update ratelimit.ephemeral_buckets as b
   set level = ratelimit.floor_level(p.gain, p.every_us)::bigint
  from ratelimit.policies as p
 where p.id = b.policy_id
   and b.level < ratelimit.floor_level(p.gain, p.every_us);
drop function ratelimit.floor_level, ratelimit.deepest_debt;
update ratelimit.idempotency_keys set reset_after = interval '365250 days' where reset_after is null;
update ratelimit.ephemeral_idempotency_keys set reset_after = interval '365250 days' where reset_after is null;
alter table ratelimit.idempotency_keys alter column reset_after set not null;
alter table ratelimit.ephemeral_idempotency_keys alter column reset_after set not null;
alter table ratelimit.idempotency_keys drop column ready_at, drop column settled, drop column taken, drop column granted_at;
alter table ratelimit.ephemeral_idempotency_keys drop column ready_at, drop column settled, drop column taken, drop column granted_at;
alter table ratelimit.buckets drop column room, drop column paused_until;
alter table ratelimit.ephemeral_buckets drop column room, drop column paused_until;
do $names$
begin
  -- From PostgreSQL 18 on NOT NULL has a name, and the twin was created with that of the other table.
  if pg_catalog.current_setting('server_version_num')::pg_catalog.int4 operator(pg_catalog.>=) 180000 then
    alter table ratelimit.ephemeral_idempotency_keys
      rename constraint ephemeral_idempotency_keys_reset_after_not_null to idempotency_keys_reset_after_not_null;
  end if;
end;
$names$;
drop table ratelimit.overrides, ratelimit.shard, ratelimit.slots, ratelimit.leases, ratelimit.ephemeral_slots, ratelimit.ephemeral_leases;
alter table ratelimit.policies
  drop column overridden,
  drop column shadow,
  drop column calendar;
drop type ratelimit.calendar;
comment on type ratelimit.decision is
  'The answer about one bucket: allowed; whole tokens remaining; retry_after, zero when allowed and null when the cost can never fit; reset_after, until full; capacity; replayed, when it is the first answer under a live idempotency key, given again.';

-- Snapshot 001 finds its place by this function, and replaces it.
do $home$
begin
  execute pg_catalog.format('create function %I.ratelimit_acquire(policy text, key text, cost bigint default 1, idempotency_key text default null) '
                            'returns ratelimit.decision language sql return null::ratelimit.decision', pg_catalog.current_setting('ratelimit.home'));
end;
$home$;
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

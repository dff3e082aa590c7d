{{ if false }}
\reset
\set ON_ERROR_STOP on
do $$
begin
  raise exception 'this file is a migration for tern, and psql would run its way back too'
    using hint = 'Run migrations/psql/install.sql instead.';
end;
$$;
{{ end -}}
-- Schema, tables and types, then the functions. They are one migration, because the public functions go into
-- the schema that heads the session's search_path, and tern resets the session after each migration.

do $schema$
declare
  v_path   text := pg_catalog.current_setting('search_path');
  v_object text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select pg_describe_object(d.classid, d.objid, d.objsubid)
    into v_object
    from pg_depend as d
   where d.refclassid = 'pg_namespace'::regclass
     and d.refobjid = 'ratelimit'::regnamespace
     and (d.classid, d.objid) <> ('pg_class'::regclass, 'ratelimit.schema_version'::regclass)
   limit 1;
  if found then
    raise exception 'schema ratelimit is not empty'
      using errcode = '42P06',
            detail  = format('It holds %s, which is not of this package.', v_object),
            hint    = 'Drop or move what the schema holds, or drop the schema if it was planted.';
  end if;
  perform set_config('search_path', v_path, true);
end;
$schema$;

comment on schema ratelimit is
  'pgratelimit: tables and private helpers. Callers use the public functions named ratelimit_*.';

comment on table ratelimit.schema_version is
  'One row: the newest migration that is installed.';

create type ratelimit.decision as (
  allowed     boolean,
  remaining   bigint,
  retry_after interval,
  reset_after interval,
  capacity    bigint,
  replayed    boolean
);
comment on type ratelimit.decision is
  'The answer about one bucket: allowed; whole tokens remaining; retry_after, zero when allowed and null when the cost can never fit; reset_after, until full; capacity; replayed, when it is the first answer under a live idempotency key, given again.';

-- Each new policy draws a random id, so rows of a dropped policy never count for a new policy of the same
-- name. The generated columns are operands of sql/arithmetic.sql. They are stored, because computing them
-- would make every decision slower.
create table ratelimit.policies (
  id          bigint   not null,
  name        text     collate "C" not null,
  capacity    bigint   not null,
  refill      bigint   not null,
  every       interval not null,
  stepped     boolean  not null,
  durable     boolean  not null,
  remember    interval not null,
  tick        interval not null generated always as (case when stepped then every else interval '1 microsecond' end) stored,
  every_us    numeric  not null generated always as (extract(epoch from every) * 1000000.0) stored,
  tick_us     numeric  not null generated always as (case when stepped then extract(epoch from every) * 1000000.0 else 1 end) stored,
  full_level  numeric  not null generated always as (capacity * 1000000) stored,
  gain        numeric  not null generated always as (refill::numeric * 1000000000000::numeric) stored,
  tick_gain   numeric  not null generated always as ((refill * 1000000)::numeric * case when stepped then extract(epoch from every) * 1000000.0 else 1 end) stored,
  round_up    numeric  not null generated always as ((refill * 1000000)::numeric * case when stepped then extract(epoch from every) * 1000000.0 else 1 end - 1::numeric) stored,
  remember_us bigint   not null generated always as ((extract(epoch from remember) * 1000000.0)::bigint) stored,
  constraint policies_pkey primary key (name),
  constraint policies_id_key unique (id)
);
comment on table ratelimit.policies is
  'One row per policy; changed by ratelimit_define_policy and ratelimit_drop_policy only.';
comment on column ratelimit.policies.tick is
  'every if stepped, else 1 microsecond: the interval after which refill is credited.';
comment on column ratelimit.policies.every_us is
  'every, in microseconds.';
comment on column ratelimit.policies.tick_us is
  'tick, in microseconds.';
comment on column ratelimit.policies.full_level is
  'capacity * 10^6: the level of a full bucket, in microtokens.';
comment on column ratelimit.policies.gain is
  'refill * 10^12, in 10^-12 tokens: elapsed seconds * gain / every_us = microtokens gained.';
comment on column ratelimit.policies.tick_gain is
  'refill * 10^6 * tick_us, in microtokens * microseconds: tick_gain / every_us = microtokens gained in one tick.';
comment on column ratelimit.policies.round_up is
  'tick_gain - 1, in microtokens * microseconds: added before a division by tick_gain, it rounds the quotient up.';
comment on column ratelimit.policies.remember_us is
  'remember, in microseconds.';

-- An acquire changes no indexed column, so its updates can be HOT. Clean-up finds rows by the index on due_at,
-- which an acquire sets in a new row and never changes. The columns of fixed width come first, because
-- PostgreSQL reads them faster there.
create table ratelimit.buckets (
  policy_id   bigint      not null,
  level       bigint      not null,
  refilled_at timestamptz not null,
  due_at      timestamptz not null,
  key         text        collate "C" not null,
  constraint buckets_pkey primary key (policy_id, key)
);
create index buckets_due_at_idx on ratelimit.buckets (due_at);
comment on table ratelimit.buckets is
  'Buckets of durable policies that are not known to be full; a bucket without a row is full.';
comment on column ratelimit.buckets.level is
  'Microtokens at refilled_at; below zero is debt.';
comment on column ratelimit.buckets.refilled_at is
  'When level was true; for a stepped policy a whole number of intervals after the first take, until the policy changes.';
comment on column ratelimit.buckets.due_at is
  'When clean-up checks whether the bucket is full again.';

create table ratelimit.idempotency_keys (
  policy_id       bigint      not null,
  cost            bigint      not null,
  remaining       bigint      not null,
  capacity        bigint      not null,
  expires_at      timestamptz not null,
  reset_after     interval    not null,
  key             text        collate "C" not null,
  idempotency_key text        collate "C" not null,
  constraint idempotency_keys_pkey primary key (policy_id, key, idempotency_key)
);
create index idempotency_keys_expires_at_idx on ratelimit.idempotency_keys (expires_at);
comment on table ratelimit.idempotency_keys is
  'Grants of durable policies made under an idempotency key, as first answered, until expires_at.';

-- The twins for ephemeral policies. They are not in the WAL, so commits flush nothing for them, and a crash
-- empties them.
create unlogged table ratelimit.ephemeral_buckets (
  like ratelimit.buckets including all
);
comment on table ratelimit.ephemeral_buckets is
  'Buckets of ephemeral policies: unlogged, empty after a crash.';

create unlogged table ratelimit.ephemeral_idempotency_keys (
  like ratelimit.idempotency_keys including all
);
comment on table ratelimit.ephemeral_idempotency_keys is
  'Idempotency keys of ephemeral policies: unlogged, empty after a crash.';

-- fillfactor leaves room on each page for the next version of its rows, which a HOT update needs. Vacuum starts
-- after a fixed number of changed rows and a small share of the table, because by the default share a large
-- table would wait too long. Vacuum takes no pauses (cost_delay), so that dead row versions go soon.
alter table ratelimit.buckets set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.ephemeral_buckets set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.idempotency_keys set (
  autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.ephemeral_idempotency_keys set (
  autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);

-- Default privileges may have granted rights on the schema and the tables to other roles.
do $private$
declare
  v_path  text := pg_catalog.current_setting('search_path');
  v_grant record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_grant in
    select o.object, case a.grantee when 0 then 'public' else a.grantee::pg_catalog.regrole::text end as grantee
      from (select 'schema ratelimit', n.nspacl, n.nspowner
              from pg_catalog.pg_namespace as n
             where n.nspname = 'ratelimit'
            union all
            select 'table ' || c.oid::pg_catalog.regclass, c.relacl, c.relowner
              from pg_catalog.pg_class as c
             where c.relnamespace = 'ratelimit'::pg_catalog.regnamespace and c.relkind = 'r') as o (object, acl, owner)
     cross join lateral pg_catalog.aclexplode(o.acl) as a
     where a.grantee <> o.owner
     group by o.object, a.grantee
  loop
    execute pg_catalog.format('revoke all on %s from %s', v_grant.object, v_grant.grantee);
  end loop;
  perform pg_catalog.set_config('search_path', v_path, true);
end;
$private$;

{{ install_snapshot "001" }}

---- create above / drop below ----

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

-- Installs pgratelimit, or brings an installed one up to date; running it again is harmless. For psql:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f install.sql
--
-- The role must be the owner of schema ratelimit, or be allowed to create schemas while that is not there. The
-- functions go into the schema that heads search_path, and stay where an earlier install put them. Each migration is
-- one transaction. psql ends with status 3 where it fails.
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
      if v_version is null or v_version < 2 then
        if v_member then
          raise exception 'pgratelimit is an extension in this database'
            using errcode = '55000',
                  hint    = 'Run: alter extension pgratelimit update';
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
select v.version operator(pg_catalog.<) 1 as pgratelimit_missing from ratelimit.schema_version as v
\gset
\if :pgratelimit_missing
-- 001_install.sql
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

-- pgratelimit: token bucket rate limits that live in PostgreSQL.
--
-- A policy says how large a bucket is and how fast it refills. A bucket belongs to one policy and
-- one key; it stores how many microtokens it held at one instant, and everything else follows by
-- arithmetic from the server's clock. No row means full: the first grant creates the row, clean-up
-- removes it once it is full again. A grant made under an idempotency key is remembered beside its
-- bucket, so that a retry gets the first answer and takes nothing.
--
-- The public functions are named ratelimit_* and live in the schema that headed search_path at the
-- first install. Tables and helpers live in schema ratelimit, where callers have no rights: the
-- public functions are SECURITY DEFINER with a pinned search_path, all but ratelimit_cleanup_all, which commits.
--
-- Durable and ephemeral policies keep their state in twin tables (buckets and ephemeral_buckets,
-- idempotency_keys and ephemeral_idempotency_keys), because a statement cannot choose its table at run time.
-- Code that touches them is written once, as a template over the two names.
--
-- This file is the table of contents.
-- Decides where the public functions go, and refuses to install over objects of another role.
--
-- A first install takes the schema that heads search_path and wants it free of ratelimit_*
-- functions: to replace a planted function would leave the role that planted it as owner. A later install
-- goes to the schema that has the functions. The setting ratelimit.preexisting lists the functions that
-- existed before, for this transaction only. The epilogue clears the grants of all others.
do $prologue$
declare
  v_owner oid;
  v_first text := pg_catalog.current_schema();
  v_home  text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspowner into v_owner from pg_catalog.pg_namespace as n where n.nspname = 'ratelimit';
  if pg_catalog.pg_get_userbyid(v_owner) <> current_user then
    raise exception 'schema ratelimit belongs to another role'
      using errcode = '42501',
            detail  = pg_catalog.format('It belongs to %s.', v_owner::pg_catalog.regrole),
            hint    = 'Install as its owner, or drop the schema if it was planted.';
  end if;

  if pg_catalog.to_regprocedure('ratelimit.clock()') is null then
    v_home := v_first;
    if v_home is null then
      raise exception 'no schema to install into'
        using errcode = '3F000',
              hint    = 'Put an existing schema at the head of search_path, for example public.';
    end if;
    if exists (select from pg_catalog.pg_proc as p
                where p.pronamespace = pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace
                  and pg_catalog.starts_with(p.proname, 'ratelimit_')) then
      raise exception 'functions named ratelimit_* exist already'
        using errcode = '42723',
              detail  = pg_catalog.format('Schema %I has them, and they are not of this package.', v_home),
              hint    = 'Drop or rename them, or install with another schema at the head of search_path.';
    end if;
  else
    begin
      select n.nspname into strict v_home
        from pg_catalog.pg_proc as p
        join pg_catalog.pg_namespace as n on n.oid = p.pronamespace
       where p.proname = 'ratelimit_acquire'
         and p.prorettype = 'ratelimit.decision'::pg_catalog.regtype
         and p.proowner = v_owner;
    exception
      when no_data_found or too_many_rows then
        raise exception 'the installed functions were not found'
          using errcode = '42883',
                detail  = 'Exactly one function ratelimit_acquire should belong to the owner of schema ratelimit.',
                hint    = 'Restore its owner, or drop the copy.';
    end;
  end if;

  perform pg_catalog.set_config('ratelimit.preexisting',
    (select coalesce(pg_catalog.string_agg(p.oid::text, ','), '')
       from pg_catalog.pg_proc as p
      where p.pronamespace in (pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace, 'ratelimit'::pg_catalog.regnamespace)), true);
  perform pg_catalog.set_config('search_path', pg_catalog.quote_ident(v_home) || ', pg_temp', true);
end;
$prologue$;


-- Private: the rules, each in one place.
-- The clock of every decision, and of what is due for clean-up. Only the deadline of clean-up uses
-- clock_timestamp() directly. The function is inlined, and so costs nothing, because it has neither SET nor
-- SECURITY DEFINER and declares the volatility of clock_timestamp().
create or replace function ratelimit.clock()
  returns timestamptz
  language sql
  volatile
  parallel safe
as $$
  select clock_timestamp()
$$;
comment on function ratelimit.clock() is
  'The time every decision is made by: the server''s wall clock, never the transaction''s.';

-- The arithmetic of a bucket. Levels are whole microtokens and times whole microseconds, so every
-- answer is a function of integers. Products are numeric, which neither overflows nor rounds. Refill is credited
-- rounded down to whole microtokens, so each grant or refund loses less than one.
--
-- A bucket is (level, refilled_at): at the instant refilled_at it held level microtokens. Refill is
-- credited at ticks, which are counted from refilled_at, and never above full_level. A tick is a
-- microsecond when refill is continuous, and the whole interval when it is stepped.
--
-- The derived columns of policies hold what the formulas need; each has a comment. The formulas are
--   gain       = refill * 10^12. Elapsed seconds * gain / every_us = microtokens; the extra 10^6 saves
--                converting seconds
--   tick_gain  = refill * 10^6 * tick_us. One tick gains tick_gain / every_us microtokens
--   round_up   = tick_gain - 1. (x + round_up) div tick_gain = x / tick_gain, rounded up
--
-- All functions here are IMMUTABLE single expressions, so that the planner inlines them. An argument that
-- is used twice must be cheap, such as a column, a variable or a product, or it stops inlining.
-- include/calls.sql has the long calls.

create or replace function ratelimit.microtokens(tokens bigint)
  returns bigint language sql immutable parallel safe
as $$
  select tokens * 1000000
$$;
comment on function ratelimit.microtokens(bigint) is
  'Tokens as microtokens, the unit of levels.';

create or replace function ratelimit.whole_tokens(level bigint)
  returns bigint language sql immutable parallel safe
as $$
  select level / 1000000 - (level % 1000000 < 0)::integer  -- rounds down below zero too
$$;
comment on function ratelimit.whole_tokens(bigint) is
  'A level in whole tokens, rounded down.';

create or replace function ratelimit.microseconds(span interval)
  returns numeric language sql immutable parallel safe
as $$
  select extract(epoch from span) * 1000000
$$;
comment on function ratelimit.microseconds(interval) is
  'An interval without months in microseconds; a day is 24 hours.';

-- The interval has hours and seconds but no days, because a day added to a timestamptz may be 23 or 25 hours.
create or replace function ratelimit.duration(microseconds bigint)
  returns interval language sql immutable parallel safe
as $$
  select make_interval(hours => (microseconds / 3600000000)::integer,
                       secs  => (microseconds % 3600000000)::double precision / 1000000)
$$;
comment on function ratelimit.duration(bigint) is
  'Microseconds as an interval, exactly.';

-- Elapsed time is never negative: a clock that steps back credits and removes nothing.
create or replace function ratelimit.refilled_until(refilled_at timestamptz, now timestamptz, tick interval)
  returns timestamptz language sql immutable parallel safe
as $$
  select date_bin(tick, greatest(refilled_at, now), refilled_at)
$$;
comment on function ratelimit.refilled_until(timestamptz, timestamptz, interval) is
  'The instant of refilled_level: the last tick by now, counted from refilled_at and never before it.';

create or replace function ratelimit.refilled_level(
    level bigint, refilled_at timestamptz, now timestamptz, full_level numeric, gain numeric, every_us numeric, tick interval)
  returns bigint language sql immutable parallel safe
as $$
  select least(
    full_level,
    level + div(extract(epoch from ratelimit.refilled_until(refilled_at, now, tick) - refilled_at) * gain, every_us))::bigint
$$;
comment on function ratelimit.refilled_level(bigint, timestamptz, timestamptz, numeric, numeric, numeric, interval) is
  'The level of a bucket now, in microtokens.';

-- Exact: after this wait the bucket holds target, one microsecond earlier it does not.
-- Precondition: the bucket is below target now. Callers that know this skip the checks of wait_for.
create or replace function ratelimit.wait_below(
    target numeric, level bigint, elapsed_us numeric,
    every_us numeric, tick_us numeric, tick_gain numeric, round_up numeric)
  returns bigint language sql immutable parallel safe
as $$
  select (div((target - level) * every_us + round_up, tick_gain) * tick_us - elapsed_us)::bigint
$$;
comment on function ratelimit.wait_below(numeric, bigint, numeric, numeric, numeric, numeric, numeric) is
  'Microseconds until a bucket holds target microtokens, if it held level elapsed_us ago and is below target now.';

create or replace function ratelimit.wait_for(
    target numeric, level bigint, refilled_at timestamptz, now timestamptz,
    every_us numeric, tick_us numeric, tick_gain numeric, round_up numeric)
  returns bigint language sql immutable parallel safe
as $$
  select case
    when level >= target then 0
    else greatest(0, ratelimit.wait_below(target, level, ratelimit.microseconds(now - refilled_at),
                                          every_us, tick_us, tick_gain, round_up))
  end
$$;
comment on function ratelimit.wait_for(numeric, bigint, timestamptz, timestamptz, numeric, numeric, numeric, numeric) is
  'Microseconds from now until a bucket holds target microtokens, zero when it does.';

-- The checks of arguments. Every error has a constant message, the facts in DETAIL and the remedy in HINT.

create or replace function ratelimit.refuse(argument text, fact text, remedy text)
  returns void language plpgsql
as $$
begin
  raise exception using
    errcode = '22023',
    message = 'invalid ' || argument,
    detail  = format('%s is %s.', argument, coalesce(fact, 'null')),
    hint    = remedy;
end;
$$;
comment on function ratelimit.refuse(text, text, text) is
  'Raises 22023 for one argument.';

create or replace function ratelimit.is_name(value text)
  returns boolean language sql immutable parallel safe
as $$
  select octet_length(value) between 1 and 512
$$;
comment on function ratelimit.is_name(text) is
  'Whether a policy, key or idempotency key has 1 to 512 bytes; null for null.';

create or replace function ratelimit.is_list(elements anyarray)
  returns boolean language sql immutable parallel safe
as $$
  select array_lower(elements, 1) = 1 and array_ndims(elements) = 1
$$;
comment on function ratelimit.is_list(anyarray) is
  'Whether an array has one dimension and is subscripted from 1; null for an empty one and for null.';

create or replace function ratelimit.check_name(argument text, value text)
  returns void language plpgsql
as $$
begin
  if ratelimit.is_name(value) is not true then
    perform ratelimit.refuse(argument,
      case when value is null then null when value = '' then 'empty' else octet_length(value) || ' bytes long' end,
      'Pass a text of 1 to 512 bytes.');
  end if;
end;
$$;
comment on function ratelimit.check_name(text, text) is
  'Raises 22023 unless a policy, key or idempotency key has 1 to 512 bytes.';

create or replace function ratelimit.check_tokens(argument text, value bigint)
  returns void language plpgsql
as $$
begin
  if (value >= 0) is not true then
    perform ratelimit.refuse(argument, value::text,
      case argument
        when 'cost' then 'Pass a whole number of tokens, 0 or more; ratelimit_refund gives tokens back.'
        else 'Pass a whole number of tokens, 0 or more.'
      end);
  end if;
end;
$$;
comment on function ratelimit.check_tokens(text, bigint) is
  'Raises 22023 unless a cost or amount is zero or more.';

-- Inlined, unlike check_request: a valid request pays for no call.
create or replace function ratelimit.acceptable(key text, cost bigint)
  returns boolean language sql immutable parallel safe
as $$
  select (ratelimit.is_name(key) and cost >= 0) is true
$$;
comment on function ratelimit.acceptable(text, bigint) is
  'Whether check_request would accept this key and cost.';

create or replace function ratelimit.check_request(policy text, key text, cost bigint, idempotency_key text)
  returns void language plpgsql
as $$
begin
  perform ratelimit.check_name('policy', policy);
  perform ratelimit.check_name('key', key);
  perform ratelimit.check_tokens('cost', cost);
  if idempotency_key is not null then
    perform ratelimit.check_name('idempotency_key', idempotency_key);
  end if;
end;
$$;
comment on function ratelimit.check_request(text, text, bigint, text) is
  'Raises 22023 for the first argument of an acquire that is out of range.';

create or replace function ratelimit.check_length(argument text, length integer, expected integer)
  returns void language plpgsql
as $$
begin
  if length is null or length is distinct from expected then
    perform ratelimit.refuse(argument, length || ' elements long, policies ' || expected,
      'Pass arrays of one length: element n of each is request n.');
  end if;
end;
$$;
comment on function ratelimit.check_length(text, integer, integer) is
  'Raises 22023 unless an array has an element for each request.';

-- Months and years are refused, because their length is not fixed. The limit of 1000 years counts a year as
-- 365.25 days of 24 hours.
create or replace function ratelimit.check_span(argument text, value interval)
  returns void language plpgsql
as $$
begin
  if value is null
     or not isfinite(value)
     or extract(year from value) <> 0
     or extract(month from value) <> 0
     or ratelimit.microseconds(value) not between 1 and ratelimit.microseconds(interval '365250 days') then
    perform ratelimit.refuse(argument, value::text,
      'Pass an interval of 1 microsecond to 365250 days (1000 years), in days or smaller units.');
  end if;
end;
$$;
comment on function ratelimit.check_span(text, interval) is
  'Raises 22023 unless an interval is fixed in length and between 1 microsecond and 1000 years.';

create or replace function ratelimit.check_policy(capacity bigint, refill bigint, every interval, remember interval)
  returns void language plpgsql
as $$
declare
  v_missing constant text := 'A new policy needs capacity, refill and every.';
  v_range   constant text := 'Pass 1 to 9000000000000 tokens.';
begin
  if (capacity between 1 and 9000000000000) is not true then
    perform ratelimit.refuse('capacity', capacity::text, case when capacity is null then v_missing else v_range end);
  end if;
  if (refill between 1 and 9000000000000) is not true then
    perform ratelimit.refuse('refill', refill::text, case when refill is null then v_missing else v_range end);
  end if;
  if every is null then
    perform ratelimit.refuse('every', null, v_missing);
  end if;
  perform ratelimit.check_span('every', every);
  if capacity * ratelimit.microseconds(every) > refill * ratelimit.microseconds(interval '3652500 days') then
    perform ratelimit.refuse('refill', refill || ' every ' || every,
      'Refill faster or lower the capacity: an empty bucket must fill within 10000 years.');
  end if;
  if remember is not null then
    perform ratelimit.check_span('remember', remember);
  end if;
end;
$$;
comment on function ratelimit.check_policy(bigint, bigint, interval, interval) is
  'Raises 22023 for the first argument of a policy definition that is missing or out of range.';

create or replace function ratelimit.unknown_policy(policy text)
  returns void language plpgsql
as $$
begin
  raise exception 'unknown policy' using
    errcode = 'RL001',
    detail  = format('No policy is named %L.', policy),
    hint    = format('Define it first: select ratelimit_define_policy(%L, capacity => 10, refill => 10, every => ''1 second'').', policy);
end;
$$;
comment on function ratelimit.unknown_policy(text) is
  'Raises RL001, the error for an unknown policy.';

create or replace function ratelimit.policy_named(policy text)
  returns ratelimit.policies language plpgsql stable
as $$
declare
  v_name   text collate "C" := policy_named.policy;
  v_policy ratelimit.policies;
begin
  perform ratelimit.check_name('policy', v_name);
  select p.* into v_policy from ratelimit.policies as p where p.name = v_name;
  if not found then
    perform ratelimit.unknown_policy(v_name);
  end if;
  return v_policy;
end;
$$;
comment on function ratelimit.policy_named(text) is
  'One policy by name, or RL001.';

-- A short form of answer(): after a grant, retry_after is 0 and the level is not below 0.
create or replace function ratelimit.granted(level bigint, reset_us bigint, capacity bigint)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (true, level / 1000000, interval '0', ratelimit.duration(reset_us), capacity, false)::ratelimit.decision
$$;
comment on function ratelimit.granted(bigint, bigint, bigint) is
  'The decision of a grant, from the level that it left and the microseconds until the bucket is full.';

create or replace function ratelimit.answer(level bigint, retry_us bigint, reset_us bigint, capacity bigint)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (coalesce(retry_us = 0, false), ratelimit.whole_tokens(level), ratelimit.duration(retry_us),
          ratelimit.duration(reset_us), capacity, false)::ratelimit.decision
$$;
comment on function ratelimit.answer(bigint, bigint, bigint, bigint) is
  'A decision from the level now, retry_us (0 means allowed, null means never) and reset_us.';

create or replace function ratelimit.replay(granted ratelimit.idempotency_keys, cost bigint)
  returns ratelimit.decision language plpgsql stable
as $$
begin
  if granted.cost <> cost then
    raise exception 'idempotency key used before with another cost' using
      errcode = 'RL002',
      detail  = format('%L was granted with cost %s and comes back with cost %s.', granted.idempotency_key, granted.cost, cost),
      hint    = 'Repeat a request with its first cost, and give a new request a new key.';
  end if;
  return (true, granted.remaining, interval '0', granted.reset_after, granted.capacity, true)::ratelimit.decision;
end;
$$;
comment on function ratelimit.replay(ratelimit.idempotency_keys, bigint) is
  'The first answer given under an idempotency key, marked replayed; RL002 when the cost differs.';

-- ratelimit_acquire_many reports an error in the row of its request. So this function catches the errors of the
-- checks. granted is the remembered grant whose cost differs; null means that the policy is unknown, unless an
-- argument is bad.
create or replace function ratelimit.refusal(
    in  policy text, in key text, in cost bigint, in idempotency_key text, in granted ratelimit.idempotency_keys,
    out error_code text, out error_message text, out error_detail text, out error_hint text)
  language plpgsql
as $$
begin
  perform ratelimit.check_request(policy, key, cost, idempotency_key);
  if granted is null then
    perform ratelimit.unknown_policy(policy);
  else
    perform ratelimit.replay(granted, cost);
  end if;
exception when sqlstate '22023' or sqlstate 'RL001' or sqlstate 'RL002' then
  get stacked diagnostics error_code    = returned_sqlstate,
                          error_message = message_text,
                          error_detail  = pg_exception_detail,
                          error_hint    = pg_exception_hint;
end;
$$;
comment on function ratelimit.refusal(text, text, bigint, text, ratelimit.idempotency_keys) is
  'The error ratelimit_acquire would raise, as a row.';


-- Policies.
-- Creates a policy, or changes the policy of that name. A null argument keeps the policy's value. A new
-- policy needs capacity, refill and every; stepped is false, durable true and remember 24 hours unless given.
--
-- A change applies to the next acquire of every bucket. Levels stay, clamped to the new capacity. The
-- time since a bucket was last written is credited at the new rate.
-- Locks:  the policy row, until the caller's transaction ends. Acquires do not wait for it.
-- Writes: policies.
create or replace function ratelimit_define_policy(
    policy   text,
    capacity bigint   default null,
    refill   bigint   default null,
    every    interval default null,
    stepped  boolean  default null,
    durable  boolean  default null,
    remember interval default null)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name    text collate "C" := ratelimit_define_policy.policy;
  v_policy  policies;
  v_durable boolean;
begin
  perform check_name('policy', v_name);
  select p.* into v_policy from policies as p where p.name = v_name for update;  -- the checks combine new numbers with these
  perform check_policy(coalesce(ratelimit_define_policy.capacity, v_policy.capacity),
                       coalesce(ratelimit_define_policy.refill, v_policy.refill),
                       coalesce(ratelimit_define_policy.every, v_policy.every),
                       ratelimit_define_policy.remember);
  insert into policies as p (id, name, capacity, refill, every, stepped, durable, remember)
  values (hashtextextended(gen_random_uuid()::text, 0),
          v_name,
          coalesce(ratelimit_define_policy.capacity, v_policy.capacity),
          coalesce(ratelimit_define_policy.refill, v_policy.refill),
          coalesce(ratelimit_define_policy.every, v_policy.every),
          coalesce(ratelimit_define_policy.stepped, false),
          coalesce(ratelimit_define_policy.durable, true),
          coalesce(ratelimit_define_policy.remember, interval '24 hours'))
  on conflict on constraint policies_pkey do update
     set capacity = excluded.capacity,
         refill   = excluded.refill,
         every    = excluded.every,
         stepped  = coalesce(ratelimit_define_policy.stepped, p.stepped),
         remember = coalesce(ratelimit_define_policy.remember, p.remember)
  returning p.durable into v_durable;

  if v_durable <> ratelimit_define_policy.durable then
    raise exception 'invalid durable'
      using errcode = '22023',
            detail  = format('Policy %L was created with durable => %s.', v_name, v_durable),
            hint    = 'Drop the policy and define it anew; its buckets will be full.';
  end if;
end;
$$;
comment on function ratelimit_define_policy(text, bigint, bigint, interval, boolean, boolean, interval) is
  'Create or change a policy: buckets of capacity tokens that gain refill tokens every interval.';

-- Removes a policy with its buckets and idempotency keys.
--
-- A row that an open transaction has locked is skipped, and left to clean-up. Such a row changes no answer,
-- because a policy defined anew under the same name has another id. SKIP LOCKED can still block if the row
-- changes hands while it is examined, as cleanup.sql says. Here only the caller's lock_timeout ends that wait.
-- Locks:  the policy row and the rows it deletes, until the caller's transaction ends.
-- Writes: policies; the buckets and idempotency keys of the policy.
create or replace function ratelimit_drop_policy(policy text)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name    text collate "C" := ratelimit_drop_policy.policy;
  v_id      bigint;
  v_durable boolean;
begin
  perform check_name('policy', v_name);
  delete from policies as p where p.name = v_name returning p.id, p.durable into v_id, v_durable;
  if not found then
    perform unknown_policy(v_name);
  end if;
  if v_durable then
    delete from buckets as t
 where t.ctid = any (array(select u.ctid
                             from buckets as u
                            where u.policy_id = v_id
                              for update skip locked));
    delete from idempotency_keys as t
 where t.ctid = any (array(select u.ctid
                             from idempotency_keys as u
                            where u.policy_id = v_id
                              for update skip locked));
  else
    delete from ephemeral_buckets as t
 where t.ctid = any (array(select u.ctid
                             from ephemeral_buckets as u
                            where u.policy_id = v_id
                              for update skip locked));
    delete from ephemeral_idempotency_keys as t
 where t.ctid = any (array(select u.ctid
                             from ephemeral_idempotency_keys as u
                            where u.policy_id = v_id
                              for update skip locked));
  end if;
end;
$$;
comment on function ratelimit_drop_policy(text) is
  'Remove a policy with its buckets and idempotency keys.';

-- Lists the policies, as defined.
--
-- Locks:  nothing.
-- Writes: nothing.
create or replace function ratelimit_policies()
  returns table (policy text, capacity bigint, refill bigint, every interval,
                 stepped boolean, durable boolean, remember interval)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select p.name, p.capacity, p.refill, p.every, p.stepped, p.durable, p.remember
    from policies as p
   order by p.name
$$;
comment on function ratelimit_policies() is
  'List the policies, one row each, as defined.';


-- Buckets.
-- Takes cost tokens from one bucket if it has them, and answers; a denial is an answer, not an error.
--
-- A repeat under the same idempotency key is the same request answered again, and takes nothing. So the program
-- chooses the idempotency key, one for each operation. If its own clients chose it, a client that repeats one
-- would pass every time.
--
-- The steps, in include/decide.sql. Steps 1 and 4 are for an acquire with an idempotency key. An idempotency key
-- that has not expired is live.
--   1. A live idempotency key is replayed, even when the bucket is empty.
--   2. One conditional update takes the tokens. Concurrent acquires take turns at it, and each takes tokens
--      only if the bucket still has enough.
--   3. If the update takes nothing, the bucket is read.
--      If it has too few tokens, the idempotency key is looked up again, because the request that emptied the
--      bucket may have had the same one; then the answer is the replay or the denial.
--      If the bucket has no row, it is full: the row is created, less the cost. If another session created the
--      row first, step 2 is repeated.
--      If the bucket has enough tokens after all, step 2 is repeated.
--   4. After the tokens are taken, the idempotency key is remembered. By now this call has locked the bucket's
--      row in step 2, or created it in step 3. So a live idempotency key that turns up only now was committed
--      after step 1 and before that. The tokens go back and the idempotency key is replayed. The refill that
--      step 2 credited stays.
-- A cost of 0 or above capacity takes nothing: it has only steps 1 and 3, and is answered from the bucket as read.
--
-- The clock is read before step 1 and in each step 3. The update of step 2 and the insert of step 3 may wait for
-- another session. A grant that waited is answered by the clock from before the wait: its reset_after is never
-- too short, and the refill of the wait is credited later. A denial is answered by the clock from after the wait.
--
-- Under REPEATABLE READ and SERIALIZABLE, an acquire that would take from a bucket that changed since the snapshot
-- fails with 40001, and a denial is as old as the snapshot. In a read-only transaction, an acquire that gets to
-- the update of step 2 fails with 25006, even if it would be denied.
--
-- Locks:  a grant and a replay of step 4 hold the bucket row and the row of the idempotency key until the
--         caller's transaction ends. A denial and a replay of step 3 hold the bucket row only if they had to
--         wait for it. A replay of step 1 holds nothing.
-- Writes: a grant writes the bucket and its idempotency key. A denial writes nothing. A replay writes
--         nothing, unless it is the replay of step 4.
create or replace function ratelimit_acquire(
    policy          text,
    key             text,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- a plan made while the table was empty would read all of it once it has grown
as $$
declare
  v_policy          policies;     -- in: the policy
  v_key             text collate "C" := ratelimit_acquire.key;  -- in: the bucket's key
  v_cost            alias for ratelimit_acquire.cost;  -- in: tokens that one request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; decide reads the clock again before each look
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
  v_reset_us        bigint;       -- out: microseconds until the bucket is full
  v_idempotency_key text collate "C" := ratelimit_acquire.idempotency_key;  -- in: null for none
  v_wanted          bigint;       -- in/out: microtokens to take, 0 for none; v_cost as microtokens, or for a run a multiple
                                  --         of it, which decide lowers to the requests that the bucket covers
  v_taken           bigint;       -- out: microtokens taken; 0 after a denial; of no meaning after a replay
  v_replayed        boolean;      -- in/out: null before; true when a live idempotency key was found, and then only v_first counts
  v_first           idempotency_keys;  -- out, when v_replayed: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- out, after a grant: the instant at which the row says that the bucket held v_level
  v_due_at          timestamptz;  -- inner: when clean-up looks at a new bucket
  v_expires_at      timestamptz;  -- inner: when the idempotency key is forgotten
  v_round           integer;      -- in/out: null before; the rounds that took nothing and denied nothing
begin
  if not acceptable(v_key, v_cost) then  -- inlined; the call of check_request raises the error
    perform check_request(policy, v_key, v_cost, v_idempotency_key);
  end if;
  if v_idempotency_key is not null then
    if not is_name(v_idempotency_key) then
      perform check_request(policy, v_key, v_cost, v_idempotency_key);
    end if;
    if v_cost = 0 then
      v_idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  select p.* into v_policy from policies as p where p.name = ratelimit_acquire.policy collate "C";
  if not found then  -- the name of a policy that was found needs no check
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;

  v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
  v_now    := clock();
  if v_policy.durable then
    <<decide>>
    begin
      if v_idempotency_key is not null then
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        exit decide when v_replayed;
      end if;

      loop
        if v_wanted > 0 then
          update buckets as b
             set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
           where b.policy_id = v_policy.id
             and b.key       = v_key
             and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
          returning b.level, b.refilled_at into v_level, v_refilled_at;
          exit when found;
        end if;

        v_now := clock();  -- the update may have waited
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

        if v_wanted = 0 or v_retry_us <> 0 then
          v_taken := 0;
          if v_idempotency_key is not null then
            select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
          end if;
          exit decide;
        end if;

        -- The bucket has no row, or it holds the cost by now, or it covers a part of the run, or the update of
        -- acquire_in_order waited for the row and found nothing. Without a row, this round makes one, less the
        -- tokens. Otherwise a second round takes them, unless another session changes the bucket in between.
        -- Each further round is due to another session.
        v_round := coalesce(v_round, 0) + 1;
        if v_round = 1000 then
          raise exception 'the bucket changed at every look'
            using errcode = '40001',
                  detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                  hint    = 'Try again.';
        end if;
        v_wanted := least(v_wanted, v_level - v_level % microtokens(v_cost));  -- lowers a run to whole requests
        if not v_has_row then
          v_level       := v_level - v_wanted;
          v_refilled_at := v_now;
          -- v_reset_us is worked out here for due_at. cleanup.sql says why due_at is within 24 hours.
          v_reset_us    := wait_below(v_policy.full_level, v_level, 0, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
          v_due_at      := v_now + least(duration(v_reset_us), interval '24 hours');
          -- The insert may wait for a session that creates the same row. The clock is not read again after that.
          insert into buckets (policy_id, key, level, refilled_at, due_at)
          values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
          on conflict on constraint buckets_pkey do nothing;
          exit when found;
        end if;
      end loop;

      v_taken    := v_wanted;
      v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

      if v_idempotency_key is not null then
        v_expires_at := v_now + duration(v_policy.remember_us);
        insert into idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy.id, v_key, v_idempotency_key, v_cost,
                whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
        on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now;
        if not found then  -- a live idempotency key: its tokens were taken already
          update buckets as b
             set level = b.level + v_taken
           where b.policy_id = v_policy.id
             and b.key       = v_key;
          select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        end if;
      end if;
    end decide;

  else
    <<decide>>
    begin
      if v_idempotency_key is not null then
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        exit decide when v_replayed;
      end if;

      loop
        if v_wanted > 0 then
          update ephemeral_buckets as b
             set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
           where b.policy_id = v_policy.id
             and b.key       = v_key
             and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
          returning b.level, b.refilled_at into v_level, v_refilled_at;
          exit when found;
        end if;

        v_now := clock();  -- the update may have waited
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

        if v_wanted = 0 or v_retry_us <> 0 then
          v_taken := 0;
          if v_idempotency_key is not null then
            select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
          end if;
          exit decide;
        end if;

        -- The bucket has no row, or it holds the cost by now, or it covers a part of the run, or the update of
        -- acquire_in_order waited for the row and found nothing. Without a row, this round makes one, less the
        -- tokens. Otherwise a second round takes them, unless another session changes the bucket in between.
        -- Each further round is due to another session.
        v_round := coalesce(v_round, 0) + 1;
        if v_round = 1000 then
          raise exception 'the bucket changed at every look'
            using errcode = '40001',
                  detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                  hint    = 'Try again.';
        end if;
        v_wanted := least(v_wanted, v_level - v_level % microtokens(v_cost));  -- lowers a run to whole requests
        if not v_has_row then
          v_level       := v_level - v_wanted;
          v_refilled_at := v_now;
          -- v_reset_us is worked out here for due_at. cleanup.sql says why due_at is within 24 hours.
          v_reset_us    := wait_below(v_policy.full_level, v_level, 0, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
          v_due_at      := v_now + least(duration(v_reset_us), interval '24 hours');
          -- The insert may wait for a session that creates the same row. The clock is not read again after that.
          insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
          values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
          on conflict on constraint ephemeral_buckets_pkey do nothing;
          exit when found;
        end if;
      end loop;

      v_taken    := v_wanted;
      v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

      if v_idempotency_key is not null then
        v_expires_at := v_now + duration(v_policy.remember_us);
        insert into ephemeral_idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy.id, v_key, v_idempotency_key, v_cost,
                whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
        on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now;
        if not found then  -- a live idempotency key: its tokens were taken already
          update ephemeral_buckets as b
             set level = b.level + v_taken
           where b.policy_id = v_policy.id
             and b.key       = v_key;
          select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        end if;
      end if;
    end decide;

  end if;

  if v_replayed then
    return replay(v_first, v_cost);
  elsif v_taken > 0 then
    return granted(v_level, v_reset_us, v_policy.capacity);
  end if;
  return answer(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_acquire(text, text, bigint, text) is
  'Take cost tokens from a bucket if it has them; a repeat under the same idempotency key is the same request answered again, and takes nothing.';

-- Decides the requests for one policy, bucket by bucket in the order of key, so that all calls lock buckets in one
-- order. Element n of keys, costs and idempotency_keys is the request with the number requests[n]. Rows come back
-- in the order of buckets.
--
-- The fast path, include/all_or_none.sql, is one statement. It decides when every bucket has a row, and covers all
-- its requests or fails even the cheapest. It reads all buckets before it takes from any, because a bucket that it
-- could not decide would have to be locked later, out of order. Its file lists what else makes it give up. Then it
-- is rolled back, and the ordered path decides. The rollback needs a subtransaction, which begins with every fast
-- path, also with one that succeeds. The fast path is not tried if the policy is unknown, if all requests for the
-- policy are equal and none has an idempotency key, or if a cost is not from 1 to 2147483646. It is not tried in a
-- read-only transaction either, where its update would fail also for requests that write nothing.
--
-- All answers of the fast path are as of one instant, read before its statement. They are accepted if they are less
-- than 100 ms old after the updates, or less than 1 ms for each request if that is longer. In the ordered path, a
-- denial is as old as the waits for later buckets, because all rows are returned at the end. A grant and a look-up
-- of an idempotency key are by the clock from before the waits for earlier buckets. Either way, times count from the
-- instant of the decision. So retry_after is never too short, but the tokens may be there sooner.
--
-- The ordered path goes through the steps of ratelimit_acquire, run by run. A run is equal requests without an
-- idempotency key that follow each other on one bucket; any other request is a run of its own. If the bucket covers
-- the whole run, one update takes for all of it. If the bucket covers a part, the update takes nothing, the bucket
-- is read, and a second update takes for the part. On a busy key, a run is often the whole call. Such a call skips
-- the fast path.
--
-- Locks and writes: as ratelimit_acquire_many.
create or replace function ratelimit.acquire_in_order(
    policy text, keys text[], costs bigint[], idempotency_keys text[], requests bigint[])
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean,
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan  -- no plan is better for some arguments than for others, and planning is slow
  set enable_seqscan = off    -- as in ratelimit_acquire
  set enable_hashjoin = off   -- nested loops alone keep the order of key, in which buckets are locked
  set enable_mergejoin = off  -- likewise
  set jit = off               -- the statements take less time than compiling them
as $$
declare
  v_policy          policies;     -- in: the policy
  v_key             text collate "C";  -- in: the bucket's key
  v_cost            bigint;  -- in: tokens that one request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; decide reads the clock again before each look
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
  v_reset_us        bigint;       -- out: microseconds until the bucket is full
  v_idempotency_key text collate "C";  -- in: null for none
  v_wanted          bigint;       -- in/out: microtokens to take, 0 for none; v_cost as microtokens, or for a run a multiple
                                  --         of it, which decide lowers to the requests that the bucket covers
  v_taken           bigint;       -- out: microtokens taken; 0 after a denial; of no meaning after a replay
  v_replayed        boolean;      -- in/out: null before; true when a live idempotency key was found, and then only v_first counts
  v_first           idempotency_keys;  -- out, when v_replayed: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- out, after a grant: the instant at which the row says that the bucket held v_level
  v_due_at          timestamptz;  -- inner: when clean-up looks at a new bucket
  v_expires_at      timestamptz;  -- inner: when the idempotency key is forgotten
  v_round           integer;      -- in/out: null before; the rounds that took nothing and denied nothing
  v_name            text collate "C" := acquire_in_order.policy;
  v_alike           boolean;      -- the whole call is one run
  v_stale_at        timestamptz;  -- an answer of the fast path is too old from here on
  v_answered        boolean;      -- the fast path returned the rows
  v_run             record;       -- key, cost, idempotency_key, and the numbers of its requests
  v_position        integer;      -- requests of the run that are answered
  v_count           integer;      -- requests that one pass of the loop over a run answers
  v_step            bigint;       -- microtokens between two grants of a pass; 0 when the pass takes nothing
  v_elapsed_us      numeric;      -- microseconds from v_refilled_at to v_now
begin
  v_now      := clock();
  v_stale_at := v_now + greatest(interval '100 milliseconds', cardinality(keys) * interval '1 millisecond');
  v_alike    := (idempotency_keys is null and keys[1] collate "C" = all (keys) and costs[1] = all (costs)) is true;
  select p.* into v_policy from policies as p where p.name = v_name;
  if found and not v_alike
     and 0 < all (costs) and 2147483647 > all (costs)  -- as integers their sums are bigint; sums of bigints are numeric, and slow
     and current_setting('transaction_read_only') = 'off' then  -- there an UPDATE fails even if it would take nothing
    begin
      if v_policy.durable and idempotency_keys is null then
        return query
      with found as materialized (
        select w.*, b.row_id, b.version, b.level, b.refilled_at,
               refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) as level_now
          from (select a.key, sum(a.cost) as total, min(a.cost) as cheapest,
                       array_agg(a.request) as requests, array_agg(a.total) as totals
                  from (select u.key collate "C" as key, u.cost::integer as cost, u.request,
                               sum(u.cost::integer)  -- of integers: the sum of bigints would be numeric
                                 over (order by u.key collate "C", u.request rows unbounded preceding) as total
                          from unnest(keys, costs) with ordinality as u (key, cost, request)) as a
                 group by a.key
                 order by a.key) as w
         cross join lateral (select b.ctid as row_id, b.xmin as version, b.level, b.refilled_at
                               from buckets as b
                              where b.policy_id = v_policy.id
       and b.key      >= w.key
       and b.key      <= w.key
     order by b.key desc
     limit 1) as b
      ), clear as materialized (
        select count(*) filter (where f.level_now / 1000000 >= f.total) as granting
          from found as f
        having sum(cardinality(f.requests)) = cardinality(keys)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update buckets as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
          from found as f
         where f.level_now / 1000000 >= f.total
           and exists (select from clear)
           and b.ctid = f.row_id
           and b.xmin = f.version
        returning f.requests, f.totals, b.level, b.refilled_at
      ), granted as (
        select g.request, g.level,
               wait_below(v_policy.full_level, g.level, microseconds(v_now - g.refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, r.level + microtokens(r.last - r.total) as level, r.refilled_at
                  from (select unnest(t.requests) as request, unnest(t.totals) as total,
                               t.totals[cardinality(t.totals)] as last, t.level, t.refilled_at
                          from taken as t) as r
                offset 0) as g
      ), denied as (
        select d.request, d.level_now as level,
               case
                 when d.cost <= v_policy.capacity then wait_for(microtokens(d.cost), d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
               end as retry_us,
               wait_for(v_policy.full_level, d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, costs[r.request] as cost, r.level, r.refilled_at, r.level_now
                  from (select unnest(f.requests) as request, f.level, f.refilled_at, f.level_now
                          from found as f
                         where f.level_now / 1000000 < f.cheapest
                           and exists (select from clear)) as r
                offset 0) as d
      )
      select requests[a.request], a.allowed, whole_tokens(a.level), duration(a.retry_us), duration(a.reset_us),
             v_policy.capacity, false, null::text, null::text, null::text, null::text
        from (select g.request, true as allowed, g.level, 0::bigint as retry_us, g.reset_us
                from granted as g
              union all
              select d.request, false, d.level, d.retry_us, d.reset_us
                from denied as d
              offset 0) as a
       where (select count(*) = (select c.granting from clear as c) and clock() < v_stale_at from taken);
      v_answered := found;

      elsif v_policy.durable then
        v_expires_at := v_now + duration(v_policy.remember_us);
        return query
      with found as materialized (
        select w.*, b.row_id, b.version, b.level, b.refilled_at,
               refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) as level_now
          from (select a.key, sum(a.cost) as total, min(a.cost) as cheapest,
                       array_agg(a.request) as requests, array_agg(a.total) as totals
                  from (select u.key collate "C" as key, u.cost::integer as cost, u.request,
                               sum(u.cost::integer)  -- of integers: the sum of bigints would be numeric
                                 over (order by u.key collate "C", u.request rows unbounded preceding) as total
                          from unnest(keys, costs) with ordinality as u (key, cost, request)) as a
                 group by a.key
                 order by a.key) as w
         cross join lateral (select b.ctid as row_id, b.xmin as version, b.level, b.refilled_at
                               from buckets as b
                              where b.policy_id = v_policy.id
       and b.key      >= w.key
       and b.key      <= w.key
     order by b.key desc
     limit 1) as b
      ), clear as materialized (
        select count(*) filter (where f.level_now / 1000000 >= f.total) as granting
          from found as f
        having sum(cardinality(f.requests)) = cardinality(keys)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update buckets as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
          from found as f
         where f.level_now / 1000000 >= f.total
           and exists (select from clear)
           and b.ctid = f.row_id
           and b.xmin = f.version
        returning f.requests, f.totals, b.level, b.refilled_at
      ), granted as (
        select g.request, g.level,
               wait_below(v_policy.full_level, g.level, microseconds(v_now - g.refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, r.level + microtokens(r.last - r.total) as level, r.refilled_at
                  from (select unnest(t.requests) as request, unnest(t.totals) as total,
                               t.totals[cardinality(t.totals)] as last, t.level, t.refilled_at
                          from taken as t) as r
                offset 0) as g
      ), denied as (
        select d.request, d.level_now as level,
               case
                 when d.cost <= v_policy.capacity then wait_for(microtokens(d.cost), d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
               end as retry_us,
               wait_for(v_policy.full_level, d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, costs[r.request] as cost, r.level, r.refilled_at, r.level_now
                  from (select unnest(f.requests) as request, f.level, f.refilled_at, f.level_now
                          from found as f
                         where f.level_now / 1000000 < f.cheapest
                           and exists (select from clear)) as r
                offset 0) as d
      ), remembered as (
        insert into idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        select v_policy.id, keys[g.request], idempotency_keys[g.request], costs[g.request],
               whole_tokens(g.level), duration(g.reset_us), v_policy.capacity, v_expires_at
          from granted as g
         where is_name(idempotency_keys[g.request])
        on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now
        returning 1
      )
      select requests[a.request], a.allowed, whole_tokens(a.level), duration(a.retry_us), duration(a.reset_us),
             v_policy.capacity, false, null::text, null::text, null::text, null::text
        from (select g.request, true as allowed, g.level, 0::bigint as retry_us, g.reset_us
                from granted as g
              union all
              select d.request, false, d.level, d.retry_us, d.reset_us
                from denied as d
              offset 0) as a
       where (select count(*) = (select c.granting from clear as c) and clock() < v_stale_at from taken)
         and (select count(idempotency_keys[g.request]) from granted as g) = (select count(*) from remembered)
         and not exists (select from denied as d
                          where not is_name(idempotency_keys[d.request]))
         and not exists (select from denied as d
                          cross join lateral (select k.expires_at
                                                from idempotency_keys as k
                                               where k.policy_id       = v_policy.id
                                                 and k.key             = keys[d.request] collate "C"
                                                 and k.idempotency_key = idempotency_keys[d.request] collate "C"
                                              offset 0) as k
                          where k.expires_at > v_now);
      v_answered := found;

      elsif idempotency_keys is null then
        return query
      with found as materialized (
        select w.*, b.row_id, b.version, b.level, b.refilled_at,
               refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) as level_now
          from (select a.key, sum(a.cost) as total, min(a.cost) as cheapest,
                       array_agg(a.request) as requests, array_agg(a.total) as totals
                  from (select u.key collate "C" as key, u.cost::integer as cost, u.request,
                               sum(u.cost::integer)  -- of integers: the sum of bigints would be numeric
                                 over (order by u.key collate "C", u.request rows unbounded preceding) as total
                          from unnest(keys, costs) with ordinality as u (key, cost, request)) as a
                 group by a.key
                 order by a.key) as w
         cross join lateral (select b.ctid as row_id, b.xmin as version, b.level, b.refilled_at
                               from ephemeral_buckets as b
                              where b.policy_id = v_policy.id
       and b.key      >= w.key
       and b.key      <= w.key
     order by b.key desc
     limit 1) as b
      ), clear as materialized (
        select count(*) filter (where f.level_now / 1000000 >= f.total) as granting
          from found as f
        having sum(cardinality(f.requests)) = cardinality(keys)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update ephemeral_buckets as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
          from found as f
         where f.level_now / 1000000 >= f.total
           and exists (select from clear)
           and b.ctid = f.row_id
           and b.xmin = f.version
        returning f.requests, f.totals, b.level, b.refilled_at
      ), granted as (
        select g.request, g.level,
               wait_below(v_policy.full_level, g.level, microseconds(v_now - g.refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, r.level + microtokens(r.last - r.total) as level, r.refilled_at
                  from (select unnest(t.requests) as request, unnest(t.totals) as total,
                               t.totals[cardinality(t.totals)] as last, t.level, t.refilled_at
                          from taken as t) as r
                offset 0) as g
      ), denied as (
        select d.request, d.level_now as level,
               case
                 when d.cost <= v_policy.capacity then wait_for(microtokens(d.cost), d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
               end as retry_us,
               wait_for(v_policy.full_level, d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, costs[r.request] as cost, r.level, r.refilled_at, r.level_now
                  from (select unnest(f.requests) as request, f.level, f.refilled_at, f.level_now
                          from found as f
                         where f.level_now / 1000000 < f.cheapest
                           and exists (select from clear)) as r
                offset 0) as d
      )
      select requests[a.request], a.allowed, whole_tokens(a.level), duration(a.retry_us), duration(a.reset_us),
             v_policy.capacity, false, null::text, null::text, null::text, null::text
        from (select g.request, true as allowed, g.level, 0::bigint as retry_us, g.reset_us
                from granted as g
              union all
              select d.request, false, d.level, d.retry_us, d.reset_us
                from denied as d
              offset 0) as a
       where (select count(*) = (select c.granting from clear as c) and clock() < v_stale_at from taken);
      v_answered := found;

      else
        v_expires_at := v_now + duration(v_policy.remember_us);
        return query
      with found as materialized (
        select w.*, b.row_id, b.version, b.level, b.refilled_at,
               refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) as level_now
          from (select a.key, sum(a.cost) as total, min(a.cost) as cheapest,
                       array_agg(a.request) as requests, array_agg(a.total) as totals
                  from (select u.key collate "C" as key, u.cost::integer as cost, u.request,
                               sum(u.cost::integer)  -- of integers: the sum of bigints would be numeric
                                 over (order by u.key collate "C", u.request rows unbounded preceding) as total
                          from unnest(keys, costs) with ordinality as u (key, cost, request)) as a
                 group by a.key
                 order by a.key) as w
         cross join lateral (select b.ctid as row_id, b.xmin as version, b.level, b.refilled_at
                               from ephemeral_buckets as b
                              where b.policy_id = v_policy.id
       and b.key      >= w.key
       and b.key      <= w.key
     order by b.key desc
     limit 1) as b
      ), clear as materialized (
        select count(*) filter (where f.level_now / 1000000 >= f.total) as granting
          from found as f
        having sum(cardinality(f.requests)) = cardinality(keys)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update ephemeral_buckets as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
          from found as f
         where f.level_now / 1000000 >= f.total
           and exists (select from clear)
           and b.ctid = f.row_id
           and b.xmin = f.version
        returning f.requests, f.totals, b.level, b.refilled_at
      ), granted as (
        select g.request, g.level,
               wait_below(v_policy.full_level, g.level, microseconds(v_now - g.refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, r.level + microtokens(r.last - r.total) as level, r.refilled_at
                  from (select unnest(t.requests) as request, unnest(t.totals) as total,
                               t.totals[cardinality(t.totals)] as last, t.level, t.refilled_at
                          from taken as t) as r
                offset 0) as g
      ), denied as (
        select d.request, d.level_now as level,
               case
                 when d.cost <= v_policy.capacity then wait_for(microtokens(d.cost), d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
               end as retry_us,
               wait_for(v_policy.full_level, d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, costs[r.request] as cost, r.level, r.refilled_at, r.level_now
                  from (select unnest(f.requests) as request, f.level, f.refilled_at, f.level_now
                          from found as f
                         where f.level_now / 1000000 < f.cheapest
                           and exists (select from clear)) as r
                offset 0) as d
      ), remembered as (
        insert into ephemeral_idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        select v_policy.id, keys[g.request], idempotency_keys[g.request], costs[g.request],
               whole_tokens(g.level), duration(g.reset_us), v_policy.capacity, v_expires_at
          from granted as g
         where is_name(idempotency_keys[g.request])
        on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now
        returning 1
      )
      select requests[a.request], a.allowed, whole_tokens(a.level), duration(a.retry_us), duration(a.reset_us),
             v_policy.capacity, false, null::text, null::text, null::text, null::text
        from (select g.request, true as allowed, g.level, 0::bigint as retry_us, g.reset_us
                from granted as g
              union all
              select d.request, false, d.level, d.retry_us, d.reset_us
                from denied as d
              offset 0) as a
       where (select count(*) = (select c.granting from clear as c) and clock() < v_stale_at from taken)
         and (select count(idempotency_keys[g.request]) from granted as g) = (select count(*) from remembered)
         and not exists (select from denied as d
                          where not is_name(idempotency_keys[d.request]))
         and not exists (select from denied as d
                          cross join lateral (select k.expires_at
                                                from ephemeral_idempotency_keys as k
                                               where k.policy_id       = v_policy.id
                                                 and k.key             = keys[d.request] collate "C"
                                                 and k.idempotency_key = idempotency_keys[d.request] collate "C"
                                              offset 0) as k
                          where k.expires_at > v_now);
      v_answered := found;

      end if;
      if v_answered then
        return;
      end if;
      raise exception sqlstate 'RL000';  -- rolls back to the begin above; caught below, so no caller sees it
    exception when sqlstate 'RL000' or cardinality_violation then
      v_now := clock();  -- the fast path may have waited
    end;
  end if;

  -- The ordered path. starts marks a request that begins a run: it or the request before it has an idempotency key,
  -- or their costs differ. run counts the starts up to a request, and so numbers the runs of a bucket from 1. Run 0
  -- is requests at the beginning of a bucket whose cost is null; they are refused.
  for v_run in
    select keys[1] collate "C" as key, costs[1] as cost, null as idempotency_key, requests as requests
     where v_alike
    union all
   (select c.key, c.cost, c.idempotency_key, array_agg(requests[c.request] order by c.request)
      from (select b.*, count(*) filter (where b.starts) over (partition by b.key order by b.request) as run
              from (select a.*,
                           a.idempotency_key is not null
                           or lag(a.idempotency_key) over bucket is not null
                           or lag(a.cost) over bucket is distinct from a.cost as starts
                      from (select u.key collate "C" as key, u.cost, u.idempotency_key collate "C" as idempotency_key,
                                   u.request
                              from unnest(keys, costs, idempotency_keys)
                                   with ordinality as u (key, cost, idempotency_key, request)
                             where not v_alike) as a
                    window bucket as (partition by a.key order by a.request)) as b) as c
     group by c.key, c.run, c.cost, c.idempotency_key
     order by c.key, c.run)
  loop
    v_key             := v_run.key;
    v_cost            := v_run.cost;
    v_idempotency_key := case when v_cost > 0 then v_run.idempotency_key end;
    v_position        := 0;
    if v_policy.id is null
       or not acceptable(v_key, v_cost)
       or not is_name(v_run.idempotency_key) then
      return query
        select r.request, null::boolean, null::bigint, null::interval, null::interval, null::bigint, null::boolean, e.*
          from unnest(v_run.requests) as r (request)
         cross join refusal(v_name, v_key, v_cost, v_run.idempotency_key, null) as e;
      continue;
    end if;

    while v_position < cardinality(v_run.requests) loop
      v_wanted := case
        when v_cost between 1 and v_policy.capacity then
          microtokens(v_cost * least(cardinality(v_run.requests) - v_position, v_policy.capacity / v_cost))
        else 0
      end;
      v_round    := null;
      v_replayed := null;
      if v_policy.durable then
        <<decide>>
    begin
      if v_idempotency_key is not null then
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        exit decide when v_replayed;
      end if;

      loop
        if v_wanted > 0 then
          update buckets as b
             set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
           where b.ctid = (select b.ctid
                             from buckets as b
                            where b.policy_id = v_policy.id
       and b.key      >= v_key
       and b.key      <= v_key
     order by b.key desc
     limit 1)
             and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
          returning b.level, b.refilled_at into v_level, v_refilled_at;
          exit when found;
        end if;

        v_now := clock();  -- the update may have waited
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key      >= v_key
       and b.key      <= v_key
     order by b.key desc
     limit 1;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

        if v_wanted = 0 or v_retry_us <> 0 then
          v_taken := 0;
          if v_idempotency_key is not null then
            select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
          end if;
          exit decide;
        end if;

        -- The bucket has no row, or it holds the cost by now, or it covers a part of the run, or the update of
        -- acquire_in_order waited for the row and found nothing. Without a row, this round makes one, less the
        -- tokens. Otherwise a second round takes them, unless another session changes the bucket in between.
        -- Each further round is due to another session.
        v_round := coalesce(v_round, 0) + 1;
        if v_round = 1000 then
          raise exception 'the bucket changed at every look'
            using errcode = '40001',
                  detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                  hint    = 'Try again.';
        end if;
        v_wanted := least(v_wanted, v_level - v_level % microtokens(v_cost));  -- lowers a run to whole requests
        if not v_has_row then
          v_level       := v_level - v_wanted;
          v_refilled_at := v_now;
          -- v_reset_us is worked out here for due_at. cleanup.sql says why due_at is within 24 hours.
          v_reset_us    := wait_below(v_policy.full_level, v_level, 0, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
          v_due_at      := v_now + least(duration(v_reset_us), interval '24 hours');
          -- The insert may wait for a session that creates the same row. The clock is not read again after that.
          insert into buckets (policy_id, key, level, refilled_at, due_at)
          values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
          on conflict on constraint buckets_pkey do nothing;
          exit when found;
        end if;
      end loop;

      v_taken    := v_wanted;
      v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

      if v_idempotency_key is not null then
        v_expires_at := v_now + duration(v_policy.remember_us);
        insert into idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy.id, v_key, v_idempotency_key, v_cost,
                whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
        on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now;
        if not found then  -- a live idempotency key: its tokens were taken already
          update buckets as b
             set level = b.level + v_taken
           where b.policy_id = v_policy.id
             and b.key       = v_key;
          select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        end if;
      end if;
    end decide;

      else
        <<decide>>
    begin
      if v_idempotency_key is not null then
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        exit decide when v_replayed;
      end if;

      loop
        if v_wanted > 0 then
          update ephemeral_buckets as b
             set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
           where b.ctid = (select b.ctid
                             from ephemeral_buckets as b
                            where b.policy_id = v_policy.id
       and b.key      >= v_key
       and b.key      <= v_key
     order by b.key desc
     limit 1)
             and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
          returning b.level, b.refilled_at into v_level, v_refilled_at;
          exit when found;
        end if;

        v_now := clock();  -- the update may have waited
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key      >= v_key
       and b.key      <= v_key
     order by b.key desc
     limit 1;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

        if v_wanted = 0 or v_retry_us <> 0 then
          v_taken := 0;
          if v_idempotency_key is not null then
            select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
          end if;
          exit decide;
        end if;

        -- The bucket has no row, or it holds the cost by now, or it covers a part of the run, or the update of
        -- acquire_in_order waited for the row and found nothing. Without a row, this round makes one, less the
        -- tokens. Otherwise a second round takes them, unless another session changes the bucket in between.
        -- Each further round is due to another session.
        v_round := coalesce(v_round, 0) + 1;
        if v_round = 1000 then
          raise exception 'the bucket changed at every look'
            using errcode = '40001',
                  detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                  hint    = 'Try again.';
        end if;
        v_wanted := least(v_wanted, v_level - v_level % microtokens(v_cost));  -- lowers a run to whole requests
        if not v_has_row then
          v_level       := v_level - v_wanted;
          v_refilled_at := v_now;
          -- v_reset_us is worked out here for due_at. cleanup.sql says why due_at is within 24 hours.
          v_reset_us    := wait_below(v_policy.full_level, v_level, 0, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
          v_due_at      := v_now + least(duration(v_reset_us), interval '24 hours');
          -- The insert may wait for a session that creates the same row. The clock is not read again after that.
          insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
          values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
          on conflict on constraint ephemeral_buckets_pkey do nothing;
          exit when found;
        end if;
      end loop;

      v_taken    := v_wanted;
      v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

      if v_idempotency_key is not null then
        v_expires_at := v_now + duration(v_policy.remember_us);
        insert into ephemeral_idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy.id, v_key, v_idempotency_key, v_cost,
                whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
        on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now;
        if not found then  -- a live idempotency key: its tokens were taken already
          update ephemeral_buckets as b
             set level = b.level + v_taken
           where b.policy_id = v_policy.id
             and b.key       = v_key;
          select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        end if;
      end if;
    end decide;

      end if;

      if v_replayed and v_first.cost <> v_cost then
        return query
          select v_run.requests[1], null::boolean, null::bigint, null::interval, null::interval, null::bigint, null::boolean, e.*
            from refusal(v_name, v_key, v_cost, v_idempotency_key, v_first) as e;
        exit;
      end if;
      capacity := v_policy.capacity;
      replayed := coalesce(v_replayed, false);
      if replayed then
        v_taken    := 0;
        v_level    := microtokens(v_first.remaining);
        v_retry_us := 0;
        v_reset_us := microseconds(v_first.reset_after)::bigint;
        capacity   := v_first.capacity;
      elsif v_taken > 0 then
        v_retry_us := 0;
      end if;
      allowed     := coalesce(v_retry_us = 0, false);
      retry_after := duration(v_retry_us);

      -- Each grant is answered with the level that it left. Requests that the bucket did not cover are left to
      -- the next pass, which takes for them or denies them all.
      v_step  := case when v_taken > 0 then microtokens(v_cost) else 0 end;
      v_count := case when v_step > 0 then (v_taken / v_step)::integer else cardinality(v_run.requests) - v_position end;
      if v_count = 1 then
        request     := v_run.requests[v_position + 1];
        remaining   := whole_tokens(v_level);
        reset_after := duration(v_reset_us);
        return next;
      else
        v_elapsed_us := microseconds(v_now - v_refilled_at);
        return query
          select d.request, acquire_in_order.allowed, whole_tokens(d.level), acquire_in_order.retry_after,
                 duration(d.reset_us), acquire_in_order.capacity, acquire_in_order.replayed, null, null, null, null
            from (select l.request, l.level,
                         case
                           when v_step = 0 then v_reset_us
                           else wait_below(v_policy.full_level, l.level, v_elapsed_us, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
                         end as reset_us
                    from (select v_run.requests[v_position + n] as request, v_level + (v_count - n) * v_step as level
                            from generate_series(1, v_count) as n
                          offset 0) as l
                  offset 0) as d;
      end if;
      v_position := v_position + v_count;
    end loop;
  end loop;
end;
$$;
comment on function ratelimit.acquire_in_order(text, text[], bigint[], text[], bigint[]) is
  'Decides the requests for one policy, and answers them in the order of their buckets.';

-- Decides many requests in one call, as if each were acquired on its own, one after another; row n answers
-- request n. Within a bucket, requests are decided in the order given. Requests on different buckets do not
-- affect each other. The fast path of acquire_in_order decides the requests for one policy at one instant. Its
-- ordered path reads the clock again each time an update took nothing, because the update may have waited.
--
-- A request that ratelimit_acquire would refuse (unknown policy, bad argument, another cost under its idempotency
-- key) has the error in its row and no decision. The other requests are decided all the same.
--
-- policies and keys are equally long, and so are costs and idempotency_keys unless null. Without costs
-- every cost is 1. Without idempotency_keys no request has one.
--
-- Locks:  as ratelimit_acquire, in the order of policy and key. So calls that are transactions of their own
--         never deadlock with each other. Several calls in one transaction can.
-- Writes: as ratelimit_acquire, and row versions that are rolled back when the fast path of
--         acquire_in_order gives up.
-- A request that is refused with RL002 in step 4 of ratelimit_acquire leaves its bucket locked, and written with
-- the tokens put back. ratelimit_acquire raises the error, which rolls both back.
create or replace function ratelimit_acquire_many(
    policies         text[],
    keys             text[],
    costs            bigint[] default null,
    idempotency_keys text[]   default null)
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean,
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_length integer  := cardinality(ratelimit_acquire_many.policies);
  v_costs  bigint[] := ratelimit_acquire_many.costs;
begin
  perform check_length('policies', v_length, v_length);
  perform check_length('keys', cardinality(keys), v_length);
  perform check_length('costs', coalesce(cardinality(costs), v_length), v_length);
  perform check_length('idempotency_keys', coalesce(cardinality(idempotency_keys), v_length), v_length);
  if v_costs is null then
    v_costs := array_fill(1::bigint, array[v_length]);
  elsif not is_list(v_costs) then
    v_costs := array(select unnest(v_costs));
  end if;
  if idempotency_keys is not null and not (is_list(keys) and is_list(idempotency_keys)) then  -- acquire_in_order subscripts both
    keys             := array(select unnest(keys));
    idempotency_keys := array(select unnest(ratelimit_acquire_many.idempotency_keys));
  end if;

  -- One policy needs no grouping. The other branch calls acquire_in_order in the order of policy.
  if policies[1] collate "C" = all (ratelimit_acquire_many.policies) then
    return query
      select a.*
        from acquire_in_order(policies[1], keys, v_costs, ratelimit_acquire_many.idempotency_keys,
                              array(select generate_series(1::bigint, v_length))) as a
       order by a.request;
  else
    return query
      select a.*
        from (select u.policy, array_agg(u.key order by u.request) as keys, array_agg(u.cost order by u.request) as costs,
                     case when ratelimit_acquire_many.idempotency_keys is not null then
                       array_agg(u.idempotency_key order by u.request)
                     end as idempotency_keys,
                     array_agg(u.request order by u.request) as requests
                from (select r.policy collate "C" as policy, r.key, r.cost, r.idempotency_key, r.request
                        from unnest(ratelimit_acquire_many.policies, ratelimit_acquire_many.keys, v_costs,
                                    ratelimit_acquire_many.idempotency_keys)
                             with ordinality as r (policy, key, cost, idempotency_key, request)) as u
               group by u.policy
               order by u.policy
              offset 0) as p
       cross join lateral acquire_in_order(p.policy, p.keys, p.costs, p.idempotency_keys, p.requests) as a
       order by a.request;
  end if;
end;
$$;
comment on function ratelimit_acquire_many(text[], text[], bigint[], text[]) is
  'Decide many requests in one call, in the order given, each with its own decision or error.';

-- Reports the tokens that a bucket holds, and whether an acquire of this cost would be allowed now. Takes nothing.
--
-- Locks:  nothing.
-- Writes: nothing. It works in a read-only transaction and, for durable policies, on a standby.
create or replace function ratelimit_peek(policy text, key text, cost bigint default 1)
  returns ratelimit.decision
  language plpgsql
  stable
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy          policies;     -- in: the policy
  v_key             text collate "C" := ratelimit_peek.key;  -- in: the bucket's key
  v_cost            alias for ratelimit_peek.cost;  -- in: tokens that one request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; decide reads the clock again before each look
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
  v_reset_us        bigint;       -- out: microseconds until the bucket is full
begin
  if not acceptable(v_key, v_cost) then
    perform check_request(policy, v_key, v_cost, null);
  end if;
  v_policy := policy_named(policy);
  v_now    := clock();
  if v_policy.durable then
    select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

  else
    select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

  end if;
  return answer(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_peek(text, text, bigint) is
  'The tokens that a bucket holds, and whether an acquire of this cost would be allowed now; takes nothing.';

-- Gives amount tokens back to one bucket, never above the policy's capacity, and answers with the tokens
-- that the bucket holds then. An amount above capacity counts as capacity.
--
-- A bucket without a row is full already, so nothing is written.
-- Locks:  the bucket row, until the caller's transaction ends.
-- Writes: the bucket.
create or replace function ratelimit_refund(policy text, key text, amount bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_key         text collate "C" := ratelimit_refund.key;
  v_policy      policies;
  v_amount      bigint;
  v_now         timestamptz;
  v_level       bigint;
  v_refilled_at timestamptz;
  v_reset_us    bigint;
  v_has_row     boolean;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  perform check_tokens('amount', ratelimit_refund.amount);
  v_policy := policy_named(policy);
  v_amount := least(ratelimit_refund.amount, v_policy.capacity);
  v_now    := clock();
  if v_policy.durable then
    update buckets as b
       set level       = least(refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
                               microtokens(v_policy.capacity - v_amount)) + microtokens(v_amount),
           refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
           due_at      = least(b.due_at, v_now)  -- the bucket may be full now: clean-up looks at it in five minutes or later
     where b.policy_id = v_policy.id
       and b.key       = v_key
    returning b.level, b.refilled_at into v_level, v_refilled_at;
    v_has_row := found;
  else
    update ephemeral_buckets as b
       set level       = least(refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
                               microtokens(v_policy.capacity - v_amount)) + microtokens(v_amount),
           refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
           due_at      = least(b.due_at, v_now)  -- the bucket may be full now: clean-up looks at it in five minutes or later
     where b.policy_id = v_policy.id
       and b.key       = v_key
    returning b.level, b.refilled_at into v_level, v_refilled_at;
    v_has_row := found;
  end if;
  if not v_has_row then
    return answer(microtokens(v_policy.capacity), 0, 0, v_policy.capacity);
  end if;
  v_reset_us := wait_for(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
  return answer(v_level, 0, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_refund(text, text, bigint) is
  'Give tokens back to a bucket, never above its capacity.';

-- Makes one bucket full again by removing its row. Its idempotency keys stay.
--
-- Locks:  the bucket row, until the caller's transaction ends.
-- Writes: the bucket.
create or replace function ratelimit_reset(policy text, key text)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_key    text collate "C" := ratelimit_reset.key;
  v_policy policies;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  v_policy := policy_named(policy);
  if v_policy.durable then
    delete from buckets as b where b.policy_id = v_policy.id and b.key = v_key;
  else
    delete from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = v_key;
  end if;
end;
$$;
comment on function ratelimit_reset(text, text) is
  'Make one bucket full again.';


-- Upkeep.
-- Clean-up removes rows that change no answer: buckets that are full again, expired idempotency keys, and
-- rows whose policy was dropped. It finds due rows through an index and skips rows that another session has
-- locked. An acquire on a bucket that a batch removes or postpones waits until the batch commits.
--
-- Clean-up judges every row as of five minutes ago. If the server's clock runs ahead for a moment, a bucket
-- that only looks full and a key that only looks expired are still there when the clock is set right.
--
-- SKIP LOCKED can still block if the row changes hands while it is examined. lock_timeout then ends the wait
-- after 100 ms, and the batch gives back its rows. PostgreSQL looks for a deadlock only after a wait of
-- deadlock_timeout, 1 second by default. If that is above 100 ms, a batch that is a transaction of its own gives
-- way before it is found in a deadlock. Only an acquire whose own look falls in those 100 ms can find one. In a
-- longer transaction, the rows of earlier batches stay locked, and it can deadlock with acquires.-- One batch: of each table the rows that are due by due_before, at most max_rows. The first batch of a series
-- passes null for due_before and deadline. Each later batch passes the values that the batch before it
-- returned. more is true if the batch found a row that is due or of a dropped policy, or gave up for
-- lock_timeout, and the deadline is not reached. The deadline is budget after the first batch began.
--
-- A due bucket that is not full is postponed until it can be full, by 24 hours at most. So a policy that was
-- made faster is noticed within a day.
-- Locks:  the rows that it deletes or postpones, until the caller's transaction ends.
-- Writes: the same rows; nothing if lock_timeout ended the batch.
create or replace function ratelimit.cleanup_batch(
    in    max_rows                 integer,
    in    budget                   interval,
    inout due_before               timestamptz,
    inout deadline                 timestamptz,
    out   buckets_deleted          bigint,
    out   idempotency_keys_deleted bigint,
    out   more                     boolean)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off    -- as in ratelimit_acquire
  set lock_timeout = '100ms'  -- SKIP LOCKED can still block: see above
as $$
declare
  v_now     timestamptz := clock() - interval '5 minutes';  -- rows are judged as of this instant
  v_read    bigint;
  v_deleted bigint;
  v_rows    bigint;  -- rows deleted or postponed
begin
  if (max_rows > 0) is not true then
    perform refuse('max_rows', max_rows::text, 'Pass 1 or more.');
  end if;
  if (budget > interval '0') is not true then
    perform refuse('budget', budget::text, 'Pass an interval above zero, such as ''50 seconds''.');
  end if;
  due_before               := least(due_before, v_now);  -- least ignores null; a caller cannot look past v_now
  deadline                 := coalesce(deadline, clock_timestamp() + least(budget, interval '1000 years'));
  buckets_deleted          := 0;
  idempotency_keys_deleted := 0;
  v_rows                   := 0;

  begin
    with due as materialized (
    select b.ctid as row_id,
           p.id is null
           or wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up) = 0 as removable
      from buckets as b
      left join policies as p on p.id = b.policy_id
     where b.due_at <= due_before
     order by b.due_at
     limit max_rows
       for update of b skip locked
  ), removed as (
    delete from buckets as b
     where b.ctid = any (array(select d.row_id from due as d where d.removable))
    returning 1
  ), postponed as (
    update buckets as b
       set due_at = v_now + (select least(interval '24 hours',
                                          duration(wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up)))
                               from policies as p
                              where p.id = b.policy_id)
     where b.ctid = any (array(select d.row_id from due as d where not d.removable))
  )
  select (select count(*) from due), (select count(*) from removed) into v_read, v_deleted;
  v_rows          := v_rows + v_read;
  buckets_deleted := buckets_deleted + v_deleted;
    with due as materialized (
    select b.ctid as row_id,
           p.id is null
           or wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up) = 0 as removable
      from ephemeral_buckets as b
      left join policies as p on p.id = b.policy_id
     where b.due_at <= due_before
     order by b.due_at
     limit max_rows
       for update of b skip locked
  ), removed as (
    delete from ephemeral_buckets as b
     where b.ctid = any (array(select d.row_id from due as d where d.removable))
    returning 1
  ), postponed as (
    update ephemeral_buckets as b
       set due_at = v_now + (select least(interval '24 hours',
                                          duration(wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up)))
                               from policies as p
                              where p.id = b.policy_id)
     where b.ctid = any (array(select d.row_id from due as d where not d.removable))
  )
  select (select count(*) from due), (select count(*) from removed) into v_read, v_deleted;
  v_rows          := v_rows + v_read;
  buckets_deleted := buckets_deleted + v_deleted;
    delete from idempotency_keys as k
   where k.ctid = any (array(select d.ctid
                               from idempotency_keys as d
                              where d.expires_at <= due_before
                              order by d.expires_at
                              limit max_rows
                                for update skip locked));
  get diagnostics v_deleted = row_count;
  v_rows                   := v_rows + v_deleted;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
    delete from ephemeral_idempotency_keys as k
   where k.ctid = any (array(select d.ctid
                               from ephemeral_idempotency_keys as d
                              where d.expires_at <= due_before
                              order by d.expires_at
                              limit max_rows
                                for update skip locked));
  get diagnostics v_deleted = row_count;
  v_rows                   := v_rows + v_deleted;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
    if v_rows = 0 then  -- orphans can wait for an idle batch
      with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from buckets as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from buckets as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from buckets as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from buckets as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  v_rows      := v_rows + v_deleted;
  buckets_deleted := buckets_deleted + v_deleted;
      with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from ephemeral_buckets as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from ephemeral_buckets as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from ephemeral_buckets as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from ephemeral_buckets as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  v_rows      := v_rows + v_deleted;
  buckets_deleted := buckets_deleted + v_deleted;
      with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from idempotency_keys as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from idempotency_keys as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from idempotency_keys as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from idempotency_keys as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  v_rows      := v_rows + v_deleted;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
      with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from ephemeral_idempotency_keys as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from ephemeral_idempotency_keys as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from ephemeral_idempotency_keys as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from ephemeral_idempotency_keys as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  v_rows      := v_rows + v_deleted;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
    end if;
  exception when lock_not_available then
    buckets_deleted          := 0;
    idempotency_keys_deleted := 0;
    v_rows                   := 1;  -- the locked row may be due, so more is true
  end;
  more := v_rows > 0 and clock_timestamp() < deadline;
end;
$$;
comment on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) is
  'One batch of clean-up, and whether another should follow.';

-- One batch. It can delete nothing although rows are due: every due bucket may be in use, or lock_timeout may
-- have ended the batch. Rows of dropped policies are removed once nothing else is due. ratelimit_cleanup_all
-- repeats batches. The budget of 1 second has no effect here: only deadline and more depend on it, and they are
-- not used.
create or replace function ratelimit_cleanup(
    in  max_rows                 integer default 10000,
    out buckets_deleted          bigint,
    out idempotency_keys_deleted bigint)
  language sql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select b.buckets_deleted, b.idempotency_keys_deleted from cleanup_batch(max_rows, '1 second', null, null) as b
$$;
comment on function ratelimit_cleanup(integer) is
  'Remove one batch of full buckets and one of expired idempotency keys, at most max_rows rows of each table.';

-- Repeats batches and commits after each, until a batch finds no row of a dropped policy and none that was due
-- at the first batch, or the budget is spent. Rows that other sessions have locked are skipped, and left to the next call.
--
-- A procedure that commits can have neither SECURITY DEFINER nor SET. So it runs with the caller's rights: a
-- caller other than the owner needs EXECUTE on this procedure and on ratelimit.cleanup_batch, and USAGE on
-- schema ratelimit. And it runs with the caller's search_path, where another role may have planted functions
-- and operators. So its body names its one function with the schema, and uses no operator.
create or replace procedure ratelimit_cleanup_all(budget interval default '50 seconds')
  language plpgsql
as $$
declare
  v_due_before timestamptz;
  v_deadline   timestamptz;
  v_more       boolean;
begin
  loop
    select b.due_before, b.deadline, b.more
      into v_due_before, v_deadline, v_more
      from ratelimit.cleanup_batch(10000, ratelimit_cleanup_all.budget, v_due_before, v_deadline) as b;
    commit;
    exit when not v_more;
  end loop;
end;
$$;
comment on procedure ratelimit_cleanup_all(interval) is
  'Remove all full buckets and expired idempotency keys in short batches, committing between them, for at most budget.';

-- The release of the installed functions.
create or replace function ratelimit_version()
  returns text
  language sql
  immutable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select '0.1.0'
$$;
comment on function ratelimit_version() is
  'The release of pgratelimit that is installed.';


-- Checks that all functions of the package belong to the owner of schema ratelimit. Revokes the grants that
-- default privileges gave on new functions. Functions that existed before keep their grants.
do $epilogue$
declare
  v_owner oid;
  v_path  text := pg_catalog.current_setting('search_path');
  v_home  text := pg_catalog.current_schema();
  v_role  text;
  v_proc  record;
  v_had   oid[] := pg_catalog.string_to_array(pg_catalog.current_setting('ratelimit.preexisting'), ',')::oid[];
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspowner into v_owner from pg_catalog.pg_namespace as n where n.nspname = 'ratelimit';

  for v_proc in
    select p.oid, p.oid::pg_catalog.regprocedure as signature, p.proowner, p.proacl
      from pg_catalog.pg_proc as p
     where p.pronamespace = 'ratelimit'::pg_catalog.regnamespace
        or p.pronamespace = pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace
       and pg_catalog.starts_with(p.proname, 'ratelimit_')
  loop
    if v_proc.proowner <> v_owner then
      raise exception 'a function of the package belongs to another role'
        using errcode = '42501',
              detail  = pg_catalog.format('%s belongs to %s; schema ratelimit belongs to %s.', v_proc.signature,
                                          v_proc.proowner::pg_catalog.regrole, v_owner::pg_catalog.regrole),
              hint    = 'Drop the function if it was planted; install as the owner of schema ratelimit.';
    end if;
    continue when v_proc.oid = any (v_had);
    for v_role in
      select distinct case a.grantee when 0 then 'public' else a.grantee::pg_catalog.regrole::text end
        from pg_catalog.aclexplode(coalesce(v_proc.proacl, pg_catalog.acldefault('f', v_owner))) as a
       where a.grantee <> v_owner
    loop
      execute pg_catalog.format('revoke all on routine %s from %s', v_proc.signature, v_role);
    end loop;
  end loop;
  perform pg_catalog.set_config('search_path', v_path, true);
end;
$epilogue$;

update ratelimit.schema_version set version = 1;
\endif
\unset pgratelimit_missing
commit;

begin transaction isolation level read committed;
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
      if v_version is null or v_version < 2 then
        if v_member then
          raise exception 'pgratelimit is an extension in this database'
            using errcode = '55000',
                  hint    = 'Run: alter extension pgratelimit update';
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
select v.version operator(pg_catalog.<) 2 as pgratelimit_missing from ratelimit.schema_version as v
\gset
\if :pgratelimit_missing
-- 002_several_limits.sql
-- Several limits in one request, overrides, shadow policies, policies that do not refill, debt and reservations, shards.

-- Acquires wait behind this migration, so it does not wait for long. It fails with 55P03 when a transaction that took
-- tokens stays open, and can be run again.
set local lock_timeout = '3s';

-- Calls that begin from here on wait at the policy. They were resolved to the old functions, and go on with what those
-- call: the functions at the end of this file and the old helpers, which the next migration drops.
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
                         'ratelimit_refund')
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

alter type ratelimit.decision rename to retired_decision;
create type ratelimit.decision as (
  allowed     boolean,
  remaining   bigint,
  retry_after interval,
  reset_after interval,
  capacity    bigint,
  replayed    boolean,
  shadowed    boolean
);
comment on type ratelimit.decision is
'The answer about one bucket.
allowed: whether the request is granted. A shadow policy grants each request.
remaining: whole tokens in the bucket, rounded down. Below zero while there is debt.
retry_after: the time until the same request is allowed, if no other request takes tokens. Zero if it is allowed; null
  if no wait helps.
reset_after: the time until the bucket is full; null for never.
capacity: of the bucket, in whole tokens, by the policy or the override of the key.
replayed: this is the first answer under a live idempotency key, given again.
shadowed: a shadow policy would have denied if it were enforced.';
create type ratelimit.packed as (
  elements          bigint[],
  remaining         bigint[],
  retry_after_us    bigint[],
  reset_after_us    bigint[],
  capacity          bigint[],
  replayed          boolean[],
  shadowed          boolean[],
  requests          bigint[],
  requests_allowed  boolean[],
  requests_replayed boolean[],
  requests_shadowed boolean[],
  bindings          integer[],
  refused           bigint[],
  error_codes       text[],
  error_messages    text[],
  error_details     text[],
  error_hints       text[]
);
comment on type ratelimit.packed is
'The answers of ratelimit_acquire_packed, as arrays.
The arrays up to shadowed are parallel, those from requests to bindings are, and those from refused on are. Without
  sizes the arrays from requests to bindings are null.
elements: the numbers of the elements that have a decision, from 1, in no particular order.
remaining: as in ratelimit.decision.
retry_after_us: microseconds; 0 if the element is allowed, null for never.
reset_after_us: microseconds; null for never.
capacity: as in ratelimit.decision.
replayed: as in ratelimit.decision. null if no element is replayed.
shadowed: as in ratelimit.decision. null if no element is shadowed.
requests: the numbers of the requests that have a decision, from 1.
requests_allowed: whether the request is granted.
requests_replayed: as replayed of ratelimit_acquire_all.
requests_shadowed: as shadowed of ratelimit_acquire_all.
bindings: the binding element, counted within the request from 1.
refused: the numbers of the requests that have an error, from 1. null if there is none.
error_codes: SQLSTATE.';
create type ratelimit.calendar as (
  ends_at    timestamptz,
  overridden boolean,
  period     interval,
  months     integer,
  time_zone  text collate "C",
  anchor     timestamp,
  turned_at  timestamptz,
  turns_at   timestamptz,
  lease      interval
);
comment on type ratelimit.calendar is
  'When numbers end, infinity for those of a quota or of slots; of these whether some key has had an override; of a quota its period, also in months or 0, its time zone and the local time of one turn, and in a call its last turn and the next; of slots the lease.';
create type ratelimit.charged as (
  places      bigint[],
  wanted      bigint,
  level       bigint,
  refilled_at timestamptz
);
comment on type ratelimit.charged is
  'What ratelimit.take_from_buckets did to one bucket: for which elements, the microtokens they wanted together, and the bucket after it.';
create type ratelimit.reservation as (
  allowed     boolean,
  wait        interval,
  remaining   bigint,
  reset_after interval,
  capacity    bigint,
  replayed    boolean,
  shadowed    boolean
);
comment on type ratelimit.reservation is
'The answer of ratelimit_reserve.
allowed: whether the request is granted. A shadow policy grants each request.
wait: the time until the tokens may be used. Of a denial it is the wait that would have been needed; null for never.
remaining: as in ratelimit.decision.
reset_after: as in ratelimit.decision.
capacity: as in ratelimit.decision.
replayed: as in ratelimit.decision.
shadowed: a shadow policy would have waited or denied if it were enforced.';
create type ratelimit.partial_decision as (
  allowed     boolean,
  remaining   bigint,
  retry_after interval,
  reset_after interval,
  capacity    bigint,
  replayed    boolean,
  shadowed    boolean,
  taken       bigint
);
comment on type ratelimit.partial_decision is
'The answer of ratelimit_acquire_up_to: the columns of ratelimit.decision, and taken.
taken: whole tokens, 0 for a denial.';
create type ratelimit.hold as (
  allowed     boolean,
  remaining   bigint,
  retry_after interval,
  held_for    interval,
  capacity    bigint,
  renewed     boolean,
  shadowed    boolean
);
comment on type ratelimit.hold is
'The answer of ratelimit_hold.
allowed: whether the holder holds. A shadow policy grants each request.
remaining: the slots that nobody holds after the call. Below zero after the capacity was lowered.
retry_after: the time until the same request is allowed, if nobody holds, renews or releases meanwhile. Zero if it is allowed;
  null if no wait helps.
held_for: how long the lease lasts from now. Zero for a denial.
capacity: the slots of the key, by the policy or the override of the key.
renewed: the holder held them before the call.
shadowed: a shadow policy would have denied if it were enforced. Then nothing is held.';
create type ratelimit.asked as (
  key    text collate "C",
  wanted bigint,
  places bigint[],
  size   bigint
);
comment on type ratelimit.asked is
  'What a batch asks of one bucket: the microtokens, and for which elements. See ratelimit.take_from_buckets.';
create type ratelimit.part as (
  policy  ratelimit.policies,
  asked   ratelimit.asked[],
  row_ids tid[]
);
comment on type ratelimit.part is
  'What a batch asks of the buckets of one policy, and their row ids. See ratelimit.acquire_batch.';
comment on type ratelimit.retired_decision is
  'Retired: calls that began under schema version 1 may still return it.';

-- Neither column makes PostgreSQL write the table anew, which a call with an older snapshot would find empty.
alter table ratelimit.policies
  add column overridden boolean not null default false,
  add column shadow     boolean not null default false,
  add column calendar   ratelimit.calendar,
  add constraint policies_calendar_check check ((calendar).period is not null or (calendar).lease is not null or calendar is null);
-- The planner reads a table slower while rows may lack a column. CLUSTER writes them anew, and unlike other ways to do so
-- it keeps them visible to older snapshots.
cluster ratelimit.policies using policies_pkey;
alter table ratelimit.policies set without cluster;
comment on column ratelimit.policies.overridden is
  'Some key has had an override, or the policy is a quota or lends slots; until then nothing looks for an override.';
comment on column ratelimit.policies.shadow is
  'The policy watches: what it would deny is allowed, and marked shadowed.';
comment on column ratelimit.policies.calendar is
  'Of a quota, whose buckets are full at each turn, or of slots, which have a lease; either has refill 0. null for a policy that refills.';

-- The columns from stepped on are those of ratelimit.policies.
create table ratelimit.overrides (
  policy_id  bigint      not null,
  expires_at timestamptz not null,
  key        text        collate "C" not null,
  capacity   bigint      not null,
  refill     bigint      not null,
  every      interval    not null,
  stepped    boolean     not null,
  tick       interval    not null generated always as (case when stepped then every else interval '1 microsecond' end) stored,
  every_us   numeric     not null generated always as (extract(epoch from every) * 1000000.0) stored,
  tick_us    numeric     not null generated always as (case when stepped then extract(epoch from every) * 1000000.0 else 1 end) stored,
  full_level numeric     not null generated always as (capacity * 1000000) stored,
  gain       numeric     not null generated always as (refill::numeric * 1000000000000::numeric) stored,
  tick_gain  numeric     not null generated always as ((refill * 1000000)::numeric * case when stepped then extract(epoch from every) * 1000000.0 else 1 end) stored,
  round_up   numeric     not null generated always as ((refill * 1000000)::numeric * case when stepped then extract(epoch from every) * 1000000.0 else 1 end - 1::numeric) stored,
  calendar   ratelimit.calendar,
  constraint overrides_pkey primary key (policy_id, key)
);
create index overrides_expires_at_idx on ratelimit.overrides (expires_at);
comment on table ratelimit.overrides is
  'The numbers of single keys that differ from their policy''s; changed by ratelimit_override and ratelimit_remove_override only.';
comment on column ratelimit.overrides.expires_at is
  'From when on the override is as good as absent; infinity for never.';
comment on column ratelimit.overrides.stepped is
  'That of the policy.';
comment on column ratelimit.overrides.calendar is
  'Of a quota''s key the time zone and the anchor; of a key of slots the lease.';

-- Inserts fill a page to its fillfactor, and a page of which less is free than that is pruned when it is read. So of a page that
-- inserts have filled every update was followed by a prune, which was an eighth of what a batch cost. Rows that become smaller
-- leave room for more versions.
alter table ratelimit.buckets add column room uuid;
alter table ratelimit.ephemeral_buckets add column room uuid;
alter table ratelimit.buckets alter column room set default '00000000-0000-0000-0000-000000000000';
alter table ratelimit.ephemeral_buckets alter column room set default '00000000-0000-0000-0000-000000000000';
comment on column ratelimit.buckets.room is
  'Nothing but 16 bytes. The first update of a row sets it to null, and so leaves room on the page for the next versions.';
comment on column ratelimit.ephemeral_buckets.room is
  'Nothing but 16 bytes. The first update of a row sets it to null, and so leaves room on the page for the next versions.';

-- The time until a bucket is full is null when its policy does not refill.
alter table ratelimit.idempotency_keys alter column reset_after drop not null;
alter table ratelimit.ephemeral_idempotency_keys alter column reset_after drop not null;

-- A column that is null in every row slows no statement down: the planner finds nothing missing, and no row is written anew.
alter table ratelimit.idempotency_keys
  add column ready_at   timestamptz,
  add column settled    bigint,
  add column taken      bigint,
  add column granted_at timestamptz;
alter table ratelimit.ephemeral_idempotency_keys
  add column ready_at   timestamptz,
  add column settled    bigint,
  add column taken      bigint,
  add column granted_at timestamptz;
comment on column ratelimit.idempotency_keys.ready_at is
  'When a reserved grant begins to hold; null for a grant that held at once.';
comment on column ratelimit.idempotency_keys.settled is
  'The real cost, in place of cost, once the grant is settled.';
comment on column ratelimit.idempotency_keys.taken is
  'The microtokens that a charge took which was cut at the floor; null for all of cost.';
comment on column ratelimit.idempotency_keys.granted_at is
  'When a quota granted; null for another policy.';
comment on column ratelimit.ephemeral_idempotency_keys.granted_at is
  'When a quota granted; null for another policy.';
comment on column ratelimit.ephemeral_idempotency_keys.ready_at is
  'When a reserved grant begins to hold; null for a grant that held at once.';
comment on column ratelimit.ephemeral_idempotency_keys.settled is
  'The real cost, in place of cost, once the grant is settled.';
comment on column ratelimit.ephemeral_idempotency_keys.taken is
  'The microtokens that a charge took which was cut at the floor; null for all of cost.';

-- Slots. What is held is the sum of the leases that have not ended. A key's row in slots is the lock of its leases: a session that changes
-- them writes it first, and with it their sum. So no lease is without that row.
--
-- Neither a grant nor a renewal nor a release changes an indexed column, but for due_at once after clean-up has postponed it: updates
-- can be HOT, and a key that is in use pays nothing for clean-up.
create table ratelimit.slots (
  policy_id     bigint      not null,
  changes       bigint      not null,
  held          bigint      not null,
  counted_until timestamptz not null,
  due_at        timestamptz not null,
  key           text        collate "C" not null,
  constraint slots_pkey primary key (policy_id, key)
);
create index slots_due_at_idx on ratelimit.slots (due_at);
comment on table ratelimit.slots is
  'Keys of durable slots that somebody has held: the lock of the leases of a key.';
comment on column ratelimit.slots.changes is
  'Counts what was changed in the leases of the key, from the microsecond in which the row was created: no two states have one number.';
comment on column ratelimit.slots.held is
  'The costs of all leases of the key, until counted_until.';
comment on column ratelimit.slots.counted_until is
  'Until then held is right and no lease of the key ends; -infinity: the next grant adds up the leases.';
comment on column ratelimit.slots.due_at is
  'When clean-up looks for ended leases of the key; none of its leases ends earlier.';
create table ratelimit.leases (
  policy_id bigint      not null,
  ends_at   timestamptz not null,
  cost      integer     not null,
  key       text        collate "C" not null,
  holder    text        collate "C" not null,
  constraint leases_pkey primary key (policy_id, key, holder)
);
comment on table ratelimit.leases is
  'Who holds how many slots of a durable policy until when; from ends_at on a lease is as good as absent.';
create unlogged table ratelimit.ephemeral_slots (
  like ratelimit.slots including all
);
comment on table ratelimit.ephemeral_slots is
  'Keys of ephemeral slots: unlogged, empty after a crash.';
create unlogged table ratelimit.ephemeral_leases (
  like ratelimit.leases including all
);
comment on table ratelimit.ephemeral_leases is
  'Leases of ephemeral slots: unlogged, empty after a crash.';
-- As for buckets: room for the next versions of rows, and vacuum that keeps up.
alter table ratelimit.slots set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.ephemeral_slots set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.leases set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.ephemeral_leases set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);

create table ratelimit.shard (
  shard integer not null,
  of    integer not null
);
create unique index shard_one_row_idx on ratelimit.shard ((true));
comment on table ratelimit.shard is
  'At most one row: which of how many shards this database is; written by ratelimit_define_shard only.';
comment on column ratelimit.shard.shard is
  'The number of this shard, from 0.';
comment on column ratelimit.shard.of is
  'How many shards there are: a power of two.';

-- Default privileges may have granted rights on the new tables to other roles.
do $private$
declare
  v_path  text := pg_catalog.current_setting('search_path');
  v_grant record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_grant in
    select distinct c.oid::regclass as of, case a.grantee when 0 then 'public' else a.grantee::regrole::text end as grantee
      from pg_class as c
     cross join aclexplode(c.relacl) as a
     where c.oid in ('ratelimit.overrides'::regclass, 'ratelimit.shard'::regclass, 'ratelimit.slots'::regclass, 'ratelimit.leases'::regclass,
                     'ratelimit.ephemeral_slots'::regclass, 'ratelimit.ephemeral_leases'::regclass)
       and a.grantee <> c.relowner
  loop
    execute format('revoke all on %s from %s', v_grant.of, v_grant.grantee);
  end loop;
  perform set_config('search_path', v_path, true);
end;
$private$;

-- pgratelimit: token bucket rate limits that live in PostgreSQL.
--
-- A policy says how large a bucket is and how fast it refills. A bucket belongs to one policy and
-- one key; it stores how many microtokens it held at one instant, and everything else follows by
-- arithmetic from the server's clock. No row means full: the first grant creates the row, clean-up
-- removes it once it is full again. A grant made under an idempotency key is remembered beside its
-- bucket, so that a retry gets the first answer and takes nothing.
--
-- The public functions are named ratelimit_* and live in the schema that headed search_path at the
-- first install. Tables and helpers live in schema ratelimit, where callers have no rights: the
-- public functions are SECURITY DEFINER with a pinned search_path, all but ratelimit_cleanup_all and
-- ratelimit_reset_all, which commit.
--
-- A policy with a lease lends slots in place of tokens: what is held of a key is the sum of its leases that have not ended. Their rows,
-- and one row of each key, which is the lock of its leases, are in leases and slots.
--
-- An ephemeral policy writes no WAL: a crash makes its buckets full. Durable and ephemeral policies keep their state in twin tables (buckets and ephemeral_buckets,
-- idempotency_keys and ephemeral_idempotency_keys, slots and leases likewise), because a statement cannot choose its table at run time.
-- Longer code that touches them is written once, as a template over the two names; short statements are written twice. The
-- tables and types are made by migrations/002_several_limits.sql.
--
-- This file is the table of contents.
-- Decides where the public functions go, and refuses to install over objects of another role.
--
-- A first install takes the schema that heads search_path and wants it free of ratelimit_*
-- functions: to replace a planted function would leave the role that planted it as owner. A later install
-- goes to the schema that has the functions. The setting ratelimit.preexisting lists the functions that
-- existed before, for this transaction only. The epilogue clears the grants of all others.
do $prologue$
declare
  v_owner oid;
  v_first text := pg_catalog.current_schema();
  v_home  text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspowner into v_owner from pg_catalog.pg_namespace as n where n.nspname = 'ratelimit';
  if pg_catalog.pg_get_userbyid(v_owner) <> current_user then
    raise exception 'schema ratelimit belongs to another role'
      using errcode = '42501',
            detail  = pg_catalog.format('It belongs to %s.', v_owner::pg_catalog.regrole),
            hint    = 'Install as its owner, or drop the schema if it was planted.';
  end if;

  if pg_catalog.to_regprocedure('ratelimit.clock()') is null then
    v_home := v_first;
    if v_home is null then
      raise exception 'no schema to install into'
        using errcode = '3F000',
              hint    = 'Put an existing schema at the head of search_path, for example public.';
    end if;
    if exists (select from pg_catalog.pg_proc as p
                where p.pronamespace = pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace
                  and pg_catalog.starts_with(p.proname, 'ratelimit_')) then
      raise exception 'functions named ratelimit_* exist already'
        using errcode = '42723',
              detail  = pg_catalog.format('Schema %I has them, and they are not of this package.', v_home),
              hint    = 'Drop or rename them, or install with another schema at the head of search_path.';
    end if;
  else
    begin
      select n.nspname into strict v_home
        from pg_catalog.pg_proc as p
        join pg_catalog.pg_namespace as n on n.oid = p.pronamespace
       where p.proname = 'ratelimit_version'
         and p.pronargs = 0
         and p.proowner = v_owner;
    exception
      when no_data_found or too_many_rows then
        raise exception 'the installed functions were not found'
          using errcode = '42883',
                detail  = 'Exactly one function ratelimit_version() should belong to the owner of schema ratelimit.',
                hint    = 'Restore its owner, or drop the copy.';
    end;
  end if;

  perform pg_catalog.set_config('ratelimit.preexisting',
    (select coalesce(pg_catalog.string_agg(p.oid::text, ','), '')
       from pg_catalog.pg_proc as p
      where p.pronamespace in (pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace, 'ratelimit'::pg_catalog.regnamespace)), true);
  perform pg_catalog.set_config('search_path', pg_catalog.quote_ident(v_home) || ', pg_temp', true);
end;
$prologue$;


-- Private: the rules, each in one place.
-- The clock of every decision, and of the rows that are due for clean-up. Only the deadline of clean-up uses
-- clock_timestamp() directly. The function is inlined, and so costs nothing, because it has neither SET nor
-- SECURITY DEFINER and declares the volatility of clock_timestamp().
create or replace function ratelimit.clock()
  returns timestamptz
  language sql
  volatile
  parallel safe
as $$
  select clock_timestamp()
$$;
comment on function ratelimit.clock() is
  'The time every decision is made by: the server''s wall clock, never the transaction''s.';

-- The arithmetic of a bucket. Levels are whole microtokens and times whole microseconds, so every
-- answer is a function of integers. Products are numeric, which neither overflows nor rounds. Refill is credited
-- rounded down to whole microtokens, so each grant or refund loses less than one.
--
-- A bucket is (level, refilled_at): at the instant refilled_at it held level microtokens. Refill is
-- credited at ticks, which are counted from refilled_at, and never above full_level. A tick is a
-- microsecond when refill is continuous, and the whole interval when it is stepped.
--
-- The derived columns of policies hold what the formulas need; each has a comment. The formulas are
--   gain       = refill * 10^12. Elapsed seconds * gain / every_us = microtokens; the extra 10^6 saves
--                converting seconds
--   tick_gain  = refill * 10^6 * tick_us. One tick gains tick_gain / every_us microtokens
--   round_up   = tick_gain - 1. (x + round_up) div tick_gain = x / tick_gain, rounded up
--
-- All functions here are single expressions, and IMMUTABLE but for due_after, so that the planner inlines them. An argument that
-- is used twice must be cheap, such as a column, a variable or a product, or it stops inlining.

create or replace function ratelimit.microtokens(tokens bigint)
  returns bigint language sql immutable parallel safe
as $$
  select tokens * 1000000
$$;
comment on function ratelimit.microtokens(bigint) is
  'Tokens as microtokens, the unit of levels.';

create or replace function ratelimit.whole_tokens(level bigint)
  returns bigint language sql immutable parallel safe
as $$
  select level / 1000000 - (level % 1000000 < 0)::integer  -- rounds down below zero too
$$;
comment on function ratelimit.whole_tokens(bigint) is
  'A level in whole tokens, rounded down.';

-- A short form of whole_tokens: it costs less.
create or replace function ratelimit.tokens_above_debt(level bigint)
  returns bigint language sql immutable parallel safe
as $$
  select level / 1000000
$$;
comment on function ratelimit.tokens_above_debt(bigint) is
  'A level that is not below zero in whole tokens, rounded down.';

-- Another short form: one division, since below zero the remainder need not be looked at.
create or replace function ratelimit.tokens_in_debt(level bigint)
  returns bigint language sql immutable parallel safe
as $$
  select (level - 999999) / 1000000
$$;
comment on function ratelimit.tokens_in_debt(bigint) is
  'A level below zero in whole tokens, rounded down.';

create or replace function ratelimit.repeats(remaining bigint, charge bigint)
  returns bigint language sql immutable parallel safe
as $$
  select remaining / charge - (remaining % charge < 0)::integer  -- rounds down below zero too
$$;
comment on function ratelimit.repeats(bigint, bigint) is
  'How often the tokens that remain cover a charge once more.';

create or replace function ratelimit.microseconds(span interval)
  returns numeric language sql immutable parallel safe
as $$
  select extract(epoch from span) * 1000000
$$;
comment on function ratelimit.microseconds(interval) is
  'An interval without months in microseconds; a day is 24 hours.';

-- The interval has hours and seconds but no days, because a day added to a timestamptz may be 23 or 25 hours.
create or replace function ratelimit.duration(microseconds bigint)
  returns interval language sql immutable parallel safe
as $$
  select make_interval(hours => (microseconds / 3600000000)::integer,
                       secs  => (microseconds % 3600000000)::double precision / 1000000)
$$;
comment on function ratelimit.duration(bigint) is
  'Microseconds as an interval, exactly.';

-- A short form of duration. Double precision has whole microseconds exactly up to 285 years.
create or replace function ratelimit.short_duration(microseconds double precision)
  returns interval language sql immutable parallel safe
as $$
  select microseconds * interval '1 microsecond'
$$;
comment on function ratelimit.short_duration(double precision) is
  'Microseconds as an interval, exactly, for 285 years at most.';

-- Elapsed time is never negative: a clock that steps back credits and removes nothing.
create or replace function ratelimit.refilled_until(refilled_at timestamptz, now timestamptz, tick interval)
  returns timestamptz language sql immutable parallel safe
as $$
  select date_bin(tick, greatest(refilled_at, now), refilled_at)
$$;
comment on function ratelimit.refilled_until(timestamptz, timestamptz, interval) is
  'The instant of refilled: the last tick by now, counted from refilled_at and never before it.';

create or replace function ratelimit.refilled(level bigint, refilled_at timestamptz, now timestamptz, policy ratelimit.policies)
  returns bigint language sql immutable parallel safe
as $$
  select least(
    policy.full_level,
    level + div(extract(epoch from ratelimit.refilled_until(refilled_at, now, policy.tick) - refilled_at) * policy.gain, policy.every_us))::bigint
$$;
comment on function ratelimit.refilled(bigint, timestamptz, timestamptz, ratelimit.policies) is
  'The level of a bucket now, in microtokens.';

-- Exact: after this time the bucket holds target, one microsecond earlier it does not.
-- Precondition: the bucket is below target now.
create or replace function ratelimit.time_below(
    target numeric, level bigint, elapsed_us numeric,
    every_us numeric, tick_us numeric, tick_gain numeric, round_up numeric)
  returns numeric language sql immutable parallel safe
as $$
  select div((target - level) * every_us + round_up, tick_gain) * tick_us - elapsed_us
$$;
comment on function ratelimit.time_below(numeric, bigint, numeric, numeric, numeric, numeric, numeric) is
  'Microseconds until a bucket holds target microtokens, if it held level elapsed_us ago and is below target now.';

-- For a bucket whose debt is no deeper than the floor of its policy: it is full within 21,000 years, so nothing saturates.
-- Callers that know this, and that the bucket is below target, skip the checks of wait_until. Null means never: with refill 0,
-- tick_gain is 0.
create or replace function ratelimit.short_wait(target numeric, level bigint, elapsed_us numeric, policy ratelimit.policies)
  returns bigint language sql immutable parallel safe
as $$
  select ratelimit.time_below(target, level, elapsed_us, policy.every_us, policy.tick_us, nullif(policy.tick_gain, 0), policy.round_up)::bigint
$$;
comment on function ratelimit.short_wait(numeric, bigint, numeric, ratelimit.policies) is
  'Microseconds as of time_below for a bucket whose debt is no deeper than the floor, null for never.';

-- Times saturate here, at 100,000 years of 365.25 days: an old debt may be of a policy that refilled faster.
create or replace function ratelimit.wait_for(
    target numeric, level bigint, refilled_at timestamptz, now timestamptz,
    every_us numeric, tick_us numeric, tick_gain numeric, round_up numeric)
  returns bigint language sql immutable parallel safe
as $$
  select case
    when level >= target then 0
    when tick_gain > 0 then greatest(0, least(ratelimit.time_below(target, level, ratelimit.microseconds(now - refilled_at),
                                                                   every_us, tick_us, tick_gain, round_up),
                                              3155760000000000000))::bigint
  end
$$;
comment on function ratelimit.wait_for(numeric, bigint, timestamptz, timestamptz, numeric, numeric, numeric, numeric) is
  'Microseconds from now until a bucket holds target microtokens, zero when it does, null for never.';

create or replace function ratelimit.wait_until(target numeric, level bigint, refilled_at timestamptz, now timestamptz, policy ratelimit.policies)
  returns bigint language sql immutable parallel safe
as $$
  select ratelimit.wait_for(target, level, refilled_at, now, policy.every_us, policy.tick_us, policy.tick_gain, policy.round_up)
$$;
comment on function ratelimit.wait_until(numeric, bigint, timestamptz, timestamptz, ratelimit.policies) is
  'Microseconds from now until a bucket of a policy holds target microtokens, zero when it does, null for never.';

-- When clean-up looks at a new bucket; cleanup_batch.sql says why within 24 hours. Least ignores null, which is never.
create or replace function ratelimit.due_after(reset_us bigint, now timestamptz)
  returns timestamptz language sql stable parallel safe
as $$
  select now + least(ratelimit.duration(reset_us), interval '24 hours')
$$;
comment on function ratelimit.due_after(bigint, timestamptz) is
  'When clean-up looks at a bucket that is full in reset_us microseconds; null is never.';

-- refilled and wait_until in bigint, which is cheaper, for statements about many buckets of one policy.
-- A policy's numbers are small if no product overflows, and an empty bucket is full within 15 years. One tick gains
-- gain / per microtokens: tick_gain / every_us in lowest terms. ticks of them fill an empty bucket twice over: a bucket in deeper
-- debt than its capacity is left to refilled, by decide_in_order. date_part rounds to whole microseconds correctly for 35 years; beyond, ticks is less.
-- With refill 0, gain is 0 and ticks is null.
create or replace function ratelimit.refilled_level_small(
    level bigint, refilled_at timestamptz, now timestamptz, full_level bigint, gain bigint, per bigint, ticks bigint, tick_us bigint, tick interval)
  returns bigint language sql immutable parallel safe
as $$
  select least(
    full_level,
    least(level, full_level) + least((date_part('epoch', ratelimit.refilled_until(refilled_at, now, tick) - refilled_at) * 1000000)::bigint / tick_us, ticks) * gain / per)
$$;
comment on function ratelimit.refilled_level_small(bigint, timestamptz, timestamptz, bigint, bigint, bigint, bigint, bigint, interval) is
  'The level of a bucket now, for a policy of small numbers.';

create or replace function ratelimit.wait_below_small(target bigint, level bigint, elapsed_us bigint, gain bigint, per bigint, tick_us bigint)
  returns bigint language sql immutable parallel safe
as $$
  select ((target - level) * per + gain - 1) / nullif(gain, 0) * tick_us - elapsed_us
$$;
comment on function ratelimit.wait_below_small(bigint, bigint, bigint, bigint, bigint, bigint) is
  'Microseconds until a bucket below target holds it, for a policy of small numbers.';

create or replace function ratelimit.deepest_debt()
  returns bigint language sql immutable parallel safe
as $$
  select 9000000000000000000
$$;
comment on function ratelimit.deepest_debt() is
  'The debt below which the floor of no policy lies, in microtokens.';

-- Debt ends at the floor: 9 * 10^12 tokens, or what the bucket refills in 10,000 years of 365.25 days, if that is less. With
-- refill 0, gain is 0.
create or replace function ratelimit.floor_level(gain numeric, every_us numeric)
  returns numeric language sql immutable parallel safe
as $$
  select -least(ratelimit.deepest_debt(), div(nullif(gain, 0) * 315576000000, every_us))  -- least ignores null
$$;
comment on function ratelimit.floor_level(numeric, numeric) is
  'The level that no charge goes below, in microtokens.';

-- The sum is numeric until it is known to fit. A level below the floor is the debt of an earlier policy, which stays.
create or replace function ratelimit.moved_level(level bigint, change bigint, full_level numeric, floor_level numeric)
  returns bigint language sql immutable parallel safe
as $$
  select greatest(least(full_level, level::numeric + change), least(level, floor_level))::bigint
$$;
comment on function ratelimit.moved_level(bigint, bigint, numeric, numeric) is
  'A level after a change that nothing refuses: up to full at most, and down to the floor.';

-- The checks of arguments. Every error has a constant message, the facts in DETAIL and the remedy in HINT.

create or replace function ratelimit.counted(n numeric, noun text)
  returns text language sql immutable parallel safe
as $$
  select n::text || text ' ' || noun || case when n = numeric '1' then '' else 's' end
$$;
comment on function ratelimit.counted(numeric, text) is
  'A number with its noun, which has an s unless there is one.';

create or replace function ratelimit.refuse(argument text, fact text, remedy text)
  returns void language plpgsql
as $$
begin
  raise exception using
    errcode = '22023',
    message = 'invalid ' || argument,
    detail  = format('%s is %s.', argument, coalesce(fact, 'null')),
    hint    = remedy;
end;
$$;
comment on function ratelimit.refuse(text, text, text) is
  'Raises 22023 for one argument.';

create or replace function ratelimit.refuse_read_only()
  returns void language plpgsql
as $$
begin
  raise exception 'cannot write in a read-only transaction'
    using errcode = '25006',
          detail  = case when pg_is_in_recovery() then 'This server is a standby.'
                         else format('default_transaction_read_only is %s.', current_setting('default_transaction_read_only')) end,
          hint    = 'Call it on the primary, in a read-write transaction. ratelimit_peek works here, on a standby for durable policies.';
end;
$$;
comment on function ratelimit.refuse_read_only() is
  'Raises 25006 with what helps, where a statement that writes would show its SQL.';

create or replace function ratelimit.is_name(value text)
  returns boolean language sql immutable parallel safe
as $$
  select octet_length(value) between 1 and 512
$$;
comment on function ratelimit.is_name(text) is
  'Whether a policy, key or idempotency key has 1 to 512 bytes; null for null.';

create or replace function ratelimit.is_list(elements anyarray)
  returns boolean language sql immutable parallel safe
as $$
  select array_lower(elements, 1) = 1 and array_ndims(elements) = 1
$$;
comment on function ratelimit.is_list(anyarray) is
  'Whether an array has one dimension and is subscripted from 1; null for an empty one and for null.';

create or replace function ratelimit.check_name(argument text, value text)
  returns void language plpgsql
as $$
begin
  if ratelimit.is_name(value) is not true then
    perform ratelimit.refuse(argument,
      case when value is null then null when value = '' then 'empty' else octet_length(value) || ' bytes long' end,
      'Pass a text of 1 to 512 bytes.');
  end if;
end;
$$;
comment on function ratelimit.check_name(text, text) is
  'Raises 22023 unless a policy, key, idempotency key or holder has 1 to 512 bytes.';

create or replace function ratelimit.check_tokens(argument text, value bigint)
  returns void language plpgsql
as $$
begin
  if (value >= 0) is not true then
    perform ratelimit.refuse(argument, value::text,
      case argument
        when 'cost' then 'Pass a whole number of tokens, 0 or more; ratelimit_refund gives tokens back.'
        else 'Pass a whole number of tokens, 0 or more.'
      end);
  end if;
end;
$$;
comment on function ratelimit.check_tokens(text, bigint) is
  'Raises 22023 unless a cost or amount is zero or more.';

-- Inlined, unlike check_request: a valid request pays for no call.
create or replace function ratelimit.acceptable(key text, cost bigint)
  returns boolean language sql immutable parallel safe
as $$
  select (ratelimit.is_name(key) and cost >= 0) is true
$$;
comment on function ratelimit.acceptable(text, bigint) is
  'Whether check_request would accept this key and cost.';

create or replace function ratelimit.check_request(policy text, key text, cost bigint, idempotency_key text)
  returns void language plpgsql
as $$
begin
  perform ratelimit.check_name('policy', policy);
  perform ratelimit.check_name('key', key);
  perform ratelimit.check_tokens('cost', cost);
  if idempotency_key is not null then
    perform ratelimit.check_name('idempotency_key', idempotency_key);
  end if;
end;
$$;
comment on function ratelimit.check_request(text, text, bigint, text) is
  'Raises 22023 for the first argument of an acquire that is out of range.';

create or replace function ratelimit.check_charge(policy text, key text, cost bigint, idempotency_key text)
  returns void language plpgsql
as $$
begin
  perform ratelimit.check_request(policy, key, cost, idempotency_key);
  if cost > 9000000000000 then
    perform ratelimit.refuse('cost', cost::text, 'Pass 0 to 9000000000000 tokens.');
  end if;
end;
$$;
comment on function ratelimit.check_charge(text, text, bigint, text) is
  'Raises 22023 for the first argument of a charge or a settlement that is out of range.';

-- The length of months and years is not fixed.
create or replace function ratelimit.is_max_wait(max_wait interval)
  returns boolean language sql immutable parallel safe
as $$
  select max_wait between interval '0' and interval '365 days'
         and date_trunc('month', max_wait) = interval '0'
$$;
comment on function ratelimit.is_max_wait(interval) is
  'Whether a wait is fixed in length, and 365 days at most; null for null.';

create or replace function ratelimit.check_max_wait(max_wait interval)
  returns void language plpgsql
as $$
begin
  if ratelimit.is_max_wait(max_wait) is not true then
    perform ratelimit.refuse('max_wait', max_wait::text,
      'Pass an interval of 0 to 365 days, in days or smaller units.');
  end if;
end;
$$;
comment on function ratelimit.check_max_wait(interval) is
  'Raises 22023 unless a wait is fixed in length, and 365 days at most.';

create or replace function ratelimit.check_bounds(at_most bigint, at_least bigint)
  returns void language plpgsql
as $$
begin
  if (at_most >= 1) is not true then
    perform ratelimit.refuse('at_most', at_most::text, 'Pass a whole number of tokens, 1 or more.');
  elsif (at_least between 1 and at_most) is not true then
    perform ratelimit.refuse('at_least', at_least::text, 'Pass a whole number of tokens, from 1 to at_most.');
  end if;
end;
$$;
comment on function ratelimit.check_bounds(bigint, bigint) is
  'Raises 22023 unless 1 <= at_least <= at_most.';

create or replace function ratelimit.check_hold(policy text, key text, holder text, cost bigint)
  returns void language plpgsql
as $$
begin
  perform ratelimit.check_name('policy', policy);
  perform ratelimit.check_name('key', key);
  perform ratelimit.check_name('holder', holder);
  if (cost >= 1) is not true then
    perform ratelimit.refuse('cost', cost::text, 'Pass a whole number of slots, 1 or more; ratelimit_release gives them back.');
  end if;
end;
$$;
comment on function ratelimit.check_hold(text, text, text, bigint) is
  'Raises 22023 for the first argument about a holder that is out of range.';

create or replace function ratelimit.check_max_rows(max_rows integer)
  returns void language plpgsql
as $$
begin
  if (max_rows > 0) is not true then
    perform ratelimit.refuse('max_rows', max_rows::text, 'Pass 1 or more.');
  end if;
end;
$$;
comment on function ratelimit.check_max_rows(integer) is
  'Raises 22023 unless a number of rows is one or more.';

create or replace function ratelimit.check_length(argument text, length integer, expected integer)
  returns void language plpgsql
as $$
begin
  if length is null or length is distinct from expected then
    perform ratelimit.refuse(argument, ratelimit.counted(length, 'element') || ' long, policies ' || expected,
      'Pass arrays of one length: element n of each is request n.');
  end if;
end;
$$;
comment on function ratelimit.check_length(text, integer, integer) is
  'Raises 22023 unless an array has an element for each request.';

create or replace function ratelimit.check_sizes(sizes integer[], length integer, idempotency_keys integer)
  returns void language plpgsql
as $$
begin
  if (0 <= all (sizes)) is not true then
    perform ratelimit.refuse('sizes', 'below zero or null for a request', 'Pass the number of elements of each request.');
  elsif (select coalesce(sum(s.size), 0) from unnest(sizes) as s (size)) <> length then
    perform ratelimit.refuse('sizes', format('%s in sum, policies %s long', (select sum(s.size) from unnest(sizes) as s (size)), ratelimit.counted(length, 'element')),
      'Pass the number of elements of each request.');
  elsif idempotency_keys <> cardinality(sizes) then
    perform ratelimit.refuse('idempotency_keys', format('%s long, sizes %s', ratelimit.counted(idempotency_keys, 'element'), cardinality(sizes)),
      'Pass one idempotency key, or null, for each request.');
  end if;
end;
$$;
comment on function ratelimit.check_sizes(integer[], integer, integer) is
  'Raises 22023 unless sizes splits length elements into requests, and there are as many idempotency keys, if any.';

-- Months and years are refused, because their length is not fixed. The limit of 1000 years counts a year as
-- 365.25 days of 24 hours.
create or replace function ratelimit.check_span(argument text, value interval)
  returns void language plpgsql
as $$
begin
  if value is null
     or not isfinite(value)
     or extract(year from value) <> 0
     or extract(month from value) <> 0
     or ratelimit.microseconds(value) not between 1 and ratelimit.microseconds(interval '365250 days') then
    perform ratelimit.refuse(argument, value::text,
      'Pass an interval of 1 microsecond to 365250 days (1000 years), in days or smaller units.');
  end if;
end;
$$;
comment on function ratelimit.check_span(text, interval) is
  'Raises 22023 unless an interval is fixed in length and between 1 microsecond and 1000 years.';

create or replace function ratelimit.check_numbers(capacity bigint, refill bigint, every interval)
  returns void language plpgsql
as $$
declare
  v_missing constant text := 'A new policy needs capacity, refill and every, or capacity and period, or capacity and lease.';
begin
  if (capacity between 0 and 9000000000000) is not true then
    perform ratelimit.refuse('capacity', capacity::text,
      case when capacity is null then v_missing else 'Pass 0 to 9000000000000 tokens.' end);
  end if;
  if (refill between 0 and 9000000000000) is not true then
    perform ratelimit.refuse('refill', refill::text, case when refill is null then v_missing else 'Pass 0 to 9000000000000 tokens.' end);
  end if;
  if every is null then
    perform ratelimit.refuse('every', null, v_missing);
  end if;
  perform ratelimit.check_span('every', every);
  if refill > 0 and capacity * ratelimit.microseconds(every) > refill * ratelimit.microseconds(interval '3652500 days') then
    perform ratelimit.refuse('refill', refill || ' every ' || every,
      'Refill faster or lower the capacity: an empty bucket must fill within 10000 years. Or pass refill 0: it fills when it is reset.');
  end if;
end;
$$;
comment on function ratelimit.check_numbers(bigint, bigint, interval) is
  'Raises 22023 for the first number of a policy or an override that is missing or out of range.';

create or replace function ratelimit.check_policy(capacity bigint, refill bigint, every interval, remember interval)
  returns void language plpgsql
as $$
begin
  perform ratelimit.check_numbers(capacity, refill, every);
  if remember is not null then
    perform ratelimit.check_span('remember', remember);
  end if;
end;
$$;
comment on function ratelimit.check_policy(bigint, bigint, interval, interval) is
  'Raises 22023 for the first argument of a policy definition that is missing or out of range.';

-- A quota has a calendar in place of refill, every and stepped.
create or replace function ratelimit.check_calendar(refill bigint, every interval, stepped boolean, period interval, time_zone text, anchor timestamp)
  returns void language plpgsql
as $$
declare
  v_only_quotas constant text := 'Only a quota has a calendar. Leave it out, or drop the policy and define it anew with a period.';
  v_no_refill   constant text := 'A quota is full at each turn of its calendar and gains nothing in between. Leave it out, or drop the policy and define it anew.';
  v_months      integer;
  v_time_zone   text collate "C" := coalesce(time_zone, 'UTC');  -- null: that of the policy, which was checked
begin
  if period is null then
    if time_zone is not null then
      perform ratelimit.refuse('time_zone', time_zone, v_only_quotas);
    elsif anchor is not null then
      perform ratelimit.refuse('anchor', anchor::text, v_only_quotas);
    end if;
    return;
  end if;
  if refill is not null then
    perform ratelimit.refuse('refill', refill::text, v_no_refill);
  elsif every is not null then
    perform ratelimit.refuse('every', every::text, v_no_refill);
  elsif stepped is not null then
    perform ratelimit.refuse('stepped', stepped::text, v_no_refill);
  end if;
  v_months := case when isfinite(period) then extract(year from period)::integer * 12 + extract(month from period)::integer end;
  if (isfinite(period) and (v_months = 0 and period = make_interval(days => extract(day from period)::integer)
                                         and extract(day from period) between 1 and 365250
                            or period = make_interval(months => v_months) and extract(day from period) = 0
                                         and v_months between 1 and 12000)) is not true then
    perform ratelimit.refuse('period', period::text, 'Pass whole days or whole months, such as ''7 days'', ''1 month'' or ''1 year'', of 1 day to 1000 years.');
  elsif v_time_zone <> 'UTC' and (v_time_zone !~ '/' or v_time_zone ~ '^(posix|right)/' or not exists (select from pg_catalog.pg_timezone_names as z where z.name = v_time_zone)) then
    perform ratelimit.refuse('time_zone', time_zone, 'Pass ''UTC'', or a name with a slash that pg_timezone_names lists, such as ''Europe/Berlin''.');
  elsif (extract(year from anchor) between 1 and 9999) is not true or anchor < timestamp '0001-01-01' then
    perform ratelimit.refuse('anchor', anchor::text, 'Pass a local time of the years 1 to 9999, such as ''2024-01-31 00:00''.');
  end if;
end;
$$;
comment on function ratelimit.check_calendar(bigint, interval, boolean, interval, text, timestamp) is
  'Raises 22023 for the first argument of a quota that is out of range, or that a policy of another kind has.';

-- A policy with a lease lends slots in place of tokens.
create or replace function ratelimit.check_lease(capacity bigint, least_capacity bigint, lease interval)
  returns void language plpgsql
as $$
begin
  if (capacity between least_capacity and 10000) is not true then
    perform ratelimit.refuse('capacity', capacity::text,
      case when capacity is null then 'A new policy needs capacity, refill and every, or capacity and period, or capacity and lease.'
           else format('Pass %s to 10000 slots.', least_capacity) end);
  elsif (isfinite(lease) and date_trunc('month', lease) = interval '0'
         and lease between interval '1 millisecond' and interval '365250 days') is not true then
    perform ratelimit.refuse('lease', lease::text, 'Pass an interval of 1 millisecond to 365250 days (1000 years), in days or smaller units.');
  end if;
end;
$$;
comment on function ratelimit.check_lease(bigint, bigint, interval) is
  'Raises 22023 unless there can be so many slots of a key, and such a lease.';

create or replace function ratelimit.check_only_slots(
    refill bigint, every interval, stepped boolean, remember interval, period interval, time_zone text, anchor timestamp)
  returns void language plpgsql
as $$
declare
  v_remedy constant text := 'Slots come back by ratelimit_release, or when the lease ends. Leave it out, or drop the policy and define it anew without a lease.';
begin
  if refill is not null then
    perform ratelimit.refuse('refill', refill::text, v_remedy);
  elsif every is not null then
    perform ratelimit.refuse('every', every::text, v_remedy);
  elsif stepped is not null then
    perform ratelimit.refuse('stepped', stepped::text, v_remedy);
  elsif remember is not null then
    perform ratelimit.refuse('remember', remember::text, 'A lease is known by its holder, and no idempotency key is remembered. Leave it out.');
  elsif period is not null then
    perform ratelimit.refuse('period', period::text, v_remedy);
  elsif time_zone is not null then
    perform ratelimit.refuse('time_zone', time_zone, v_remedy);
  elsif anchor is not null then
    perform ratelimit.refuse('anchor', anchor::text, v_remedy);
  end if;
end;
$$;
comment on function ratelimit.check_only_slots(bigint, interval, boolean, interval, interval, text, timestamp) is
  'Raises 22023 for the first argument that a policy of slots cannot have.';

create or replace function ratelimit.refuse_slots(policy text)
  returns void language plpgsql
as $$
begin
  raise exception 'invalid policy' using
    errcode = '22023',
    detail  = format('Policy %L lends slots: it has a lease, and no tokens.', policy),
    hint    = 'Call ratelimit_hold, ratelimit_renew and ratelimit_release; ratelimit_peek shows what is free.';
end;
$$;
comment on function ratelimit.refuse_slots(text) is
  'Raises 22023 where a policy of tokens is needed.';

create or replace function ratelimit.refuse_tokens(policy text)
  returns void language plpgsql
as $$
begin
  raise exception 'invalid policy' using
    errcode = '22023',
    detail  = format('Policy %L has tokens, and lends no slots.', policy),
    hint    = 'Call ratelimit_acquire, or define another policy with a lease: select ratelimit_define_policy(''jobs'', capacity => 5, lease => ''5 minutes'').';
end;
$$;
comment on function ratelimit.refuse_tokens(text) is
  'Raises 22023 where a policy of slots is needed.';

create or replace function ratelimit.unknown_policy(policy text)
  returns void language plpgsql
as $$
begin
  raise exception 'unknown policy' using
    errcode = 'RL001',
    detail  = format('No policy is named %L.', policy),
    hint    = format('Names are case-sensitive, and ratelimit_policies() lists them. Define a new one first: select ratelimit_define_policy(%L, capacity => 10, refill => 10, every => ''1 second'').', policy);
end;
$$;
comment on function ratelimit.unknown_policy(text) is
  'Raises RL001, the error for an unknown policy.';

create or replace function ratelimit.unknown_slots(policy text)
  returns void language plpgsql
as $$
begin
  raise exception 'unknown policy' using
    errcode = 'RL001',
    detail  = format('No policy is named %L.', policy),
    hint    = format('Names are case-sensitive, and ratelimit_policies() lists them. Define a new one first: select ratelimit_define_policy(%L, capacity => 5, lease => ''5 minutes'').', policy);
end;
$$;
comment on function ratelimit.unknown_slots(text) is
  'Raises RL001, the error for an unknown policy whose slots are asked for.';

create or replace function ratelimit.no_grant(policy text, idempotency_key text)
  returns void language plpgsql
as $$
begin
  raise exception 'no live grant under this idempotency key' using
    errcode = 'RL003',
    detail  = format('Policy %L does not remember %L for this bucket. Nothing was charged.', policy, idempotency_key),
    hint    = 'An acquire that was denied or rolled back leaves nothing to settle. A job may take longer than the policy remembers: '
              'ratelimit_define_policy(policy, remember => ''7 days'').';
end;
$$;
comment on function ratelimit.no_grant(text, text) is
  'Raises RL003, the error of a settlement without a grant.';

create or replace function ratelimit.another_cost(
    fact text, remedy text default 'Repeat a request with its first cost, and give a new request a new key.')
  returns void language plpgsql immutable
as $$
begin
  raise exception 'idempotency key used before with another cost' using
    errcode = 'RL002',
    detail  = fact,
    hint    = remedy;
end;
$$;
comment on function ratelimit.another_cost(text, text) is
  'Raises RL002, the error for another cost under a live idempotency key.';

create or replace function ratelimit.held_with_another_cost(holder text, held bigint, cost bigint)
  returns void language plpgsql immutable
as $$
begin
  raise exception 'the holder holds with another cost' using
    errcode = 'RL002',
    detail  = format('%L holds %s and is asked to hold %s.', holder, ratelimit.counted(held, 'slot'), cost),
    hint    = 'Repeat a request with its first cost. Give each attempt a holder of its own.';
end;
$$;
comment on function ratelimit.held_with_another_cost(text, bigint, bigint) is
  'Raises RL002, the error for a holder that holds with another cost.';

-- ratelimit_charge does not raise RL004: its repeat is answered again.
create or replace function ratelimit.refuse_repeat(granted ratelimit.idempotency_keys, cost bigint)
  returns void language plpgsql immutable
as $$
begin
  if granted.cost <> cost then
    perform ratelimit.another_cost(format('%L was granted with cost %s and is requested again with cost %s.',
                                          granted.idempotency_key, granted.cost, cost));
  end if;
  raise exception 'the grant under this idempotency key was settled' using
    errcode = 'RL004',
    detail  = format('%L was granted with cost %s and settled with cost %s.', granted.idempotency_key, granted.cost, granted.settled),
    hint    = 'The operation is over, or was cancelled: do not repeat it. A new one needs a new key.';
end;
$$;
comment on function ratelimit.refuse_repeat(ratelimit.idempotency_keys, bigint) is
  'Raises RL002 for a repeat with another cost than the grant under its idempotency key, or else RL004: the grant was settled.';

create or replace function ratelimit.too_many_rounds(policy text, key text)
  returns void language plpgsql
as $$
begin
  raise exception 'the bucket changed at every look'
    using errcode = '40001',
          detail  = format('Key %L of policy %L.', key, policy),
          hint    = 'Try again.';
end;
$$;
comment on function ratelimit.too_many_rounds(text, text) is
  'Raises 40001: other sessions were faster a thousand times.';

create or replace function ratelimit.policy_named(policy text)
  returns ratelimit.policies language plpgsql stable
as $$
declare
  v_name   text collate "C" := policy_named.policy;
  v_policy ratelimit.policies;
begin
  perform ratelimit.check_name('policy', v_name);
  select p.* into v_policy from ratelimit.policies as p where p.name = v_name;
  if not found then
    perform ratelimit.unknown_policy(v_name);
  end if;
  return v_policy;
end;
$$;
comment on function ratelimit.policy_named(text) is
  'One policy by name, or RL001.';

-- A short form of answer_of: after a grant, retry_after is 0 and the level is not below 0.
create or replace function ratelimit.grant_of(level bigint, reset_us bigint, capacity bigint)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (true, ratelimit.tokens_above_debt(level), interval '0', ratelimit.duration(reset_us), capacity, false, false)::ratelimit.decision
$$;
comment on function ratelimit.grant_of(bigint, bigint, bigint) is
  'The decision of a grant, from the level that it left and the microseconds until the bucket is full.';

create or replace function ratelimit.answer_of(level bigint, retry_us bigint, reset_us bigint, capacity bigint)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (coalesce(retry_us = 0, false), ratelimit.whole_tokens(level), ratelimit.duration(retry_us),
          ratelimit.duration(reset_us), capacity, false, false)::ratelimit.decision
$$;
comment on function ratelimit.answer_of(bigint, bigint, bigint, bigint) is
  'A decision from the level now, retry_us (0 means allowed, null means never) and reset_us.';

create or replace function ratelimit.shadow_of(level bigint, reset_us bigint, capacity bigint)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (true, ratelimit.whole_tokens(level), interval '0', ratelimit.duration(reset_us), capacity, false, true)::ratelimit.decision
$$;
comment on function ratelimit.shadow_of(bigint, bigint, bigint) is
  'The decision of a shadow policy that would deny if it were enforced.';

create or replace function ratelimit.spent_of(level bigint, reset_us bigint, capacity bigint, replayed boolean)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (true, ratelimit.whole_tokens(level), interval '0', ratelimit.duration(reset_us), capacity, replayed, false)::ratelimit.decision
$$;
comment on function ratelimit.spent_of(bigint, bigint, bigint, boolean) is
  'The decision of what nothing refuses: a charge or a settlement.';

create or replace function ratelimit.replay_of(granted ratelimit.idempotency_keys)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (true, granted.remaining, interval '0', granted.reset_after, granted.capacity, true, false)::ratelimit.decision
$$;
comment on function ratelimit.replay_of(ratelimit.idempotency_keys) is
  'The first answer given under an idempotency key, marked replayed.';

create or replace function ratelimit.left_us(granted ratelimit.idempotency_keys, now timestamptz)
  returns bigint language sql immutable parallel safe
as $$
  select case when granted.ready_at > now then ratelimit.microseconds(granted.ready_at - now)::bigint else 0 end
$$;
comment on function ratelimit.left_us(ratelimit.idempotency_keys, timestamptz) is
  'The microseconds that a reserved grant is still to wait.';

-- A reserved grant is a denial with the rest of its wait, and then the grant.
create or replace function ratelimit.answer_again(granted ratelimit.idempotency_keys, cost bigint, now timestamptz, shadow boolean)
  returns ratelimit.decision language plpgsql immutable
as $$
declare
  v_left_us bigint;
begin
  if granted.cost <> cost or granted.settled is not null then
    perform ratelimit.refuse_repeat(granted, cost);
  elsif granted.ready_at > now then
    v_left_us := case when shadow then 0 else ratelimit.left_us(granted, now) end;
    return (shadow, granted.remaining, ratelimit.duration(v_left_us),
            granted.reset_after, granted.capacity, true, shadow)::ratelimit.decision;
  end if;
  return ratelimit.replay_of(granted);
end;
$$;
comment on function ratelimit.answer_again(ratelimit.idempotency_keys, bigint, timestamptz, boolean) is
  'The answer to a repeat of a request under a live idempotency key; RL002 if its cost differs, RL004 if its grant was settled.';

create or replace function ratelimit.reservation_of(
    granted boolean, level bigint, wait_us bigint, reset_us bigint, capacity bigint, shadow boolean)
  returns ratelimit.reservation language sql immutable parallel safe
as $$
  select (granted or shadow, ratelimit.duration(case when shadow then 0 else wait_us end), ratelimit.whole_tokens(level),
          ratelimit.duration(reset_us), capacity, false, shadow and wait_us is distinct from 0)::ratelimit.reservation
$$;
comment on function ratelimit.reservation_of(boolean, bigint, bigint, bigint, bigint, boolean) is
  'The answer about a reservation, from the level now; wait_us is null for never.';

-- Short forms of reservation_of for grants: they cost less.
create or replace function ratelimit.reserved_of(level bigint, reset_us bigint, capacity bigint)
  returns ratelimit.reservation language sql immutable parallel safe
as $$
  select (true, interval '0', ratelimit.tokens_above_debt(level), ratelimit.duration(reset_us), capacity, false, false)::ratelimit.reservation
$$;
comment on function ratelimit.reserved_of(bigint, bigint, bigint) is
  'The answer about a reservation that need not wait, from the level that it left.';

create or replace function ratelimit.waiting_of(level bigint, wait_us double precision, reset_us bigint, capacity bigint, shadow boolean)
  returns ratelimit.reservation language sql immutable parallel safe
as $$
  select (true, case when shadow then interval '0' else ratelimit.short_duration(wait_us) end, ratelimit.tokens_in_debt(level),
          ratelimit.duration(reset_us), capacity, false, shadow)::ratelimit.reservation
$$;
comment on function ratelimit.waiting_of(bigint, double precision, bigint, bigint, boolean) is
  'The answer about a reservation that waits, from the debt that it left.';

create or replace function ratelimit.replayed_reservation(granted ratelimit.idempotency_keys, cost bigint, now timestamptz, shadow boolean)
  returns ratelimit.reservation language plpgsql immutable
as $$
declare
  v_replay ratelimit.decision := ratelimit.answer_again(granted, cost, now, shadow);
begin
  return (true, v_replay.retry_after, v_replay.remaining, v_replay.reset_after, v_replay.capacity, true, v_replay.shadowed)::ratelimit.reservation;
end;
$$;
comment on function ratelimit.replayed_reservation(ratelimit.idempotency_keys, bigint, timestamptz, boolean) is
  'The replay of a grant to a reservation, with the rest of its wait; or RL002 or RL004.';

create or replace function ratelimit.partial_of(decision ratelimit.decision, taken bigint)
  returns ratelimit.partial_decision language sql immutable parallel safe
as $$
  select (decision.allowed, decision.remaining, decision.retry_after, decision.reset_after, decision.capacity, decision.replayed,
          decision.shadowed, case when decision.allowed then taken else 0 end)::ratelimit.partial_decision
$$;
comment on function ratelimit.partial_of(ratelimit.decision, bigint) is
  'A decision about as many tokens as there are, and how many were taken.';

-- Not inlined, so that the argument is evaluated once.
create or replace function ratelimit.decision_of(answer ratelimit.partial_decision)
  returns ratelimit.decision language plpgsql immutable
as $$
begin
  return (answer.allowed, answer.remaining, answer.retry_after, answer.reset_after, answer.capacity, answer.replayed, answer.shadowed)::ratelimit.decision;
end;
$$;
comment on function ratelimit.decision_of(ratelimit.partial_decision) is
  'A decision about tokens that are all taken or none.';

create or replace function ratelimit.reservation_by(answer ratelimit.partial_decision)
  returns ratelimit.reservation language plpgsql immutable
as $$
begin
  return (answer.allowed, answer.retry_after, answer.remaining, answer.reset_after, answer.capacity, answer.replayed, answer.shadowed)::ratelimit.reservation;
end;
$$;
comment on function ratelimit.reservation_by(ratelimit.partial_decision) is
  'The answer about a reservation that is granted at once or not at all.';

create or replace function ratelimit.replayed_partial(
    granted ratelimit.idempotency_keys, at_least bigint, at_most bigint, now timestamptz, shadow boolean)
  returns ratelimit.partial_decision language plpgsql immutable
as $$
declare
  v_replay ratelimit.decision;
begin
  if granted.cost not between at_least and at_most and at_least < at_most then
    perform ratelimit.another_cost(format('%L was granted with cost %s and is requested again for %s to %s.',
                                          granted.idempotency_key, granted.cost, at_least, at_most));
  end if;
  v_replay := ratelimit.answer_again(granted, case when at_least = at_most then at_most else granted.cost end, now, shadow);
  return ratelimit.partial_of(v_replay, case when shadow then at_most else granted.cost end);
end;
$$;
comment on function ratelimit.replayed_partial(ratelimit.idempotency_keys, bigint, bigint, timestamptz, boolean) is
  'The replay of a grant of as many tokens as there were; RL002 if a repeat may not take so many, or RL004.';

-- decisions_of(...)[n] is the decision about element n; null if it was refused. The arguments are what acquire_batch answers.
create or replace function ratelimit.decisions_of(
    elements bigint[], remaining bigint[], retry_us bigint[], reset_us bigint[], capacity bigint[], replayed boolean[], shadowed boolean[])
  returns ratelimit.decision[] language plpgsql immutable
as $$
declare
  v_decisions ratelimit.decision[];
begin
  for n in 1..coalesce(cardinality(elements), 0) loop
    v_decisions[elements[n]] := (coalesce(retry_us[n] = 0, false), remaining[n], ratelimit.duration(retry_us[n]), ratelimit.duration(reset_us[n]),
                                 capacity[n], coalesce(replayed[n], false), coalesce(shadowed[n], false))::ratelimit.decision;
  end loop;
  return v_decisions;
end;
$$;
comment on function ratelimit.decisions_of(bigint[], bigint[], bigint[], bigint[], bigint[], boolean[], boolean[]) is
  'The decisions of a batch, by the number of the element.';

-- Of the elements of a request, the one with the least rank binds. A shadow ranks after all others, then an element of cost 0; of the
-- others, the fewest repeats of the charge rank first where the request is granted, and the longest wait where it is denied.
create or replace function ratelimit.binding_rank(
    shadow boolean, free boolean, granted boolean, remaining bigint, charge bigint, retry_us bigint, place bigint)
  returns bigint[] language sql immutable parallel safe
as $$
  select array[shadow::integer, free::integer,
               case when granted then ratelimit.repeats(remaining, nullif(charge, 0)) else -coalesce(retry_us, 9223372036854775807) end,
               place]
$$;
comment on function ratelimit.binding_rank(boolean, boolean, boolean, bigint, bigint, bigint, bigint) is
  'The rank of an element of a request: the least one binds.';

-- The functions that answer many requests report an error in the row of its request. So this function catches the
-- errors of the checks. granted is the remembered grant whose cost differs, or which was settled; null means that the policy
-- is unknown or lends slots, unless an argument is bad.
create or replace function ratelimit.refusal(
    in  policy text, in key text, in cost bigint, in idempotency_key text, in granted ratelimit.idempotency_keys,
    out error_code text, out error_message text, out error_detail text, out error_hint text)
  language plpgsql
as $$
begin
  perform ratelimit.check_request(policy, key, cost, idempotency_key);
  if granted is null then
    perform ratelimit.refuse_slots(p.name) from ratelimit.policies as p where p.name = refusal.policy collate "C" and (p.calendar).lease is not null;
    perform ratelimit.unknown_policy(policy);
  else
    perform ratelimit.refuse_repeat(granted, cost);
  end if;
exception when sqlstate '22023' or sqlstate 'RL001' or sqlstate 'RL002' or sqlstate 'RL004' then
  get stacked diagnostics error_code    = returned_sqlstate,
                          error_message = message_text,
                          error_detail  = pg_exception_detail,
                          error_hint    = pg_exception_hint;
end;
$$;
comment on function ratelimit.refusal(text, text, bigint, text, ratelimit.idempotency_keys) is
  'The error ratelimit_acquire would raise, as a row.';

-- An idempotency key belongs to the whole request, and the only element of a request needs no number.
create or replace function ratelimit.detail_of_element(error_message text, error_detail text, element bigint, elements bigint)
  returns text language plpgsql immutable
as $$
begin
  if elements = 1 or error_message = 'invalid idempotency_key' then
    return error_detail;
  end if;
  return format('Element %s of the request: %s', element, error_detail);
end;
$$;
comment on function ratelimit.detail_of_element(text, text, bigint, bigint) is
  'The DETAIL of an error about one element, with the number of the element if there are several.';

-- Quotas: buckets that are full at each turn of a calendar, and gain nothing in between.
--
-- Turn n is the anchor and n periods, a local time of the time zone, for every whole n. Each is counted from the anchor: a month after
-- 31 January is 28 February, and two months are 31 March. So nothing runs at a turn: a call finds out which turns are around it.
--
-- The row of a quota's bucket has a level of 0 microtokens or less: what was used, and not what is there. refilled_at is the last write. Nothing
-- is used if a turn lies after that. So another capacity keeps what was used, and another calendar fills nothing by itself.
--
-- Where a function reads the numbers of a quota, it passes their calendar through turning. For that a quota counts as overridden, and
-- as numbers that end: the code about neither is left as it is. Names are qualified: Citus calls the functions on other nodes.
--
-- The column has the lease of slots, too, which count as overridden and as numbers that end for the same reason: slots.sql.
create or replace function ratelimit.turning(calendar ratelimit.calendar, at timestamptz)
  returns ratelimit.calendar
  language plpgsql
  immutable
as $$
declare
  v_local timestamp := at at time zone calendar.time_zone;
  v_turn  integer;
begin
  -- The last turn by local time. It may be one off; the instants decide.
  v_turn := case
              when calendar.months > 0 then
                floor((12 * (date_part('year', v_local) - date_part('year', calendar.anchor))
                       + date_part('month', v_local) - date_part('month', calendar.anchor)) / calendar.months)
              else floor(date_part('epoch', v_local - calendar.anchor) / date_part('epoch', calendar.period))
            end::integer;
  loop
    calendar.turned_at := (calendar.anchor + v_turn * calendar.period) at time zone calendar.time_zone;
    calendar.turns_at  := (calendar.anchor + (v_turn + 1) * calendar.period) at time zone calendar.time_zone;
    exit when (at >= calendar.turned_at and at < calendar.turns_at) is not false;  -- null without a period
    v_turn := v_turn + case when at < calendar.turned_at then -1 else 1 end;
  end loop;
  return calendar;
end;
$$;
comment on function ratelimit.turning(ratelimit.calendar, timestamptz) is
  'A calendar with the turns around an instant: the last one not after it, and the next one.';

create or replace function ratelimit.with_turns(policy ratelimit.policies, at timestamptz)
  returns ratelimit.policies
  language plpgsql
  immutable
as $$
begin
  if (policy.calendar).period is not null then
    policy.calendar := ratelimit.turning(policy.calendar, at);
  end if;
  return policy;
end;
$$;
comment on function ratelimit.with_turns(ratelimit.policies, timestamptz) is
  'A policy with the turns around an instant, if it is a quota.';

create or replace function ratelimit.with_calendar(calendar ratelimit.calendar, override ratelimit.calendar, expires_at timestamptz)
  returns ratelimit.calendar language sql immutable parallel safe
as $$
  select row(coalesce(nullif(expires_at, 'infinity'), calendar.ends_at), calendar.overridden, calendar.period, calendar.months,
             override.time_zone, override.anchor, null, null, override.lease)::ratelimit.calendar
$$;
comment on function ratelimit.with_calendar(ratelimit.calendar, ratelimit.calendar, timestamptz) is
  'The calendar of a policy for a key that has an override.';

create or replace function ratelimit.used_level(level bigint, refilled_at timestamptz, turned_at timestamptz)
  returns bigint language sql immutable parallel safe
as $$
  select case when refilled_at < turned_at then 0 else level end
$$;
comment on function ratelimit.used_level(bigint, timestamptz, timestamptz) is
  'The stored level of a quota''s bucket now: what is used of the period that runs, in microtokens, as 0 or less.';

create or replace function ratelimit.level_now(level bigint, refilled_at timestamptz, now timestamptz, numbers ratelimit.policies)
  returns bigint language sql immutable parallel safe
as $$
  select case
    when (numbers.calendar).period is null then ratelimit.refilled(level, refilled_at, now, numbers)
    else numbers.full_level::bigint + ratelimit.used_level(level, refilled_at, (numbers.calendar).turned_at)
  end
$$;
comment on function ratelimit.level_now(bigint, timestamptz, timestamptz, ratelimit.policies) is
  'The level of a bucket now, in microtokens, from its row; a quota is as of turning.';

create or replace function ratelimit.stored_level(level bigint, numbers ratelimit.policies)
  returns bigint language sql immutable parallel safe
as $$
  select level - case when (numbers.calendar).period is null then 0 else numbers.full_level end::bigint
$$;
comment on function ratelimit.stored_level(bigint, ratelimit.policies) is
  'The level that a row has, from the microtokens that the bucket holds.';

create or replace function ratelimit.lowest_level_of_quota(capacity bigint)
  returns bigint language sql immutable parallel safe
as $$
  select ratelimit.microtokens(capacity) - ratelimit.deepest_debt()
$$;
comment on function ratelimit.lowest_level_of_quota(bigint) is
  'The level that no charge of a quota goes below, in microtokens.';

-- A quota whose row was written at refilled_at, in the words of a bucket that refills: by now it has filled it, or it gains nothing.
create or replace function ratelimit.filling(numbers ratelimit.policies, refilled_at timestamptz)
  returns ratelimit.policies
  language plpgsql
  immutable
as $$
begin
  if refilled_at < (numbers.calendar).turned_at then
    numbers.gain     := 20000000000000000000000000;  -- 2 * 10^19 microtokens each microsecond: more than any bucket lacks
    numbers.every_us := 1;
  end if;
  return numbers;
end;
$$;
comment on function ratelimit.filling(ratelimit.policies, timestamptz) is
  'The numbers by which refilled tells the level of a quota''s bucket.';

create or replace function ratelimit.wait_for_turn(tokens bigint, level bigint, refilled_at timestamptz, now timestamptz, quota ratelimit.policies)
  returns bigint
  language plpgsql
  immutable
as $$
begin
  if quota.full_level + ratelimit.used_level(level, refilled_at, (quota.calendar).turned_at) >= coalesce(ratelimit.microtokens(tokens), quota.full_level) then
    return bigint '0';
  elsif refilled_at > now then  -- by a clock that was ahead
    quota.calendar := ratelimit.turning(quota.calendar, refilled_at);
  end if;
  return ratelimit.microseconds((quota.calendar).turns_at - now)::bigint;
end;
$$;
comment on function ratelimit.wait_for_turn(bigint, bigint, timestamptz, timestamptz, ratelimit.policies) is
  'Microseconds until the bucket of a quota, as of turning, holds tokens; null tokens are a full bucket.';

-- A zone that an older tzdata had must not stop clean-up.
create or replace function ratelimit.turning_if_known(calendar ratelimit.calendar, at timestamptz)
  returns ratelimit.calendar
  language plpgsql
  immutable
as $$
begin
  return ratelimit.turning(calendar, at);
exception when invalid_parameter_value then
  return calendar;
end;
$$;
comment on function ratelimit.turning_if_known(ratelimit.calendar, timestamptz) is
  'A calendar with the turns around an instant, or without turns if the server does not know its time zone.';

create or replace function ratelimit.unused(calendar ratelimit.calendar, level bigint, refilled_at timestamptz, now timestamptz)
  returns boolean language sql immutable parallel safe
as $$
  select ratelimit.used_level(level, refilled_at, (ratelimit.turning_if_known(calendar, now)).turned_at) = 0
$$;
comment on function ratelimit.unused(ratelimit.calendar, bigint, timestamptz, timestamptz) is
  'Whether the row of a quota''s bucket says that nothing is used of the period that runs.';

create or replace function ratelimit.quota_of_key(policy ratelimit.policies, key text, now timestamptz)
  returns ratelimit.policies
  language plpgsql
  stable
as $$
declare
  v_override ratelimit.overrides;
  v_key      text collate "C" := key;
begin
  if (policy.calendar).overridden then
    select o.* into v_override from ratelimit.overrides as o where o.policy_id = policy.id and o.key = v_key and o.expires_at > now;
    if found then
      policy := ratelimit.with_override(policy, v_override);
    end if;
  end if;
  return ratelimit.with_turns(policy, now);
end;
$$;
comment on function ratelimit.quota_of_key(ratelimit.policies, text, timestamptz) is
  'A quota with the numbers of the override of a key that is live, and the turns around an instant.';

-- An override is the numbers of a policy for one key. It is live until it expires. ratelimit.overrides has the derived
-- columns of ratelimit.policies, so the arithmetic takes them from either.
--
-- Nothing looks for an override unless the policy's column overridden says that it has had some. So a policy without them
-- pays nothing.
create or replace function ratelimit.with_override(policy ratelimit.policies, override ratelimit.overrides)
  returns ratelimit.policies language sql immutable parallel safe
as $$
  select row(policy.id, policy.name, override.capacity, override.refill, override.every, policy.stepped, policy.durable, policy.remember,
             override.tick, override.every_us, override.tick_us, override.full_level, override.gain, override.tick_gain, override.round_up,
             policy.remember_us, policy.overridden, policy.shadow, ratelimit.with_calendar(policy.calendar, override.calendar, override.expires_at))::ratelimit.policies
$$;
comment on function ratelimit.with_override(ratelimit.policies, ratelimit.overrides) is
  'A policy with the numbers of an override, and when they end.';

-- A wait by the numbers of an override holds if it is over before they end. From then on the numbers of the policy apply, to the
-- bucket as it is stored: the wait is the later of the end and the wait by them. level and refilled_at are null for a bucket without
-- a row, which is full by the numbers that apply. Names are qualified: Citus calls the function on other nodes.
create or replace function ratelimit.wait_past_end(
    tokens bigint, level bigint, refilled_at timestamptz, now timestamptz, numbers ratelimit.policies, policy ratelimit.policies)
  returns bigint
  language plpgsql
  immutable
as $$
declare
  v_wait_us bigint := ratelimit.own_wait(tokens, level, refilled_at, now, numbers);
  v_left_us bigint := ratelimit.left_of_numbers(numbers, now);
begin
  if v_left_us is null or v_wait_us < v_left_us then
    return v_wait_us;
  end if;
  return ratelimit.wait_after_end(tokens, level, refilled_at, now, numbers, policy);
end;
$$;
comment on function ratelimit.wait_past_end(bigint, bigint, timestamptz, timestamptz, ratelimit.policies, ratelimit.policies) is
  'Microseconds until a bucket holds tokens, where an override may end first; null tokens are a full bucket, and null is never.';

create or replace function ratelimit.wait_after_end(
    tokens bigint, level bigint, refilled_at timestamptz, now timestamptz, numbers ratelimit.policies, policy ratelimit.policies)
  returns bigint
  language plpgsql
  immutable
as $$
declare
  v_wait_us bigint;
begin
  policy    := ratelimit.with_turns(policy, now);
  v_wait_us := ratelimit.own_wait(tokens, level, refilled_at, now, policy);
  return case when v_wait_us is not null then greatest(v_wait_us, ratelimit.left_of_numbers(numbers, now)) end;
end;
$$;
comment on function ratelimit.wait_after_end(bigint, bigint, timestamptz, timestamptz, ratelimit.policies, ratelimit.policies) is
  'Microseconds until a bucket holds tokens by the numbers of its policy, once an override has ended; as of wait_past_end.';

create or replace function ratelimit.left_of_numbers(numbers ratelimit.policies, now timestamptz)
  returns bigint language sql immutable parallel safe
as $$
  select case when isfinite((numbers.calendar).ends_at) then least(ratelimit.microseconds((numbers.calendar).ends_at - now), 3155760000000000000)::bigint end
$$;
comment on function ratelimit.left_of_numbers(ratelimit.policies, timestamptz) is
  'Microseconds until the numbers of an override end, null if they do not; it saturates as wait_for does.';

create or replace function ratelimit.own_wait(tokens bigint, level bigint, refilled_at timestamptz, now timestamptz, policy ratelimit.policies)
  returns bigint language sql immutable parallel safe
as $$
  select case
    when tokens > policy.capacity then null
    when level is null then 0
    when (policy.calendar).period is not null then ratelimit.wait_for_turn(tokens, level, refilled_at, now, policy)
    else ratelimit.wait_until(coalesce(ratelimit.microtokens(tokens), policy.full_level), level, refilled_at, now, policy)
  end
$$;
comment on function ratelimit.own_wait(bigint, bigint, timestamptz, timestamptz, ratelimit.policies) is
  'Microseconds until a bucket holds tokens by the numbers of a policy, as of wait_past_end.';

-- The bucket of a key whose override has an end, as of one snapshot.
create or replace function ratelimit.look_past_end(
    in numbers ratelimit.policies, in key text, in now timestamptz, in tokens bigint, out level bigint, out retry_us bigint, out reset_us bigint)
  language plpgsql
  stable
as $$
declare
  v_key    text collate "C" := key;
  v_own    ratelimit.policies := own_numbers(numbers);
  v_bucket ratelimit.buckets;
begin
  numbers := with_turns(numbers, now);
  if numbers.durable then
    select b.* into v_bucket from buckets as b where b.policy_id = numbers.id and b.key = v_key;
  else
    select b.* into v_bucket from ephemeral_buckets as b where b.policy_id = numbers.id and b.key = v_key;
  end if;
  level    := case when v_bucket.level is null then microtokens(numbers.capacity) else level_now(v_bucket.level, v_bucket.refilled_at, now, numbers) end;
  retry_us := case when tokens = 0 then 0 else wait_past_end(tokens, v_bucket.level, v_bucket.refilled_at, now, numbers, v_own) end;
  reset_us := wait_past_end(null, v_bucket.level, v_bucket.refilled_at, now, numbers, v_own);
end;
$$;
comment on function ratelimit.look_past_end(ratelimit.policies, text, timestamptz, bigint) is
  'The level of a bucket now, and the waits for tokens and until it is full, where an override may end first.';

create or replace function ratelimit.own_numbers(numbers ratelimit.policies)
  returns ratelimit.policies
  language plpgsql
  stable
as $$
declare
  v_policy ratelimit.policies;
begin
  select p.* into v_policy from policies as p where p.id = numbers.id;
  if not found then
    return numbers;  -- dropped meanwhile
  end if;
  return v_policy;
end;
$$;
comment on function ratelimit.own_numbers(ratelimit.policies) is
  'The policy of a key as it is now, without the numbers of an override; it stays as it was if it was dropped.';

-- A call that may have waited for a session that changed the numbers reads them again, if the policy has overrides or the bucket has
-- no row. A policy that was dropped meanwhile stays
-- as it was.
create or replace function ratelimit.numbers_again(policy ratelimit.policies, key text, now timestamptz)
  returns ratelimit.policies
  language plpgsql
  stable
as $$
declare
  v_policy   ratelimit.policies;
  v_override ratelimit.overrides;
  v_key      text collate "C" := key;
begin
  select p.* into v_policy from policies as p where p.id = policy.id;
  if not found then
    return with_turns(policy, now);
  end if;
  if (v_policy.calendar).period is not null then
    return quota_of_key(v_policy, key, now);
  elsif v_policy.overridden then
    select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > now;
    if found then
      v_policy := with_override(v_policy, v_override);
    end if;
  end if;
  return v_policy;
end;
$$;
comment on function ratelimit.numbers_again(ratelimit.policies, text, timestamptz) is
  'The policy as it is now, with the numbers of the override of a key that is live.';

-- The error of a guard that refuses.

-- The fields of draft-ietf-httpapi-ratelimit-headers for a denial: the tokens that are left of each quota. A policy's name is a string
-- of printable ASCII there, so anything else in it becomes a question mark.
create or replace function ratelimit.http_fields(policy text, denial ratelimit.decision)
  returns json language plpgsql stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name       text    := '"' || regexp_replace(regexp_replace(http_fields.policy collate "C", '[^ -~]', '?', 'g'), '(["\\])', '\\\1', 'g') || '"';
  v_retry_s    numeric := ceil(microseconds(denial.retry_after) / 1000000);
  v_reset_s    numeric := microseconds(denial.reset_after) / 1000000;
  v_window_s   numeric;  -- fills an empty bucket; null where the numbers are not those of the policy, or it does not refill
  v_token_s    numeric;  -- until there is more, as if a bucket that refills did so evenly
  v_is_quota   boolean;
begin
  select case when p.capacity = denial.capacity and (p.calendar).overridden is not true then  -- a key may have another calendar
           ceil(coalesce(extract(epoch from t.turns_at - t.turned_at), short_wait(p.full_level, 0, 0, p) / 1000000.0))
         end, (p.calendar).period is not null
    into v_window_s, v_is_quota
    from policies as p
    left join lateral turning(p.calendar, clock()) as t on (p.calendar).period is not null
   where p.name = http_fields.policy collate "C";
  v_token_s := case when v_reset_s is not null then
                 least(v_retry_s, greatest(1, ceil(v_reset_s / case when v_is_quota then 1 else greatest(1, denial.capacity - denial.remaining) end)))
               end;
  return json_strip_nulls(json_build_object(
    'Retry-After',      v_retry_s::text,
    'RateLimit',        format('%s;r=%s', v_name, greatest(0, denial.remaining)) || coalesce(';t=' || v_token_s, ''),
    'RateLimit-Policy', format('%s;q=%s', v_name, denial.capacity) || coalesce(';w=' || v_window_s, '')));
end;
$$;
comment on function ratelimit.http_fields(text, ratelimit.decision) is
  'The fields of an HTTP response for a denial: Retry-After, RateLimit and RateLimit-Policy.';

-- PostgREST answers a request with these two documents. It wants all of code, message, status and headers, and texts in
-- headers; otherwise it answers 500.
create or replace function ratelimit.refuse_http(message text, detail text, remedy text, fields json)
  returns void language plpgsql
as $$
begin
  raise exception using
    errcode = 'PGRST',
    message = json_build_object('code', 'RL429', 'message', refuse_http.message, 'details', refuse_http.detail, 'hint', remedy)::text,
    detail  = json_build_object('status', 429, 'headers', fields)::text;
end;
$$;
comment on function ratelimit.refuse_http(text, text, text, json) is
  'Raises what PostgREST turns into a response of status 429.';

-- DETAIL never has the key: whoever sees the error may be somebody else. In a request of PostgREST, which sets
-- request.method, and wherever http is true, PostgREST gets its answer.
create or replace function ratelimit.rate_limit_exceeded(policy text, cost bigint, denial ratelimit.decision, http boolean)
  returns void language plpgsql
as $$
declare
  v_retry_s numeric := trim_scale(ratelimit.microseconds(denial.retry_after) / 1000000);
  v_detail  text    := format('{"policy": %s, "cost": %s, "remaining": %s, "retry_after": %s, "capacity": %s}',
                              to_json(rate_limit_exceeded.policy), cost, denial.remaining, coalesce(v_retry_s::text, 'null'), denial.capacity);
  v_hint    text    := case
    when v_retry_s is not null then format('Try again in %s.', ratelimit.counted(v_retry_s, 'second'))
    when cost > denial.capacity then format('A cost of %s never fits a bucket of %s.', cost, denial.capacity)
    else 'The bucket will not hold so many tokens by itself.'
  end;
begin
  if http or current_setting('request.method', true) <> '' then
    perform ratelimit.refuse_http('rate limit exceeded', v_detail, v_hint, ratelimit.http_fields(policy, denial));
  end if;
  raise exception 'rate limit exceeded' using errcode = 'RL429', detail = v_detail, hint = v_hint;
end;
$$;
comment on function ratelimit.rate_limit_exceeded(text, bigint, ratelimit.decision, boolean) is
  'Raises RL429, the error for a denial that a guard does not let pass.';


-- Policies.
-- A bucket that clean-up removed while a policy was lowered was full by the lower capacity, and is full by the higher one once
-- the policy is raised again.
create or replace function ratelimit_define_policy(
    policy    text,
    capacity  bigint    default null,
    refill    bigint    default null,
    every     interval  default null,
    stepped   boolean   default null,
    durable   boolean   default null,
    remember  interval  default null,
    shadow    boolean   default null,
    period    interval  default null,
    time_zone text      default null,
    anchor    timestamp default null,
    lease     interval  default null)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name      text collate "C" := ratelimit_define_policy.policy;
  v_policy    policies;
  v_id        bigint;
  v_stepped   boolean;
  v_durable   boolean;
  v_period    interval;
  v_time_zone text;
  v_anchor    timestamp;
  v_lease     interval;
begin
  perform check_name('policy', v_name);
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  select p.* into v_policy from policies as p where p.name = v_name for update;  -- the checks combine new numbers with these
  if v_policy.id is not null and (v_policy.calendar).lease is null and ratelimit_define_policy.lease is not null then
    perform refuse('lease', ratelimit_define_policy.lease::text, 'The policy has tokens. Drop it and define it anew, or choose another name.');
  end if;
  v_lease := coalesce(ratelimit_define_policy.lease, (v_policy.calendar).lease);
  if v_lease is not null then
    perform check_only_slots(ratelimit_define_policy.refill, ratelimit_define_policy.every, ratelimit_define_policy.stepped,
                             ratelimit_define_policy.remember, ratelimit_define_policy.period, ratelimit_define_policy.time_zone,
                             ratelimit_define_policy.anchor);
    perform check_lease(coalesce(ratelimit_define_policy.capacity, v_policy.capacity), 1, v_lease);
  elsif v_policy.id is not null and (v_policy.calendar).period is null and ratelimit_define_policy.period is not null then
    perform refuse('period', ratelimit_define_policy.period::text, 'The policy refills. Drop it and define it anew; its buckets will be full.');
  end if;
  v_period    := coalesce(ratelimit_define_policy.period, (v_policy.calendar).period);
  v_time_zone := coalesce(ratelimit_define_policy.time_zone, (v_policy.calendar).time_zone, case when v_period is not null then 'UTC' end);
  v_anchor    := coalesce(ratelimit_define_policy.anchor, (v_policy.calendar).anchor, case when v_period is not null then timestamp '2001-01-01 00:00' end);
  perform check_calendar(ratelimit_define_policy.refill, ratelimit_define_policy.every, ratelimit_define_policy.stepped, v_period, ratelimit_define_policy.time_zone, v_anchor);
  if v_period is not null or v_lease is not null then
    refill := 0;  -- as of calendar.sql
    every  := interval '1 day';
  end if;
  perform check_policy(coalesce(ratelimit_define_policy.capacity, v_policy.capacity),
                       coalesce(ratelimit_define_policy.refill, v_policy.refill),
                       coalesce(ratelimit_define_policy.every, v_policy.every),
                       ratelimit_define_policy.remember);
  insert into policies as p (id, name, capacity, refill, every, stepped, durable, remember, shadow, overridden, calendar)
  values (hashtextextended(gen_random_uuid()::text, 0),
          v_name,
          coalesce(ratelimit_define_policy.capacity, v_policy.capacity),
          coalesce(ratelimit_define_policy.refill, v_policy.refill),
          coalesce(ratelimit_define_policy.every, v_policy.every),
          coalesce(ratelimit_define_policy.stepped, false),
          coalesce(ratelimit_define_policy.durable, true),
          coalesce(ratelimit_define_policy.remember, interval '24 hours'),
          coalesce(ratelimit_define_policy.shadow, false),
          v_period is not null or v_lease is not null,
          case when v_period is not null or v_lease is not null then
            row('infinity', false, v_period, extract(year from v_period) * 12 + extract(month from v_period), v_time_zone, v_anchor, null, null, v_lease)::calendar
          end)
  on conflict on constraint policies_pkey do update
     set capacity  = excluded.capacity,
         refill    = excluded.refill,
         every     = excluded.every,
         stepped   = coalesce(ratelimit_define_policy.stepped, p.stepped),
         remember  = coalesce(ratelimit_define_policy.remember, p.remember),
         shadow    = coalesce(ratelimit_define_policy.shadow, p.shadow),
         calendar  = case when not excluded.calendar is null then
                       row((p.calendar).ends_at, (p.calendar).overridden,  -- another session may have created the policy, and an override
                           (excluded.calendar).period, (excluded.calendar).months, coalesce(ratelimit_define_policy.time_zone, (p.calendar).time_zone),
                           coalesce(ratelimit_define_policy.anchor, (p.calendar).anchor), null, null,
                           coalesce(ratelimit_define_policy.lease, (p.calendar).lease))::calendar
                     end
   where ((p.calendar).period is null) = ((excluded.calendar).period is null)
     and ((p.calendar).lease is null) = ((excluded.calendar).lease is null)
  returning p.id, p.stepped, p.durable into v_id, v_stepped, v_durable;
  if not found then  -- another session has created the policy meanwhile
    perform refuse(case when v_lease is not null then 'lease' else 'period' end, coalesce(v_lease, v_period)::text,
                   'Another session has just created the policy as one of another kind: drop it, or choose another name.');
  end if;

  if v_policy.stepped is distinct from v_stepped then  -- another session may have created the policy meanwhile
    update overrides as o set stepped = v_stepped where o.policy_id = v_id;
  end if;
  if v_durable <> ratelimit_define_policy.durable then
    raise exception 'invalid durable'
      using errcode = '22023',
            detail  = format('Policy %L was created with durable => %s.', v_name, v_durable),
            hint    = 'Drop the policy and define it anew; its buckets will be full.';
  end if;
end;
$$;
comment on function ratelimit_define_policy(text, bigint, bigint, interval, boolean, boolean, interval, boolean, interval, text, timestamp, interval) is
'Creates a policy, or changes the policy of that name.
null keeps the value of an existing policy.
A change applies to the next call about each bucket. Levels stay, cut to the new capacity. The time since a bucket was
  last written is credited at the new rate. Overrides keep their numbers.
A policy with a period is a quota: its buckets are full at each turn of a calendar, and gain nothing in between. What was
  used stays used when its capacity changes. Another period, time_zone or anchor fills no bucket by itself.
A policy with a lease lends slots: at most capacity of a key are held at a time, by ratelimit_hold. It has no refill, every,
  stepped, remember, period, time_zone and anchor.
policy: 1 to 512 bytes, case-sensitive.
capacity: the most tokens that a bucket holds, 0 to 9000000000000. With 0 each cost above 0 is denied. A new policy
  needs it. Of slots it is 1 to 10000.
refill: the tokens that a bucket gains in each interval every, 0 to 9000000000000. With 0 only ratelimit_refund and
  ratelimit_reset fill a bucket. A new policy without period and lease needs it.
every: 1 microsecond to 365250 days, without months and years. A new policy without period and lease needs it.
stepped: true refills at the end of each interval every, false by the microsecond. A new policy has false.
durable: false keeps buckets and idempotency keys in unlogged tables: after a crash buckets are full. It cannot be
  changed. A new policy has true.
remember: how long a grant is remembered under its idempotency key, 1 microsecond to 365250 days. A new policy has 24
  hours.
shadow: true grants requests that the policy would deny, takes nothing for them, and returns shadowed true. A new
  policy has false.
period: whole days or whole months, 1 day to 1000 years, in place of refill, every and stepped. A policy cannot become
  a quota, or cease to be one.
time_zone: the time zone of the turns, UTC or a name with a slash of pg_timezone_names. A new quota has UTC.
anchor: the local time of one turn, of the years 1 to 9999. The others are whole periods from it: a month after
  31 January is 28 or 29 February. A new quota has 2001-01-01 00:00, which is the start of a week, a month and a year.
lease: how long slots are held unless the holder renews or releases them, 1 millisecond to 365250 days, without months and years. A
  policy cannot begin or cease to lend slots. Leases that run keep their ends when it changes.
Errors: 22023 for a bad argument, for a new policy without capacity, refill or every, for a bucket that would take
  more than 10000 years to fill, and for a durable other than that of the policy. 25006 in a read-only transaction.
Locks: the row of the policy until the transaction ends. Acquires do not wait for it.
Writes: the policy, and its overrides if stepped changes.
Role: administrator.';

-- A bucket or an idempotency key that an open transaction has locked is skipped, and left to clean-up. Such a row changes no answer,
-- because a policy defined anew under the same name has another id. SKIP LOCKED can still block if the row
-- changes hands while it is examined, as cleanup_batch.sql says. Here only the caller's lock_timeout ends that wait. So the rows
-- are locked in the order in which requests lock buckets, and a wait never ends in a deadlock.
create or replace function ratelimit_drop_policy(policy text)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name    text collate "C" := ratelimit_drop_policy.policy;
  v_id      bigint;
  v_durable boolean;
begin
  perform check_name('policy', v_name);
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  delete from policies as p where p.name = v_name returning p.id, p.durable into v_id, v_durable;
  if not found then
    raise exception 'unknown policy' using
      errcode = 'RL001',
      detail  = format('No policy is named %L.', v_name),
      hint    = 'Pass the name of a policy that select * from ratelimit_policies() lists.';
  end if;
  delete from overrides as o where o.policy_id = v_id;
  if v_durable then
    delete from buckets as t
 where t.ctid = any (array(select u.ctid
                             from buckets as u
                            where u.policy_id = v_id
                            order by u.key
                              for update skip locked));
    delete from idempotency_keys as t
 where t.ctid = any (array(select u.ctid
                             from idempotency_keys as u
                            where u.policy_id = v_id
                            order by u.key, u.idempotency_key
                              for update skip locked));
    delete from slots as t
 where t.ctid = any (array(select u.ctid
                             from slots as u
                            where u.policy_id = v_id
                            order by u.key
                              for update skip locked));
    delete from leases as t
 where t.ctid = any (array(select u.ctid
                             from leases as u
                            where u.policy_id = v_id
                            order by u.key, u.holder
                              for update skip locked));
  else
    delete from ephemeral_buckets as t
 where t.ctid = any (array(select u.ctid
                             from ephemeral_buckets as u
                            where u.policy_id = v_id
                            order by u.key
                              for update skip locked));
    delete from ephemeral_idempotency_keys as t
 where t.ctid = any (array(select u.ctid
                             from ephemeral_idempotency_keys as u
                            where u.policy_id = v_id
                            order by u.key, u.idempotency_key
                              for update skip locked));
    delete from ephemeral_slots as t
 where t.ctid = any (array(select u.ctid
                             from ephemeral_slots as u
                            where u.policy_id = v_id
                            order by u.key
                              for update skip locked));
    delete from ephemeral_leases as t
 where t.ctid = any (array(select u.ctid
                             from ephemeral_leases as u
                            where u.policy_id = v_id
                            order by u.key, u.holder
                              for update skip locked));
  end if;
end;
$$;
comment on function ratelimit_drop_policy(text) is
'Removes a policy with its overrides, buckets, idempotency keys and holders.
A row that another transaction has locked is left to clean-up. It does not count for a new policy of the same name.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the row of the policy and the rows that it deletes until the transaction ends.
Writes: deletes these rows.
Role: administrator.';

create or replace function ratelimit_policies()
  returns table (policy text, capacity bigint, refill bigint, every interval,
                 stepped boolean, durable boolean, remember interval, shadow boolean,
                 period interval, time_zone text, anchor timestamp, lease interval)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select p.name, p.capacity, case when p.calendar is null then p.refill end, case when p.calendar is null then p.every end,
         case when p.calendar is null then p.stepped end, p.durable, case when (p.calendar).lease is null then p.remember end, p.shadow,
         (p.calendar).period, (p.calendar).time_zone, (p.calendar).anchor, (p.calendar).lease
    from policies as p
   order by p.name
$$;
comment on function ratelimit_policies() is
'Lists the policies, by name.
The columns are the arguments of ratelimit_define_policy.
capacity: whole tokens, or slots.
refill: null for a quota and for slots, as every and stepped are.
remember: null for slots.
period: null unless the policy is a quota, as time_zone and anchor are.
lease: null unless the policy lends slots.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: administrator or monitoring.';

-- It applies from the commit of the caller's transaction on. So ratelimit_reset in the same transaction starts a new plan full.
-- ratelimit_refund there does not: a call that waits for the bucket by then still clamps it to the older capacity.
create or replace function ratelimit_override(
    policy     text,
    key        text,
    capacity   bigint      default null,
    refill     bigint      default null,
    every      interval    default null,
    expires_at timestamptz default null,
    time_zone  text        default null,
    anchor     timestamp   default null,
    lease      interval    default null)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_key        text collate "C" := ratelimit_override.key;
  v_policy     policies;
  v_capacity   bigint;
  v_refill     bigint;
  v_every      interval;
  v_time_zone  text;
  v_anchor     timestamp;
  v_expires_at timestamptz := coalesce(ratelimit_override.expires_at, 'infinity');
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  perform check_numbers(coalesce(ratelimit_override.capacity, 0), 0, '1 microsecond');
  perform check_numbers(0, coalesce(ratelimit_override.refill, 0), '1 microsecond');
  perform check_numbers(0, 0, coalesce(ratelimit_override.every, '1 microsecond'));
  if num_nulls(ratelimit_override.capacity, ratelimit_override.refill, ratelimit_override.every) = 0 then
    perform check_numbers(ratelimit_override.capacity, ratelimit_override.refill, ratelimit_override.every);
  end if;
  if v_expires_at <= clock() then
    perform refuse('expires_at', v_expires_at::text, 'Pass an instant that lies ahead, or null: the override then stays until it is removed.');
  end if;
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  -- It waits for a session that changes or drops the policy, and keeps others from doing so.
  select p.* into v_policy from policies as p where p.name = ratelimit_override.policy collate "C" for key share;
  if not found then
    perform unknown_policy(policy);
  end if;
  v_capacity := coalesce(ratelimit_override.capacity, v_policy.capacity);
  v_refill   := coalesce(ratelimit_override.refill, v_policy.refill);
  v_every    := coalesce(ratelimit_override.every, v_policy.every);
  if (v_policy.calendar).period is not null then
    select (o.calendar).time_zone, (o.calendar).anchor into v_time_zone, v_anchor from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > clock();
  end if;
  v_time_zone := coalesce(ratelimit_override.time_zone, v_time_zone, (v_policy.calendar).time_zone);
  v_anchor    := coalesce(ratelimit_override.anchor, v_anchor, (v_policy.calendar).anchor);
  if (v_policy.calendar).lease is not null then
    perform check_only_slots(ratelimit_override.refill, ratelimit_override.every, null, null, null, ratelimit_override.time_zone, ratelimit_override.anchor);
    perform check_lease(v_capacity, 0, coalesce(ratelimit_override.lease, (v_policy.calendar).lease));
  elsif ratelimit_override.lease is not null then
    perform refuse('lease', ratelimit_override.lease::text, 'Only a policy that lends slots has a lease. Leave it out, or drop the policy and define it anew with one.');
  else
    perform check_calendar(ratelimit_override.refill, ratelimit_override.every, null, (v_policy.calendar).period, ratelimit_override.time_zone, v_anchor);
    perform check_numbers(v_capacity, v_refill, v_every);
  end if;

  if v_policy.calendar is null then
    update policies as p set overridden = true where p.id = v_policy.id and not p.overridden;
  elsif not (v_policy.calendar).overridden then
    v_policy.calendar.overridden := true;
    update policies as p set calendar = v_policy.calendar where p.id = v_policy.id;
  end if;
  insert into overrides as o (policy_id, key, capacity, refill, every, stepped, expires_at, calendar)
  values (v_policy.id, v_key, v_capacity, v_refill, v_every, v_policy.stepped, v_expires_at,
          case when (v_policy.calendar).ends_at is not null then
            row(null, null, null, null, v_time_zone, v_anchor, null, null, coalesce(ratelimit_override.lease, (v_policy.calendar).lease))::calendar
          end)
  on conflict on constraint overrides_pkey do update
     set capacity   = excluded.capacity,
         refill     = excluded.refill,
         every      = excluded.every,
         stepped    = excluded.stepped,
         expires_at = excluded.expires_at,
         calendar   = excluded.calendar;
end;
$$;
comment on function ratelimit_override(text, text, bigint, bigint, interval, timestamptz, text, timestamp, interval) is
'Gives one key of a policy numbers of its own, in place of an earlier override of the key.
The override applies to calls that begin after the transaction commits. A bucket with a row keeps its level, cut to
  the new capacity. A bucket without a row is full at the new capacity.
stepped, durable, remember, shadow and period stay the values of the policy.
Of a policy that lends slots, a key has capacity, lease and expires_at. A lease that runs keeps its end.
capacity: as in ratelimit_define_policy. null: the capacity of the policy as of this call. 0 blocks the key.
refill: as in ratelimit_define_policy. null: the refill of the policy as of this call.
every: as in ratelimit_define_policy. null: the interval of the policy as of this call.
time_zone: as in ratelimit_define_policy, for a quota only. null: that of the live override of the key, or else of the
  policy as of this call.
anchor: likewise.
lease: as in ratelimit_define_policy, for a policy that lends slots only. null: the lease of the policy as of this call.
expires_at: a time in the future, from which on the numbers of the policy apply again, counted from when the bucket was
  last written. retry_after and reset_after of the key allow for it. null: the override stays until it is removed.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the override, and the row of the policy against changes, until the transaction ends. Acquires do not wait for
  it.
Writes: the override. The first override of a policy also writes the policy.
Role: administrator.';

create or replace function ratelimit_remove_override(policy text, key text)
  returns boolean
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_key        text collate "C" := ratelimit_remove_override.key;
  v_policy     policies;
  v_expires_at timestamptz;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  v_policy := policy_named(policy);
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  delete from overrides as o
   where o.policy_id = v_policy.id
     and o.key       = v_key
  returning o.expires_at into v_expires_at;
  return coalesce(v_expires_at > clock(), false);
end;
$$;
comment on function ratelimit_remove_override(text, text) is
'Removes the override of one key, and returns true if the override had not expired.
The numbers of the policy apply to calls that begin after the transaction commits.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the override until the transaction ends.
Writes: deletes the override.
Role: administrator.';

-- The checks of ratelimit_overrides and ratelimit_status, whose own language has none.
create or replace function ratelimit.check_listing(policy text, key text, max_rows integer)
  returns void language plpgsql stable
as $$
begin
  if policy is not null then
    perform ratelimit.check_name('policy', policy);
  end if;
  if key is not null then
    perform ratelimit.check_name('key', key);
  end if;
  perform ratelimit.check_max_rows(max_rows);
  if policy is not null then
    perform ratelimit.policy_named(policy);
  end if;
end;
$$;
comment on function ratelimit.check_listing(text, text, integer) is
  'Raises 22023 for an argument out of range, and RL001 for an unknown policy.';

create or replace function ratelimit_overrides(policy text default null, key text default null, max_rows integer default 1000)
  returns table (policy text, key text, capacity bigint, refill bigint, every interval, expires_at timestamptz, time_zone text, anchor timestamp, lease interval)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $2, $3);
  select p.name, o.key, o.capacity, case when p.calendar is null then o.refill end, case when p.calendar is null then o.every end,
         nullif(o.expires_at, 'infinity'), (o.calendar).time_zone, (o.calendar).anchor, (o.calendar).lease
    from policies as p
   cross join lateral (select o.* from overrides as o where o.policy_id = p.id and o.key = $2 collate "C"  -- through the primary key
                       union all
                       select o.* from overrides as o where o.policy_id = p.id and $2 is null) as o
   where o.expires_at > clock()
     and ($1 is null or p.name = $1 collate "C")
   order by p.name, o.key
   limit $3
$$;
comment on function ratelimit_overrides(text, text, integer) is
'Lists the overrides that have not expired, by policy and key.
policy: null lists the overrides of all policies.
key: null lists the overrides of all keys.
max_rows: 1 or more.
capacity: whole tokens, or slots.
refill: null for a quota and for slots, as every is.
expires_at: null if the override stays until it is removed.
time_zone: null unless the policy is a quota, as anchor is.
lease: null unless the policy lends slots.
Errors: 22023 for a bad argument, RL001 for an unknown policy.
Locks: nothing.
Writes: nothing.
Role: administrator.';


-- Buckets.
-- Takes from the bucket of a quota, in buckets, for ratelimit_acquire, ratelimit_reserve and ratelimit_acquire_up_to: as many whole tokens as there
-- are, at_most, or none if there are fewer than at_least. The steps, locks and writes are those of the last. A period that has not begun
-- lends nothing, so to reserve is to acquire. calendar.sql says what the level of a row is.
create or replace function ratelimit.take_quota_of_buckets(
    policy ratelimit.policies, key text, at_most bigint, at_least bigint, idempotency_key text)
  returns ratelimit.partial_decision
  language plpgsql
  volatile
as $$
declare
  v_key             text collate "C" := key;
  v_idempotency_key text collate "C" := idempotency_key;
  v_now             timestamptz := clock();
  v_capacity        bigint;              -- these two apply to the key
  v_calendar        ratelimit.calendar;
  v_quota           ratelimit.policies;  -- with the numbers of the key, once the bucket was looked at
  v_taken           bigint := at_most;
  v_wanted          bigint;
  v_level           bigint;       -- as the row has it
  v_refilled_at     timestamptz;  -- when the row was written
  v_held            bigint;       -- microtokens in the bucket
  v_retry_us        bigint;
  v_reset_us        bigint;
  v_has_row         boolean;      -- a bucket without a row is full
  v_first           ratelimit.idempotency_keys;
  v_answer          ratelimit.decision;
  v_rounds          integer;
  v_override        ratelimit.overrides;
begin
  if (policy.calendar).overridden then
    select o.* into v_override from overrides as o where o.policy_id = policy.id and o.key = v_key and o.expires_at > v_now;
  end if;
  if v_override.key is null then
    v_capacity := policy.capacity;
    v_calendar := turning(policy.calendar, v_now);
  else
    v_capacity := v_override.capacity;
    v_calendar := turning(with_calendar(policy.calendar, v_override.calendar, v_override.expires_at), v_now);
  end if;

  -- 1. The idempotency key.
  if v_idempotency_key is not null then
    select k.* into v_first
      from idempotency_keys as k
     where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
    if v_first.expires_at > v_now then
      return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
    end if;
  end if;

  loop
    -- 2. The update.
    if v_taken between 1 and v_capacity then
      v_wanted := microtokens(v_taken);
      update buckets as b
         set level       = used_level(b.level, b.refilled_at, v_calendar.turned_at) - v_wanted,
             refilled_at = greatest(b.refilled_at, v_now),
             room        = null
       where b.policy_id = policy.id
         and b.key       = v_key
         and used_level(b.level, b.refilled_at, v_calendar.turned_at) >= v_wanted - microtokens(v_capacity)
         and (v_taken = at_most or b.level = v_level and b.refilled_at = v_refilled_at)  -- fewer only from the bucket as it was read
      returning b.level, b.refilled_at into v_level, v_refilled_at;
      exit when found;
    end if;

    -- 3. The bucket, as of now: the update may have waited.
    v_now      := clock();
    policy     := own_numbers(policy);
    v_quota    := quota_of_key(policy, v_key, v_now);
    v_capacity := v_quota.capacity;
    v_calendar := v_quota.calendar;
    select b.level, b.refilled_at into v_level, v_refilled_at
      from buckets as b
     where b.policy_id = policy.id
       and b.key       = v_key;
    v_has_row := found;
    v_held    := microtokens(v_capacity) + coalesce(used_level(v_level, v_refilled_at, v_calendar.turned_at), 0);
    v_taken   := least(at_most, whole_tokens(v_held));

    -- 3a. Too few tokens.
    if at_most = 0 or v_taken < at_least then
      v_retry_us := case when at_most = 0 then 0
                         else wait_past_end(at_least, v_level, v_refilled_at, v_now, v_quota, policy) end;
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, policy);
      if v_idempotency_key is not null then
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
        end if;
      end if;
      if policy.shadow and at_most > 0 then
        v_answer := shadow_of(v_held, v_reset_us, v_capacity);
        return partial_of(v_answer, at_most);
      end if;
      v_answer := answer_of(v_held, v_retry_us, v_reset_us, v_capacity);
      return partial_of(v_answer, 0);
    end if;

    -- 3b. No row. The insert may wait for a session that creates the same one.
    if not v_has_row then
      v_wanted      := microtokens(v_taken);
      v_level       := -v_wanted;
      v_refilled_at := v_now;
      insert into buckets (policy_id, key, level, refilled_at, due_at)
      values (policy.id, v_key, v_level, v_refilled_at, v_calendar.turns_at)
      on conflict on constraint buckets_pkey do nothing;
      exit when found;
    end if;

    -- Again. Each round but the first is due to another session.
    v_rounds := coalesce(v_rounds, 0) + 1;
    if v_rounds = 1000 then
      perform too_many_rounds(policy.name, v_key);  -- raises 40001
    end if;
  end loop;
  if v_refilled_at = v_now and v_calendar.turns_at < v_calendar.ends_at then
    v_reset_us := microseconds(v_calendar.turns_at - v_now)::bigint;
  else
    if v_has_row is null then
      v_quota := case when v_override.key is null then policy else with_override(policy, v_override) end;
    end if;
    v_quota.calendar := v_calendar;
    v_reset_us       := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, policy);
  end if;
  v_held := microtokens(v_capacity) + v_level;

  -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
  if v_idempotency_key is not null then
    insert into idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    values (policy.id, v_key, v_idempotency_key, v_taken,
            tokens_above_debt(v_held), duration(v_reset_us), v_capacity, v_now + duration(policy.remember_us), v_now)
    on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
    if not found then
      update buckets as b
         set level = b.level + v_wanted
       where b.policy_id = policy.id
         and b.key       = v_key;
      select k.* into v_first
        from idempotency_keys as k
       where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
    end if;
  end if;
  return (true, tokens_above_debt(v_held), interval '0', duration(v_reset_us), v_capacity, false, false,
          case when policy.shadow then at_most else v_taken end)::partial_decision;  -- as grant_of and partial_of
end;
$$;
comment on function ratelimit.take_quota_of_buckets(ratelimit.policies, text, bigint, bigint, text) is
  'The steps of ratelimit_acquire, ratelimit_reserve and ratelimit_acquire_up_to for a quota.';

-- Does what take_from_buckets does, for a quota.
create or replace function ratelimit.take_quotas_from_buckets(
    in  policy ratelimit.policies, in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql
  volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_quota  ratelimit.policies := policy;
begin
  v_quota.calendar := turning(policy.calendar, v_now);
  with taken as (
      update buckets as b
         set level       = used_level(b.level, b.refilled_at, ((u.p).calendar).turned_at) - u.wanted,
             refilled_at = greatest(b.refilled_at, v_now),
             room        = null
        from (select u.*, case when (v_policy.calendar).overridden then quota_of_key(v_policy, u.key, v_now) else v_quota end as p
                from unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
               where (select p = v_policy from policies as p where p.id = v_policy.id)
              offset 0) as u
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1))
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and used_level(b.level, b.refilled_at, ((u.p).calendar).turned_at) >= u.wanted - microtokens((u.p).capacity)
      returning u.*, b.level, b.refilled_at
    )
    select array_agg(u.place), array_agg(whole_tokens(microtokens((u.p).capacity) + u.level)),
           array_agg(wait_past_end(null, u.level, u.refilled_at, v_now, u.p, v_policy)),
           array_agg((u.p).capacity)
      into places, remaining, reset_us, capacities
      from (select e.place, t.p, t.refilled_at,
                   t.level + t.wanted - microtokens(sum(costs[e.place]::integer) over (partition by t.places[1] order by e.place)) as level
              from taken as t
             cross join lateral unnest(t.places) as e (place)) as u;
end;
$$;
comment on function ratelimit.take_quotas_from_buckets(ratelimit.policies, bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Charges the buckets of one quota that cover all that is asked of them, and answers their elements.';

create or replace function ratelimit.refund_quota_of_buckets(policy ratelimit.policies, key text, amount bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
as $$
declare
  v_key         text collate "C" := key;
  v_now         timestamptz := clock();
  v_quota       ratelimit.policies := quota_of_key(policy, v_key, v_now);
  v_given       bigint := microtokens(least(amount, 9000000000000));  -- more may be used than the capacity is by now
  v_level       bigint;
  v_refilled_at timestamptz;
  v_reset_us    bigint;
begin
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  update buckets as b
     set level       = least(used_level(b.level, b.refilled_at, (v_quota.calendar).turned_at), -v_given) + v_given,
         refilled_at = greatest(b.refilled_at, v_now),
         room        = null,
         due_at      = least(b.due_at, v_now)  -- as in ratelimit_refund
   where b.policy_id = policy.id
     and b.key       = v_key
  returning b.level, b.refilled_at into v_level, v_refilled_at;
  v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, policy);
  return answer_of(microtokens(v_quota.capacity) + coalesce(v_level, 0), 0, v_reset_us, v_quota.capacity);
end;
$$;
comment on function ratelimit.refund_quota_of_buckets(ratelimit.policies, text, bigint) is
  'The steps of ratelimit_refund for a quota.';

-- Takes from the bucket of a quota, in ephemeral_buckets, for ratelimit_acquire, ratelimit_reserve and ratelimit_acquire_up_to: as many whole tokens as there
-- are, at_most, or none if there are fewer than at_least. The steps, locks and writes are those of the last. A period that has not begun
-- lends nothing, so to reserve is to acquire. calendar.sql says what the level of a row is.
create or replace function ratelimit.take_quota_of_ephemeral_buckets(
    policy ratelimit.policies, key text, at_most bigint, at_least bigint, idempotency_key text)
  returns ratelimit.partial_decision
  language plpgsql
  volatile
as $$
declare
  v_key             text collate "C" := key;
  v_idempotency_key text collate "C" := idempotency_key;
  v_now             timestamptz := clock();
  v_capacity        bigint;              -- these two apply to the key
  v_calendar        ratelimit.calendar;
  v_quota           ratelimit.policies;  -- with the numbers of the key, once the bucket was looked at
  v_taken           bigint := at_most;
  v_wanted          bigint;
  v_level           bigint;       -- as the row has it
  v_refilled_at     timestamptz;  -- when the row was written
  v_held            bigint;       -- microtokens in the bucket
  v_retry_us        bigint;
  v_reset_us        bigint;
  v_has_row         boolean;      -- a bucket without a row is full
  v_first           ratelimit.idempotency_keys;
  v_answer          ratelimit.decision;
  v_rounds          integer;
  v_override        ratelimit.overrides;
begin
  if (policy.calendar).overridden then
    select o.* into v_override from overrides as o where o.policy_id = policy.id and o.key = v_key and o.expires_at > v_now;
  end if;
  if v_override.key is null then
    v_capacity := policy.capacity;
    v_calendar := turning(policy.calendar, v_now);
  else
    v_capacity := v_override.capacity;
    v_calendar := turning(with_calendar(policy.calendar, v_override.calendar, v_override.expires_at), v_now);
  end if;

  -- 1. The idempotency key.
  if v_idempotency_key is not null then
    select k.* into v_first
      from ephemeral_idempotency_keys as k
     where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
    if v_first.expires_at > v_now then
      return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
    end if;
  end if;

  loop
    -- 2. The update.
    if v_taken between 1 and v_capacity then
      v_wanted := microtokens(v_taken);
      update ephemeral_buckets as b
         set level       = used_level(b.level, b.refilled_at, v_calendar.turned_at) - v_wanted,
             refilled_at = greatest(b.refilled_at, v_now),
             room        = null
       where b.policy_id = policy.id
         and b.key       = v_key
         and used_level(b.level, b.refilled_at, v_calendar.turned_at) >= v_wanted - microtokens(v_capacity)
         and (v_taken = at_most or b.level = v_level and b.refilled_at = v_refilled_at)  -- fewer only from the bucket as it was read
      returning b.level, b.refilled_at into v_level, v_refilled_at;
      exit when found;
    end if;

    -- 3. The bucket, as of now: the update may have waited.
    v_now      := clock();
    policy     := own_numbers(policy);
    v_quota    := quota_of_key(policy, v_key, v_now);
    v_capacity := v_quota.capacity;
    v_calendar := v_quota.calendar;
    select b.level, b.refilled_at into v_level, v_refilled_at
      from ephemeral_buckets as b
     where b.policy_id = policy.id
       and b.key       = v_key;
    v_has_row := found;
    v_held    := microtokens(v_capacity) + coalesce(used_level(v_level, v_refilled_at, v_calendar.turned_at), 0);
    v_taken   := least(at_most, whole_tokens(v_held));

    -- 3a. Too few tokens.
    if at_most = 0 or v_taken < at_least then
      v_retry_us := case when at_most = 0 then 0
                         else wait_past_end(at_least, v_level, v_refilled_at, v_now, v_quota, policy) end;
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, policy);
      if v_idempotency_key is not null then
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
        end if;
      end if;
      if policy.shadow and at_most > 0 then
        v_answer := shadow_of(v_held, v_reset_us, v_capacity);
        return partial_of(v_answer, at_most);
      end if;
      v_answer := answer_of(v_held, v_retry_us, v_reset_us, v_capacity);
      return partial_of(v_answer, 0);
    end if;

    -- 3b. No row. The insert may wait for a session that creates the same one.
    if not v_has_row then
      v_wanted      := microtokens(v_taken);
      v_level       := -v_wanted;
      v_refilled_at := v_now;
      insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
      values (policy.id, v_key, v_level, v_refilled_at, v_calendar.turns_at)
      on conflict on constraint ephemeral_buckets_pkey do nothing;
      exit when found;
    end if;

    -- Again. Each round but the first is due to another session.
    v_rounds := coalesce(v_rounds, 0) + 1;
    if v_rounds = 1000 then
      perform too_many_rounds(policy.name, v_key);  -- raises 40001
    end if;
  end loop;
  if v_refilled_at = v_now and v_calendar.turns_at < v_calendar.ends_at then
    v_reset_us := microseconds(v_calendar.turns_at - v_now)::bigint;
  else
    if v_has_row is null then
      v_quota := case when v_override.key is null then policy else with_override(policy, v_override) end;
    end if;
    v_quota.calendar := v_calendar;
    v_reset_us       := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, policy);
  end if;
  v_held := microtokens(v_capacity) + v_level;

  -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
  if v_idempotency_key is not null then
    insert into ephemeral_idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    values (policy.id, v_key, v_idempotency_key, v_taken,
            tokens_above_debt(v_held), duration(v_reset_us), v_capacity, v_now + duration(policy.remember_us), v_now)
    on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
    if not found then
      update ephemeral_buckets as b
         set level = b.level + v_wanted
       where b.policy_id = policy.id
         and b.key       = v_key;
      select k.* into v_first
        from ephemeral_idempotency_keys as k
       where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
    end if;
  end if;
  return (true, tokens_above_debt(v_held), interval '0', duration(v_reset_us), v_capacity, false, false,
          case when policy.shadow then at_most else v_taken end)::partial_decision;  -- as grant_of and partial_of
end;
$$;
comment on function ratelimit.take_quota_of_ephemeral_buckets(ratelimit.policies, text, bigint, bigint, text) is
  'The steps of ratelimit_acquire, ratelimit_reserve and ratelimit_acquire_up_to for a quota.';

-- Does what take_from_ephemeral_buckets does, for a quota.
create or replace function ratelimit.take_quotas_from_ephemeral_buckets(
    in  policy ratelimit.policies, in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql
  volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_quota  ratelimit.policies := policy;
begin
  v_quota.calendar := turning(policy.calendar, v_now);
  with taken as (
      update ephemeral_buckets as b
         set level       = used_level(b.level, b.refilled_at, ((u.p).calendar).turned_at) - u.wanted,
             refilled_at = greatest(b.refilled_at, v_now),
             room        = null
        from (select u.*, case when (v_policy.calendar).overridden then quota_of_key(v_policy, u.key, v_now) else v_quota end as p
                from unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
               where (select p = v_policy from policies as p where p.id = v_policy.id)
              offset 0) as u
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1))
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and used_level(b.level, b.refilled_at, ((u.p).calendar).turned_at) >= u.wanted - microtokens((u.p).capacity)
      returning u.*, b.level, b.refilled_at
    )
    select array_agg(u.place), array_agg(whole_tokens(microtokens((u.p).capacity) + u.level)),
           array_agg(wait_past_end(null, u.level, u.refilled_at, v_now, u.p, v_policy)),
           array_agg((u.p).capacity)
      into places, remaining, reset_us, capacities
      from (select e.place, t.p, t.refilled_at,
                   t.level + t.wanted - microtokens(sum(costs[e.place]::integer) over (partition by t.places[1] order by e.place)) as level
              from taken as t
             cross join lateral unnest(t.places) as e (place)) as u;
end;
$$;
comment on function ratelimit.take_quotas_from_ephemeral_buckets(ratelimit.policies, bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Charges the buckets of one quota that cover all that is asked of them, and answers their elements.';

create or replace function ratelimit.refund_quota_of_ephemeral_buckets(policy ratelimit.policies, key text, amount bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
as $$
declare
  v_key         text collate "C" := key;
  v_now         timestamptz := clock();
  v_quota       ratelimit.policies := quota_of_key(policy, v_key, v_now);
  v_given       bigint := microtokens(least(amount, 9000000000000));  -- more may be used than the capacity is by now
  v_level       bigint;
  v_refilled_at timestamptz;
  v_reset_us    bigint;
begin
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  update ephemeral_buckets as b
     set level       = least(used_level(b.level, b.refilled_at, (v_quota.calendar).turned_at), -v_given) + v_given,
         refilled_at = greatest(b.refilled_at, v_now),
         room        = null,
         due_at      = least(b.due_at, v_now)  -- as in ratelimit_refund
   where b.policy_id = policy.id
     and b.key       = v_key
  returning b.level, b.refilled_at into v_level, v_refilled_at;
  v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, policy);
  return answer_of(microtokens(v_quota.capacity) + coalesce(v_level, 0), 0, v_reset_us, v_quota.capacity);
end;
$$;
comment on function ratelimit.refund_quota_of_ephemeral_buckets(ratelimit.policies, text, bigint) is
  'The steps of ratelimit_refund for a quota.';

-- Takes cost tokens from one bucket if it has them, and answers; a denial is an answer, not an error.
--
-- The steps. Steps 1 and 4 are for an acquire with an idempotency key. An idempotency key that has not expired is live.
--   1. A live idempotency key is replayed, even when the bucket is empty. If its grant was settled, that is RL004.
--   2. One conditional update takes the tokens. Concurrent acquires take turns at it, and each takes tokens
--      only if the bucket still has enough.
--   3. If the update takes nothing, the bucket is read.
--      a. If it has too few tokens, the idempotency key is looked up again, because the request that emptied the
--         bucket may have had the same one; then the answer is the replay or the denial.
--      b. If the bucket has no row, it is full: the row is created, less the cost.
--      c. If another session created the row first, or the bucket has enough tokens after all, step 2 is repeated.
--   4. After the tokens are taken, the idempotency key is remembered. By now this call has locked the bucket's
--      row in step 2, or created it in step 3. So a live idempotency key that turns up only now was committed
--      after step 1 and before the lock. The tokens go back and the idempotency key is replayed. The refill that
--      step 2 credited stays.
-- A cost above capacity takes nothing: it has only steps 1 and 3. A cost of 0 has only step 3. Either is answered from the bucket
-- as read.
--
-- The clock is read before step 1 and in each step 3. The update of step 2 and the insert of step 3 may wait for
-- another session. A grant that waited is answered by the clock from before the wait: its reset_after is never
-- too short, and the refill of the wait is credited later. A denial is answered by the clock from after the wait.
--
-- Under REPEATABLE READ and SERIALIZABLE, an acquire that would take from a bucket that changed since the snapshot
-- fails with 40001, and a denial is as old as the snapshot. In a read-only transaction, an acquire that gets to
-- the update of step 2 fails with 25006, even if it would be denied.
--
-- Locks:  a grant and a replay of step 4 hold the bucket row and the row of the idempotency key until the
--         caller's transaction ends. A denial and a replay of step 3 hold the bucket row only if they had to
--         wait for it. A replay of step 1 holds nothing.
-- Writes: a grant writes the bucket and its idempotency key, a replay of step 4 the bucket; the others write nothing.
create or replace function ratelimit_acquire(
    policy          text,
    key             text,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- a plan made while the table was empty would read all of it once it has grown
as $$
declare
  v_policy policies;
begin
  if not acceptable(key, cost) or idempotency_key is not null then
    if (acceptable(key, cost) and is_name(idempotency_key)) is not true then
      perform check_request(policy, key, cost, idempotency_key);  -- raises 22023
    end if;
    if cost = 0 then
      idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  if not v_policy.durable then
    return acquire_ephemeral(v_policy, key, cost, idempotency_key);  -- what follows, on the twin tables
  end if;

  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_wanted          bigint;       -- cost in microtokens; 0 if nothing can be taken
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_retry_us        bigint;       -- microseconds until the bucket holds cost; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_rounds          integer;
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return decision_of(take_quota_of_buckets(v_policy, v_key, v_cost, v_cost, v_idempotency_key));
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;

    -- 1. The idempotency key. Its expiry is compared after the row is found: in WHERE, a planner without statistics might
    --    choose the index of expires_at.
    if v_idempotency_key is not null then
      select k.* into v_first
        from idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update.
      if v_wanted > 0 then
        update buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null  -- what a new row has more, so that its page has room for this version
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             case
               when v_wanted > 0 then wait_until(v_wanted, b.level, b.refilled_at, v_now, v_policy)
               when v_cost = 0 then 0
             end,
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
        into v_level, v_retry_us, v_reset_us
        from buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_wanted   := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
        v_level    := microtokens(v_policy.capacity);
        v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
        v_reset_us := 0;
      end if;

      -- 3a. Too few tokens.
      if v_wanted = 0 or v_retry_us is distinct from 0 then
        if (v_policy.calendar).ends_at is not null then
          select b.level, b.retry_us, b.reset_us into v_level, v_retry_us, v_reset_us from look_past_end(v_policy, v_key, v_now, v_cost) as b;
          continue when v_wanted > 0 and v_retry_us = 0;  -- another session gave tokens back
        end if;
        if v_idempotency_key is not null then
          select k.* into v_first
            from idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return answer_again(v_first, v_cost, v_now, v_policy.shadow);
          end if;
        end if;
        if v_policy.shadow and v_retry_us is distinct from 0 then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
        return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
      end if;

      -- 3b. No row. The insert may wait for a session that creates the same one.
      if not v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint buckets_pkey do nothing;
        exit when found;
      end if;

      -- 3c. Again. Each repetition but the first is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us))
      on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;
    return grant_of(v_level, v_reset_us, v_policy.capacity);
  end;
end;
$$;
comment on function ratelimit_acquire(text, text, bigint, text) is
'Takes cost tokens from one bucket if the bucket holds them.
A denial is an answer and not an error.
A repeat under a live idempotency key gets the first answer with replayed true, and takes nothing, even if the bucket
  is empty by now.
The calling program chooses the idempotency key, one for each operation. A key chosen by the clients of the program
  would let a client pass every time.
cost: whole tokens, 0 or more. A cost above the capacity that applies to the key is denied. A cost of 0 takes nothing and
  ignores the idempotency key.
idempotency_key: 1 to 512 bytes. The grant is remembered for the interval remember of the policy. null: a repeat is
  charged again.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key that was granted with
  another cost, RL004 for a live idempotency key whose grant was settled, 25006 in a read-only transaction.
Locks: a grant locks the bucket row and the row of the idempotency key until the transaction ends. A denial keeps a
  lock on the bucket row only if the call waited for it, a replay only if it ran beside the first request.
Writes: a grant writes the bucket and the idempotency key. A denial writes nothing. A replay writes nothing, or the
  bucket if it ran beside the first request.
Role: application.';

create or replace function ratelimit.acquire_ephemeral(v_policy ratelimit.policies, key text, cost bigint, idempotency_key text)
  returns ratelimit.decision
  language plpgsql
  volatile
as $$
  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_wanted          bigint;       -- cost in microtokens; 0 if nothing can be taken
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_retry_us        bigint;       -- microseconds until the bucket holds cost; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_rounds          integer;
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return decision_of(take_quota_of_ephemeral_buckets(v_policy, v_key, v_cost, v_cost, v_idempotency_key));
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;

    -- 1. The idempotency key. Its expiry is compared after the row is found: in WHERE, a planner without statistics might
    --    choose the index of expires_at.
    if v_idempotency_key is not null then
      select k.* into v_first
        from ephemeral_idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update.
      if v_wanted > 0 then
        update ephemeral_buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null  -- what a new row has more, so that its page has room for this version
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             case
               when v_wanted > 0 then wait_until(v_wanted, b.level, b.refilled_at, v_now, v_policy)
               when v_cost = 0 then 0
             end,
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
        into v_level, v_retry_us, v_reset_us
        from ephemeral_buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_wanted   := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
        v_level    := microtokens(v_policy.capacity);
        v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
        v_reset_us := 0;
      end if;

      -- 3a. Too few tokens.
      if v_wanted = 0 or v_retry_us is distinct from 0 then
        if (v_policy.calendar).ends_at is not null then
          select b.level, b.retry_us, b.reset_us into v_level, v_retry_us, v_reset_us from look_past_end(v_policy, v_key, v_now, v_cost) as b;
          continue when v_wanted > 0 and v_retry_us = 0;  -- another session gave tokens back
        end if;
        if v_idempotency_key is not null then
          select k.* into v_first
            from ephemeral_idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return answer_again(v_first, v_cost, v_now, v_policy.shadow);
          end if;
        end if;
        if v_policy.shadow and v_retry_us is distinct from 0 then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
        return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
      end if;

      -- 3b. No row. The insert may wait for a session that creates the same one.
      if not v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint ephemeral_buckets_pkey do nothing;
        exit when found;
      end if;

      -- 3c. Again. Each repetition but the first is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us))
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update ephemeral_buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;
    return grant_of(v_level, v_reset_us, v_policy.capacity);
  end;
$$;
comment on function ratelimit.acquire_ephemeral(ratelimit.policies, text, bigint, text) is
  'The steps of ratelimit_acquire for an ephemeral policy.';

-- Takes nothing, and so works in a read-only transaction and, for durable policies, on a standby.
create or replace function ratelimit_peek(policy text, key text, cost bigint default 1)
  returns ratelimit.decision
  language plpgsql
  stable
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy   ratelimit.policies;
  v_override ratelimit.overrides;
  v_key      text collate "C" := key;
  v_cost     alias for cost;
  v_now      timestamptz := clock();
  v_level    bigint;  -- microtokens in the bucket
  v_retry_us bigint;  -- microseconds until the bucket holds cost; null: never
  v_reset_us bigint;  -- microseconds until the bucket is full; null: never
begin
  if not acceptable(key, cost) then
    perform check_request(policy, key, cost, null);  -- raises 22023
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  if v_policy.overridden then
    select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
    if found then
      v_policy := with_override(v_policy, v_override);
    end if;
    if (v_policy.calendar).lease is not null then
      return peek_slots(v_policy, v_key, v_cost, v_now);
    end if;
  end if;
  if (v_policy.calendar).ends_at is not null then
    select b.level, b.retry_us, b.reset_us into v_level, v_retry_us, v_reset_us from look_past_end(v_policy, v_key, v_now, v_cost) as b;
  elsif v_policy.durable then
    select refilled(b.level, b.refilled_at, v_now, v_policy),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy)
           end,
           wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
      into v_level, v_retry_us, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
  else
    select refilled(b.level, b.refilled_at, v_now, v_policy),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy)
           end,
           wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
      into v_level, v_retry_us, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
  end if;
  if not found then  -- full
    v_level    := microtokens(v_policy.capacity);
    v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
    v_reset_us := 0;
  end if;
  return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_peek(text, text, bigint) is
'Returns the tokens that one bucket holds, and whether ratelimit_acquire would grant the cost now.
It takes nothing. A shadow policy is shown as if it were enforced.
Of a policy that lends slots it returns what ratelimit_hold would answer to a holder that holds nothing. reset_after is the time
  until nobody holds.
cost: whole tokens, 0 or more.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 0A000 for an ephemeral policy on a standby.
Locks: nothing.
Writes: nothing.
Role: application.';

-- The level of a bucket, in microtokens, and the microseconds until it is full; null is never. The policy has the numbers that
-- apply to the key.
create or replace function ratelimit.bucket_now(in policy ratelimit.policies, in key text, in now timestamptz, out level bigint, out reset_us bigint)
  language plpgsql
  stable
as $$
declare
  v_key text collate "C" := key;
begin
  if (policy.calendar).ends_at is not null then
    select b.level, b.reset_us into level, reset_us from look_past_end(policy, v_key, now, 0) as b;
  elsif policy.durable then
    select refilled(b.level, b.refilled_at, now, policy), wait_until(policy.full_level, b.level, b.refilled_at, now, policy)
      into level, reset_us
      from buckets as b
     where b.policy_id = policy.id
       and b.key       = v_key;
  else
    select refilled(b.level, b.refilled_at, now, policy), wait_until(policy.full_level, b.level, b.refilled_at, now, policy)
      into level, reset_us
      from ephemeral_buckets as b
     where b.policy_id = policy.id
       and b.key       = v_key;
  end if;
  if not found then  -- full
    level    := microtokens(policy.capacity);
    reset_us := 0;
  end if;
end;
$$;
comment on function ratelimit.bucket_now(ratelimit.policies, text, timestamptz) is
  'What a bucket holds, and how long until it is full.';

create or replace function ratelimit_refund(policy text, key text, amount bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_key         text collate "C" := key;
  v_policy      policies;
  v_override    overrides;
  v_amount      bigint;
  v_now         timestamptz := clock();
  v_level       bigint;       -- microtokens in the bucket
  v_refilled_at timestamptz;  -- when the bucket held v_level
  v_reset_us    bigint;       -- microseconds until the bucket is full; null: never
begin
  if not acceptable(key, amount) then
    perform check_name('policy', policy);  -- each raises 22023
    perform check_name('key', key);
    perform check_tokens('amount', amount);
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  if v_policy.overridden then
    if (v_policy.calendar).lease is not null then
      perform refuse_slots(v_policy.name);  -- raises 22023
    elsif (v_policy.calendar).period is not null and v_policy.durable then
      return refund_quota_of_buckets(v_policy, v_key, amount);
    elsif (v_policy.calendar).period is not null then
      return refund_quota_of_ephemeral_buckets(v_policy, v_key, amount);
    end if;
    select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
    if found then
      v_policy := with_override(v_policy, v_override);
    end if;
  end if;
  v_amount := least(amount, v_policy.capacity);
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  if v_policy.durable then
    update buckets as b
       set level       = least(refilled(b.level, b.refilled_at, v_now, v_policy), microtokens(v_policy.capacity - v_amount))
                         + microtokens(v_amount),
           refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
           room        = null,
           due_at      = least(b.due_at, v_now)  -- the bucket may be full now: clean-up looks at it in five minutes or later
     where b.policy_id = v_policy.id
       and b.key       = v_key
    returning b.level, b.refilled_at into v_level, v_refilled_at;
  else
    update ephemeral_buckets as b
       set level       = least(refilled(b.level, b.refilled_at, v_now, v_policy), microtokens(v_policy.capacity - v_amount))
                         + microtokens(v_amount),
           refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
           room        = null,
           due_at      = least(b.due_at, v_now)  -- the bucket may be full now: clean-up looks at it in five minutes or later
     where b.policy_id = v_policy.id
       and b.key       = v_key
    returning b.level, b.refilled_at into v_level, v_refilled_at;
  end if;
  if not found then  -- full
    return answer_of(microtokens(v_policy.capacity), 0, 0, v_policy.capacity);
  end if;
  v_reset_us := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
  if (v_policy.calendar).ends_at is not null then
    v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, own_numbers(v_policy));
  end if;
  return answer_of(v_level, 0, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_refund(text, text, bigint) is
'Gives amount tokens back to one bucket, never above its capacity, and returns the tokens that the bucket holds then.
Refunded tokens can be taken again: do not let a role refund that is itself to be limited.
amount: whole tokens, 0 or more. An amount above the capacity counts as the capacity. A quota gets back at most what is used.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the bucket row until the transaction ends. A bucket without a row is full, and nothing is locked or written.
Writes: the bucket.
Role: application.';

create or replace function ratelimit_reset(policy text, key text)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_key    text collate "C" := ratelimit_reset.key;
  v_policy policies;
begin
  if is_name(key) is not true then
    perform check_name('policy', policy);  -- either raises 22023
    perform check_name('key', key);
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  if (v_policy.calendar).lease is not null and v_policy.durable then
    perform reset_slots(v_policy.id, v_key);
  elsif (v_policy.calendar).lease is not null then
    perform reset_ephemeral_slots(v_policy.id, v_key);
  elsif v_policy.durable then
    delete from buckets as b where b.policy_id = v_policy.id and b.key = v_key;
  else
    delete from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = v_key;
  end if;
end;
$$;
comment on function ratelimit_reset(text, text) is
'Makes one bucket full, and so forgives its debt. Of a policy that lends slots it frees all slots of the key.
Idempotency keys stay.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the row of the bucket or key, if there is one, until the transaction ends.
Writes: deletes the bucket row, or the leases of the key.
Role: administrator.';

-- One batch of ratelimit_reset_all: the buckets of the next 1000 keys after the one of the batch before it; the first passes
-- null. more is true if there may be others.
-- Each bucket is removed by a statement of its own, which keeps the order.
--
-- Locks:  the rows of the buckets, or of the keys of slots, in the order of key, until the caller's transaction ends.
-- Writes: the buckets, or the leases.
create or replace function ratelimit.reset_batch(in policy text, inout after text, out more boolean)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy policies := policy_named(policy);
  v_after  text collate "C" := coalesce(reset_batch.after, '');
  v_key    text collate "C";
  v_keys   text[];
begin
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  if (v_policy.calendar).lease is not null and v_policy.durable then
    v_keys := array(select s.key from slots as s where s.policy_id = v_policy.id and s.key > v_after order by s.key limit 1000);
    foreach v_key in array v_keys loop
      perform reset_slots(v_policy.id, v_key);
    end loop;
  elsif (v_policy.calendar).lease is not null then
    v_keys := array(select s.key from ephemeral_slots as s where s.policy_id = v_policy.id and s.key > v_after order by s.key limit 1000);
    foreach v_key in array v_keys loop
      perform reset_ephemeral_slots(v_policy.id, v_key);
    end loop;
  elsif v_policy.durable then
    v_keys := array(select b.key from buckets as b where b.policy_id = v_policy.id and b.key > v_after order by b.key limit 1000);
    foreach v_key in array v_keys loop
      delete from buckets as b where b.policy_id = v_policy.id and b.key = v_key;
    end loop;
  else
    v_keys := array(select b.key from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key > v_after order by b.key limit 1000);
    foreach v_key in array v_keys loop
      delete from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = v_key;
    end loop;
  end if;
  after := v_key;
  more  := cardinality(v_keys) = 1000;
end;
$$;
comment on function ratelimit.reset_batch(text, text) is
  'One batch of ratelimit_reset_all, and whether another should follow.';

-- It commits, and so runs with the caller's rights and search_path, as ratelimit_cleanup_all does.
create or replace procedure ratelimit_reset_all(policy text)
  language plpgsql
as $$
declare
  v_after text;
  v_batch record;
begin
  loop
    v_batch := ratelimit.reset_batch(ratelimit_reset_all.policy, v_after);
    v_after := v_batch.after;
    commit;
    exit when not v_batch.more;
  end loop;
end;
$$;
comment on procedure ratelimit_reset_all(text) is
'Makes all buckets of a policy full, or frees all its slots, in batches of 1000 keys, and commits after each batch.
Idempotency keys and overrides stay. The call waits for a bucket that another transaction has locked.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction, 2D000 inside a
  transaction.
Locks: the rows of the buckets or keys of a batch, in the order of key, until the batch commits.
Writes: deletes the bucket rows, or the leases.
Role: administrator. The role also needs EXECUTE on ratelimit.reset_batch and USAGE on schema ratelimit.';


-- Slots: so many at a time.
-- Slots: a limit on what is in flight. A policy with a lease lends its capacity to holders, and each lease is a row of leases.
--
-- What is held of a key is the sum of the leases that have not ended: at the microsecond ends_at a lease counts for nobody any more,
-- and nothing has to run for that. A grant removes those of its key that have ended, so that a clock that steps back revives none.
--
-- The row of slots is the lock of a key's leases. A grant, a renewal and a release write it first, under one condition
-- or other; a mere lock would let a transaction of a stricter isolation level count by its old snapshot. It is there
-- before a lease is, and as long as there is one.
--
-- The row has the sum, too, so that a grant under a key with many holders does not read them all: held counts all leases of the key, and
-- is what is held until counted_until, before which none of them ends. From then on the leases are added up, and the grant that does so
-- writes the sum anew. A session that cannot tell the sum sets counted_until to -infinity. A denial never trusts the sum.

-- What is held of a key, the wait for the cost, the wait until nobody holds, and whether a holder holds, by the numbers that apply to
-- the key. All is as of one snapshot, because the function is STABLE. The wait is until the first instant at which the cost fits: the
-- end of a lease, or the end of an override; then the policy's own capacity counts.
create or replace function ratelimit.look_at_slots(
    in policy ratelimit.policies, in key text, in now timestamptz, in cost bigint, in holder text,
    out capacity bigint, out lease interval, out held bigint, out retry_us bigint, out reset_us bigint, out holds boolean, out shadow boolean)
  language plpgsql
  stable
as $$
declare
  v_key          text collate "C" := key;
  v_now          alias for now;
  v_cost         alias for cost;
  v_holder       text collate "C" := holder;  -- null: nobody is asked for
  v_numbers      ratelimit.policies := numbers_again(policy, key, now);
  v_ends_at      timestamptz;  -- of the override; null if it has no end
  v_own_capacity bigint;       -- from then on
  v_last         timestamptz;
  v_first        timestamptz;
begin
  capacity := v_numbers.capacity;
  lease    := (v_numbers.calendar).lease;
  shadow   := v_numbers.shadow;
  if isfinite((v_numbers.calendar).ends_at) then
    v_ends_at      := (v_numbers.calendar).ends_at;
    v_own_capacity := (own_numbers(v_numbers)).capacity;
  end if;
  select coalesce(sum(l.cost), 0), max(l.ends_at), coalesce(bool_or(l.holder = v_holder), false)
    into held, v_last, holds
    from leases as l
   where l.policy_id = policy.id and l.key = v_key and l.ends_at > v_now;
  reset_us := coalesce(microseconds(v_last - v_now), 0)::bigint;
  if v_cost = 0 or v_cost <= capacity - held then
    retry_us := 0;
    return;
  end if;
  select min(u.at)
    into v_first
    from (select e.at, coalesce(sum(e.cost) over (order by e.at desc groups between unbounded preceding and 1 preceding), 0) as held
            from (select l.ends_at, l.cost
                    from leases as l
                   where l.policy_id = policy.id and l.key = v_key and l.ends_at > v_now
                  union all
                  select v_ends_at, 0 where v_ends_at is not null) as e (at, cost)) as u
   where v_cost <= case when u.at >= v_ends_at then v_own_capacity else look_at_slots.capacity end - u.held;
  if v_first is not null then
    retry_us := least(microseconds(v_first - v_now), 3155760000000000000)::bigint;  -- saturates as wait_for does
  end if;
end;
$$;
comment on function ratelimit.look_at_slots(ratelimit.policies, text, timestamptz, bigint, text) is
  'The capacity and the lease that apply to a key of slots, what is held of it and whether by a holder, and the waits for a cost and until nobody holds.';

-- Frees all slots of a key.
-- Locks and writes: the row of the key; deletes its leases.
create or replace function ratelimit.reset_slots(policy_id bigint, key text)
  returns void
  language plpgsql
  volatile
as $$
declare
  v_policy_id alias for policy_id;
  v_key       text collate "C" := key;
  v_now       timestamptz := clock();
begin
  update slots as s
     set changes       = s.changes + 1,
         counted_until = '-infinity',
         due_at        = least(s.due_at, v_now)
   where s.policy_id = v_policy_id
     and s.key       = v_key;
  if not found then
    return;  -- nobody held by then, and a later lease is none that this call has locked
  end if;
  delete from leases as l where l.policy_id = v_policy_id and l.key = v_key;
end;
$$;
comment on function ratelimit.reset_slots(bigint, text) is
  'The steps of ratelimit_reset for slots.';

-- Slots: a limit on what is in flight. A policy with a lease lends its capacity to holders, and each lease is a row of ephemeral_leases.
--
-- What is held of a key is the sum of the leases that have not ended: at the microsecond ends_at a lease counts for nobody any more,
-- and nothing has to run for that. A grant removes those of its key that have ended, so that a clock that steps back revives none.
--
-- The row of ephemeral_slots is the lock of a key's leases. A grant, a renewal and a release write it first, under one condition
-- or other; a mere lock would let a transaction of a stricter isolation level count by its old snapshot. It is there
-- before a lease is, and as long as there is one.
--
-- The row has the sum, too, so that a grant under a key with many holders does not read them all: held counts all leases of the key, and
-- is what is held until counted_until, before which none of them ends. From then on the leases are added up, and the grant that does so
-- writes the sum anew. A session that cannot tell the sum sets counted_until to -infinity. A denial never trusts the sum.

-- What is held of a key, the wait for the cost, the wait until nobody holds, and whether a holder holds, by the numbers that apply to
-- the key. All is as of one snapshot, because the function is STABLE. The wait is until the first instant at which the cost fits: the
-- end of a lease, or the end of an override; then the policy's own capacity counts.
create or replace function ratelimit.look_at_ephemeral_slots(
    in policy ratelimit.policies, in key text, in now timestamptz, in cost bigint, in holder text,
    out capacity bigint, out lease interval, out held bigint, out retry_us bigint, out reset_us bigint, out holds boolean, out shadow boolean)
  language plpgsql
  stable
as $$
declare
  v_key          text collate "C" := key;
  v_now          alias for now;
  v_cost         alias for cost;
  v_holder       text collate "C" := holder;  -- null: nobody is asked for
  v_numbers      ratelimit.policies := numbers_again(policy, key, now);
  v_ends_at      timestamptz;  -- of the override; null if it has no end
  v_own_capacity bigint;       -- from then on
  v_last         timestamptz;
  v_first        timestamptz;
begin
  capacity := v_numbers.capacity;
  lease    := (v_numbers.calendar).lease;
  shadow   := v_numbers.shadow;
  if isfinite((v_numbers.calendar).ends_at) then
    v_ends_at      := (v_numbers.calendar).ends_at;
    v_own_capacity := (own_numbers(v_numbers)).capacity;
  end if;
  select coalesce(sum(l.cost), 0), max(l.ends_at), coalesce(bool_or(l.holder = v_holder), false)
    into held, v_last, holds
    from ephemeral_leases as l
   where l.policy_id = policy.id and l.key = v_key and l.ends_at > v_now;
  reset_us := coalesce(microseconds(v_last - v_now), 0)::bigint;
  if v_cost = 0 or v_cost <= capacity - held then
    retry_us := 0;
    return;
  end if;
  select min(u.at)
    into v_first
    from (select e.at, coalesce(sum(e.cost) over (order by e.at desc groups between unbounded preceding and 1 preceding), 0) as held
            from (select l.ends_at, l.cost
                    from ephemeral_leases as l
                   where l.policy_id = policy.id and l.key = v_key and l.ends_at > v_now
                  union all
                  select v_ends_at, 0 where v_ends_at is not null) as e (at, cost)) as u
   where v_cost <= case when u.at >= v_ends_at then v_own_capacity else look_at_ephemeral_slots.capacity end - u.held;
  if v_first is not null then
    retry_us := least(microseconds(v_first - v_now), 3155760000000000000)::bigint;  -- saturates as wait_for does
  end if;
end;
$$;
comment on function ratelimit.look_at_ephemeral_slots(ratelimit.policies, text, timestamptz, bigint, text) is
  'The capacity and the lease that apply to a key of slots, what is held of it and whether by a holder, and the waits for a cost and until nobody holds.';

-- Frees all slots of a key.
-- Locks and writes: the row of the key; deletes its leases.
create or replace function ratelimit.reset_ephemeral_slots(policy_id bigint, key text)
  returns void
  language plpgsql
  volatile
as $$
declare
  v_policy_id alias for policy_id;
  v_key       text collate "C" := key;
  v_now       timestamptz := clock();
begin
  update ephemeral_slots as s
     set changes       = s.changes + 1,
         counted_until = '-infinity',
         due_at        = least(s.due_at, v_now)
   where s.policy_id = v_policy_id
     and s.key       = v_key;
  if not found then
    return;  -- nobody held by then, and a later lease is none that this call has locked
  end if;
  delete from ephemeral_leases as l where l.policy_id = v_policy_id and l.key = v_key;
end;
$$;
comment on function ratelimit.reset_ephemeral_slots(bigint, text) is
  'The steps of ratelimit_reset for slots.';

-- Lends cost slots of a key to a holder until its lease ends, if they are free.
--
-- The steps:
--   1. The row of the key is read: how often its leases were changed, and what is held. From counted_until on the leases are added up
--      instead. A key without a row has no leases.
--   2. If the cost does not fit, the leases are looked at. If it does not fit then, the answer is a denial: nothing was locked. If it
--      does, step 1 follows again, and adds them up.
--   3. One conditional update writes the row of the key, if nobody has changed the leases since step 1. It may wait for a session that
--      holds, renews or releases under the same key. A row that is missing is created.
--   4. If another session has changed them, the row is locked, and steps 1 to 3 follow with the leases as they are under the lock.
--   5. The row is this transaction's now, and the lease is written. Leases that have ended are removed.
-- A holder that holds is renewed whether or not its cost would fit now.
--
-- The clock is read before step 1 and again after step 3, which may have waited. If a lease or an override has ended in between, or the
-- clock went back, step 1 follows again.
--
-- Under REPEATABLE READ and SERIALIZABLE, step 3 fails with 40001 if the leases were changed since the snapshot, and a denial is as old as
-- the snapshot.
create or replace function ratelimit_hold(
    policy text,
    key    text,
    holder text,
    cost   bigint default 1)
  returns ratelimit.hold
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if (is_name(key) and is_name(holder) and cost >= 1) is not true then
    perform check_hold(policy, key, holder, cost);  -- raises 22023
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_slots(policy);
  end if;
  if (v_policy.calendar).lease is null then
    perform refuse_tokens(policy);  -- raises 22023
  end if;
  if not v_policy.durable then
    return hold_ephemeral(v_policy, key, holder, cost);  -- what follows, on the twin tables
  end if;

  declare
    v_key          text collate "C" := key;
    v_holder       text collate "C" := holder;
    v_cost         alias for cost;
    v_now          timestamptz := clock();
    v_seen_at      timestamptz;  -- the clock by which the leases were read
    v_changes      bigint;       -- of the key; null: it has no row
    v_held         bigint;       -- by leases that have not ended
    v_until        timestamptz;  -- no lease ends before
    v_ended        boolean;      -- some lease has
    v_own_cost     integer;      -- of the holder's lease
    v_own_end      timestamptz;  -- likewise
    v_renewed      boolean;
    v_next_changes bigint;
    v_ends_at      timestamptz;
    v_lease_us     bigint;
    v_retry_us     bigint;       -- microseconds until the cost fits; null: never
    v_look         record;
    v_written      boolean;
    v_rounds       integer;
    v_override     ratelimit.overrides;
  begin
    if (v_policy.calendar).overridden then
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;

    loop
      -- 1. The row of the key, and the holder's lease.
      select s.changes, s.held, s.counted_until
        into v_changes, v_held, v_until
        from slots as s
       where s.policy_id = v_policy.id and s.key = v_key;
      select l.cost, l.ends_at
        into v_own_cost, v_own_end
        from leases as l
       where l.policy_id = v_policy.id and l.key = v_key and l.holder = v_holder;
      v_ended := false;
      if v_changes is null then
        v_held := 0;
      elsif v_until <= v_now or v_retry_us = 0 then
        select coalesce(sum(l.cost) filter (where l.ends_at > v_now), 0),
               min(l.ends_at) filter (where l.ends_at > v_now),
               count(*) filter (where l.ends_at <= v_now) > 0
          into v_held, v_until, v_ended
          from leases as l
         where l.policy_id = v_policy.id and l.key = v_key;
      end if;
      v_renewed  := (v_own_end > v_now) is true;
      v_lease_us := microseconds((v_policy.calendar).lease)::bigint;
      if v_renewed and v_own_cost <> v_cost then
        perform held_with_another_cost(v_holder, v_own_cost, v_cost);  -- raises RL002
      end if;

      -- 2. A denial. By the time of this look there may be more, or the holder may hold.
      if not v_renewed and v_cost > v_policy.capacity - v_held then
        select l.* into v_look from look_at_slots(v_policy, v_key, v_now, v_cost, v_holder) as l;
        v_retry_us := case when v_look.holds then 0 else v_look.retry_us end;
        if v_retry_us is distinct from 0 and v_look.shadow then
          return (true, v_look.capacity - v_look.held, interval '0', duration(microseconds(v_look.lease)::bigint), v_look.capacity,
                  false, true)::ratelimit.hold;
        elsif v_retry_us is distinct from 0 then
          return (false, v_look.capacity - v_look.held, duration(v_retry_us), interval '0', v_look.capacity, false, false)::ratelimit.hold;
        end if;

      -- 3. The row of the key.
      else
        v_ends_at := v_now + duration(v_lease_us);
        if not v_renewed then
          v_held := v_held + v_cost;
        end if;
        if v_changes is null then
          v_next_changes := microseconds(v_now - timestamptz 'epoch')::bigint;
          insert into slots (policy_id, key, changes, held, counted_until, due_at)
          values (v_policy.id, v_key, v_next_changes, v_held, v_ends_at, v_now)  -- due at once: clean-up will postpone it
          on conflict on constraint slots_pkey do nothing;
        else
          update slots as s
             set changes       = v_changes + 1,
                 held          = v_held,
                 counted_until = least(v_until, v_ends_at),
                 due_at        = least(s.due_at, v_ends_at)
           where s.policy_id = v_policy.id
             and s.key       = v_key
             and s.changes   = v_changes;
        end if;
        v_written := found;
        v_seen_at := v_now;
        v_now     := clock();  -- it may have waited; if the clock went back, leases may be live that had ended
        exit when v_written and v_now >= v_seen_at and (v_until > v_now and (v_policy.calendar).ends_at > v_now) is not false;

        -- 4. The lock. A row that was written counts a lease that this call may not grant any more.
        if v_written then
          update slots as s
             set counted_until = '-infinity'
           where s.policy_id = v_policy.id
             and s.key       = v_key;
        else
          perform s.changes from slots as s
            where s.policy_id = v_policy.id
              and s.key       = v_key
              for update;
        end if;
      end if;
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
      v_now    := clock();
      v_policy := numbers_again(v_policy, v_key, v_now);
    end loop;

    -- 5. The lease.
    v_ends_at := v_now + duration(v_lease_us);
    if v_ended then
      delete from leases as l
       where l.policy_id = v_policy.id
         and l.key       = v_key
         and l.ends_at  <= v_now;
    end if;
    if v_renewed then
      update leases as l
         set ends_at = v_ends_at
       where l.policy_id = v_policy.id
         and l.key       = v_key
         and l.holder    = v_holder;
    else
      insert into leases (policy_id, key, holder, cost, ends_at)
      values (v_policy.id, v_key, v_holder, v_cost, v_ends_at);
    end if;
    return (true, v_policy.capacity - v_held, interval '0', duration(v_lease_us), v_policy.capacity, v_renewed, false)::ratelimit.hold;
  end;
end;
$$;
comment on function ratelimit_hold(text, text, text, bigint) is
'Lends cost slots of a key to a holder if they are free, until the lease ends or ratelimit_release is called.
A denial is an answer and not an error.
A lease that has ended counts for nobody from that microsecond on. What its holder still does is not stopped: renew before each
  step with an effect outside, and stop when ratelimit_renew returns null.
A repeat by a holder that holds begins its lease anew, with renewed true, also after the capacity was lowered.
Call it as the last statement of a short transaction: other calls for the key wait until it ends. A transaction that holds several
  keys asks for them in the order of policy and key.
holder: 1 to 512 bytes, a new one for each attempt, such as a uuid. Two attempts with one name are one holder, and each could
  release the slots of the other.
cost: slots, 1 or more. A cost above the capacity that applies to the key is denied.
Errors: 22023 for a bad argument and for a policy without a lease, RL001 for an unknown policy, RL002 for a holder that holds with
  another cost, 25006 in a read-only transaction.
Locks: a grant locks the row of the key until the transaction ends. A denial keeps a lock on it only if the call waited for it.
Writes: a grant writes the row of the key and the lease, and deletes the leases of the key that have ended. A denial writes nothing.
Role: application.';

create or replace function ratelimit.hold_ephemeral(v_policy ratelimit.policies, key text, holder text, cost bigint)
  returns ratelimit.hold
  language plpgsql
  volatile
as $$
  declare
    v_key          text collate "C" := key;
    v_holder       text collate "C" := holder;
    v_cost         alias for cost;
    v_now          timestamptz := clock();
    v_seen_at      timestamptz;  -- the clock by which the leases were read
    v_changes      bigint;       -- of the key; null: it has no row
    v_held         bigint;       -- by leases that have not ended
    v_until        timestamptz;  -- no lease ends before
    v_ended        boolean;      -- some lease has
    v_own_cost     integer;      -- of the holder's lease
    v_own_end      timestamptz;  -- likewise
    v_renewed      boolean;
    v_next_changes bigint;
    v_ends_at      timestamptz;
    v_lease_us     bigint;
    v_retry_us     bigint;       -- microseconds until the cost fits; null: never
    v_look         record;
    v_written      boolean;
    v_rounds       integer;
    v_override     ratelimit.overrides;
  begin
    if (v_policy.calendar).overridden then
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;

    loop
      -- 1. The row of the key, and the holder's lease.
      select s.changes, s.held, s.counted_until
        into v_changes, v_held, v_until
        from ephemeral_slots as s
       where s.policy_id = v_policy.id and s.key = v_key;
      select l.cost, l.ends_at
        into v_own_cost, v_own_end
        from ephemeral_leases as l
       where l.policy_id = v_policy.id and l.key = v_key and l.holder = v_holder;
      v_ended := false;
      if v_changes is null then
        v_held := 0;
      elsif v_until <= v_now or v_retry_us = 0 then
        select coalesce(sum(l.cost) filter (where l.ends_at > v_now), 0),
               min(l.ends_at) filter (where l.ends_at > v_now),
               count(*) filter (where l.ends_at <= v_now) > 0
          into v_held, v_until, v_ended
          from ephemeral_leases as l
         where l.policy_id = v_policy.id and l.key = v_key;
      end if;
      v_renewed  := (v_own_end > v_now) is true;
      v_lease_us := microseconds((v_policy.calendar).lease)::bigint;
      if v_renewed and v_own_cost <> v_cost then
        perform held_with_another_cost(v_holder, v_own_cost, v_cost);  -- raises RL002
      end if;

      -- 2. A denial. By the time of this look there may be more, or the holder may hold.
      if not v_renewed and v_cost > v_policy.capacity - v_held then
        select l.* into v_look from look_at_ephemeral_slots(v_policy, v_key, v_now, v_cost, v_holder) as l;
        v_retry_us := case when v_look.holds then 0 else v_look.retry_us end;
        if v_retry_us is distinct from 0 and v_look.shadow then
          return (true, v_look.capacity - v_look.held, interval '0', duration(microseconds(v_look.lease)::bigint), v_look.capacity,
                  false, true)::ratelimit.hold;
        elsif v_retry_us is distinct from 0 then
          return (false, v_look.capacity - v_look.held, duration(v_retry_us), interval '0', v_look.capacity, false, false)::ratelimit.hold;
        end if;

      -- 3. The row of the key.
      else
        v_ends_at := v_now + duration(v_lease_us);
        if not v_renewed then
          v_held := v_held + v_cost;
        end if;
        if v_changes is null then
          v_next_changes := microseconds(v_now - timestamptz 'epoch')::bigint;
          insert into ephemeral_slots (policy_id, key, changes, held, counted_until, due_at)
          values (v_policy.id, v_key, v_next_changes, v_held, v_ends_at, v_now)  -- due at once: clean-up will postpone it
          on conflict on constraint ephemeral_slots_pkey do nothing;
        else
          update ephemeral_slots as s
             set changes       = v_changes + 1,
                 held          = v_held,
                 counted_until = least(v_until, v_ends_at),
                 due_at        = least(s.due_at, v_ends_at)
           where s.policy_id = v_policy.id
             and s.key       = v_key
             and s.changes   = v_changes;
        end if;
        v_written := found;
        v_seen_at := v_now;
        v_now     := clock();  -- it may have waited; if the clock went back, leases may be live that had ended
        exit when v_written and v_now >= v_seen_at and (v_until > v_now and (v_policy.calendar).ends_at > v_now) is not false;

        -- 4. The lock. A row that was written counts a lease that this call may not grant any more.
        if v_written then
          update ephemeral_slots as s
             set counted_until = '-infinity'
           where s.policy_id = v_policy.id
             and s.key       = v_key;
        else
          perform s.changes from ephemeral_slots as s
            where s.policy_id = v_policy.id
              and s.key       = v_key
              for update;
        end if;
      end if;
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
      v_now    := clock();
      v_policy := numbers_again(v_policy, v_key, v_now);
    end loop;

    -- 5. The lease.
    v_ends_at := v_now + duration(v_lease_us);
    if v_ended then
      delete from ephemeral_leases as l
       where l.policy_id = v_policy.id
         and l.key       = v_key
         and l.ends_at  <= v_now;
    end if;
    if v_renewed then
      update ephemeral_leases as l
         set ends_at = v_ends_at
       where l.policy_id = v_policy.id
         and l.key       = v_key
         and l.holder    = v_holder;
    else
      insert into ephemeral_leases (policy_id, key, holder, cost, ends_at)
      values (v_policy.id, v_key, v_holder, v_cost, v_ends_at);
    end if;
    return (true, v_policy.capacity - v_held, interval '0', duration(v_lease_us), v_policy.capacity, v_renewed, false)::ratelimit.hold;
  end;
$$;
comment on function ratelimit.hold_ephemeral(ratelimit.policies, text, text, bigint) is
  'The steps of ratelimit_hold for an ephemeral policy.';

create or replace function ratelimit.peek_slots(policy ratelimit.policies, key text, cost bigint, now timestamptz)
  returns ratelimit.decision
  language plpgsql
  stable
as $$
declare
  v_look record;
begin
  if policy.durable then
    select l.* into v_look from look_at_slots(policy, key, now, cost, null) as l;
  else
    select l.* into v_look from look_at_ephemeral_slots(policy, key, now, cost, null) as l;
  end if;
  return (coalesce(v_look.retry_us = 0, false), v_look.capacity - v_look.held, duration(v_look.retry_us), duration(v_look.reset_us),
          v_look.capacity, false, false)::ratelimit.decision;
end;
$$;
comment on function ratelimit.peek_slots(ratelimit.policies, text, bigint, timestamptz) is
  'The steps of ratelimit_peek for slots.';

-- Begins the lease of a holder anew.
--
-- The steps:
--   1. A holder without a lease is answered at once: nothing is locked. A lease that has ended may have been renewed by a session that
--      has not committed yet.
--   2. The row of the key is written, which may wait. A holder that held then may not hold any more.
--   3. The lease is written, if it has not ended.
-- So a renewal that comes after a release takes nothing, in whatever order they run.
create or replace function ratelimit_renew(policy text, key text, holder text)
  returns interval
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if (is_name(key) and is_name(holder)) is not true then
    perform check_hold(policy, key, holder, 1);  -- raises 22023
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_slots(policy);
  end if;
  if (v_policy.calendar).lease is null then
    perform refuse_tokens(policy);  -- raises 22023
  end if;
  if not v_policy.durable then
    return renew_ephemeral(v_policy, key, holder);  -- what follows, on the twin tables
  end if;

  declare
    v_key      text collate "C" := key;
    v_holder   text collate "C" := holder;
    v_now      timestamptz := clock();
    v_ends_at  timestamptz;
    v_earlier  timestamptz;  -- the end of the lease by the clock and the numbers before the wait
    v_lease_us bigint;
    v_locked   boolean;
    v_override ratelimit.overrides;
  begin
    if (v_policy.calendar).overridden then
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_lease_us := microseconds((v_policy.calendar).lease)::bigint;

    -- 1. Has it a lease?
    perform l.cost from leases as l
      where l.policy_id = v_policy.id
        and l.key       = v_key
        and l.holder    = v_holder;
    if found then
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006

      -- 2. The row of the key.
      v_earlier := v_now + duration(v_lease_us);
      update slots as s
         set changes       = s.changes + 1,
             counted_until = least(s.counted_until, v_earlier),
             due_at        = least(s.due_at, v_earlier)
       where s.policy_id = v_policy.id
         and s.key       = v_key;
      v_locked := found;  -- or clean-up has removed the row, and with it the lease

      -- 3. The lease, by the clock and the numbers of now.
      v_now := clock();
      if (v_policy.calendar).ends_at <= v_now then
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_lease_us := microseconds((v_policy.calendar).lease)::bigint;
      end if;
      v_ends_at := v_now + duration(v_lease_us);
      if v_ends_at < v_earlier then  -- the clock went back, or an override with a longer lease has ended
        update slots as s
           set counted_until = '-infinity'
         where s.policy_id = v_policy.id
           and s.key       = v_key;
      end if;
      update leases as l
         set ends_at = v_ends_at
       where v_locked
         and l.policy_id = v_policy.id
         and l.key       = v_key
         and l.holder    = v_holder
         and l.ends_at   > v_now;
    end if;
    return case when found or v_policy.shadow then duration(v_lease_us) end;
  end;
end;
$$;
comment on function ratelimit_renew(text, text, text) is
'Begins the lease of a holder anew, and returns how long it holds now: the lease.
null: the holder does not hold, or not any more. Its lease has ended or was released, and what it does must stop. It never holds by
  a renewal.
A shadow policy returns the lease to a holder that does not hold, too.
Errors: 22023 for a bad argument and for a policy without a lease, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the row of the key until the transaction ends. If the holder has no lease, the call locks nothing.
Writes: the row of the key and the lease. If the holder has no lease, the call writes nothing.
Role: application.';

create or replace function ratelimit.renew_ephemeral(v_policy ratelimit.policies, key text, holder text)
  returns interval
  language plpgsql
  volatile
as $$
  declare
    v_key      text collate "C" := key;
    v_holder   text collate "C" := holder;
    v_now      timestamptz := clock();
    v_ends_at  timestamptz;
    v_earlier  timestamptz;  -- the end of the lease by the clock and the numbers before the wait
    v_lease_us bigint;
    v_locked   boolean;
    v_override ratelimit.overrides;
  begin
    if (v_policy.calendar).overridden then
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_lease_us := microseconds((v_policy.calendar).lease)::bigint;

    -- 1. Has it a lease?
    perform l.cost from ephemeral_leases as l
      where l.policy_id = v_policy.id
        and l.key       = v_key
        and l.holder    = v_holder;
    if found then
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006

      -- 2. The row of the key.
      v_earlier := v_now + duration(v_lease_us);
      update ephemeral_slots as s
         set changes       = s.changes + 1,
             counted_until = least(s.counted_until, v_earlier),
             due_at        = least(s.due_at, v_earlier)
       where s.policy_id = v_policy.id
         and s.key       = v_key;
      v_locked := found;  -- or clean-up has removed the row, and with it the lease

      -- 3. The lease, by the clock and the numbers of now.
      v_now := clock();
      if (v_policy.calendar).ends_at <= v_now then
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_lease_us := microseconds((v_policy.calendar).lease)::bigint;
      end if;
      v_ends_at := v_now + duration(v_lease_us);
      if v_ends_at < v_earlier then  -- the clock went back, or an override with a longer lease has ended
        update ephemeral_slots as s
           set counted_until = '-infinity'
         where s.policy_id = v_policy.id
           and s.key       = v_key;
      end if;
      update ephemeral_leases as l
         set ends_at = v_ends_at
       where v_locked
         and l.policy_id = v_policy.id
         and l.key       = v_key
         and l.holder    = v_holder
         and l.ends_at   > v_now;
    end if;
    return case when found or v_policy.shadow then duration(v_lease_us) end;
  end;
$$;
comment on function ratelimit.renew_ephemeral(ratelimit.policies, text, text) is
  'The steps of ratelimit_renew for an ephemeral policy.';

-- Ends the lease of a holder. The steps are those of ratelimit_renew: 1. has it a lease? 2. the row of the key, 3. the lease.
create or replace function ratelimit_release(policy text, key text, holder text)
  returns boolean
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if (is_name(key) and is_name(holder)) is not true then
    perform check_hold(policy, key, holder, 1);  -- raises 22023
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_slots(policy);
  end if;
  if (v_policy.calendar).lease is null then
    perform refuse_tokens(policy);  -- raises 22023
  end if;
  if not v_policy.durable then
    return release_ephemeral(v_policy, key, holder);  -- what follows, on the twin tables
  end if;

  declare
    v_key      text collate "C" := key;
    v_holder   text collate "C" := holder;
    v_now      timestamptz := clock();
    v_cost     integer;
    v_released integer;  -- the cost of the lease that is deleted; null if none is
  begin
    -- 1. Has it a lease? One that has ended may have been renewed by a session that has not committed yet.
    select l.cost
      into v_cost
      from leases as l
     where l.policy_id = v_policy.id
       and l.key       = v_key
       and l.holder    = v_holder;
    if not found then
      return false;
    end if;
    if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006

    -- 2. The row of the key.
    update slots as s
       set changes = s.changes + 1,
           held    = s.held - v_cost,
           due_at  = least(s.due_at, v_now)  -- nobody may hold now: clean-up looks at it in five minutes or later
     where s.policy_id = v_policy.id
       and s.key       = v_key;
    if not found then
      return false;  -- clean-up has removed the row, and with it the lease
    end if;

    -- 3. The lease, by the clock of now.
    v_now := clock();
    delete from leases as l
     where l.policy_id = v_policy.id
       and l.key       = v_key
       and l.holder    = v_holder
       and l.ends_at   > v_now
    returning l.cost into v_released;
    if v_released is distinct from v_cost then  -- the lease has ended, or was another one by then
      update slots as s
         set counted_until = '-infinity'
       where s.policy_id = v_policy.id
         and s.key       = v_key;
    end if;
    return v_released is not null;
  end;
end;
$$;
comment on function ratelimit_release(text, text, text) is
'Gives the slots of a holder back, and returns true if it held them until now.
It is safe to repeat.
Errors: 22023 for a bad argument and for a policy without a lease, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the row of the key until the transaction ends. If the holder has no lease, the call locks nothing.
Writes: the row of the key; deletes the lease. If the holder has no lease, the call writes nothing.
Role: application.';

create or replace function ratelimit.release_ephemeral(v_policy ratelimit.policies, key text, holder text)
  returns boolean
  language plpgsql
  volatile
as $$
  declare
    v_key      text collate "C" := key;
    v_holder   text collate "C" := holder;
    v_now      timestamptz := clock();
    v_cost     integer;
    v_released integer;  -- the cost of the lease that is deleted; null if none is
  begin
    -- 1. Has it a lease? One that has ended may have been renewed by a session that has not committed yet.
    select l.cost
      into v_cost
      from ephemeral_leases as l
     where l.policy_id = v_policy.id
       and l.key       = v_key
       and l.holder    = v_holder;
    if not found then
      return false;
    end if;
    if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006

    -- 2. The row of the key.
    update ephemeral_slots as s
       set changes = s.changes + 1,
           held    = s.held - v_cost,
           due_at  = least(s.due_at, v_now)  -- nobody may hold now: clean-up looks at it in five minutes or later
     where s.policy_id = v_policy.id
       and s.key       = v_key;
    if not found then
      return false;  -- clean-up has removed the row, and with it the lease
    end if;

    -- 3. The lease, by the clock of now.
    v_now := clock();
    delete from ephemeral_leases as l
     where l.policy_id = v_policy.id
       and l.key       = v_key
       and l.holder    = v_holder
       and l.ends_at   > v_now
    returning l.cost into v_released;
    if v_released is distinct from v_cost then  -- the lease has ended, or was another one by then
      update ephemeral_slots as s
         set counted_until = '-infinity'
       where s.policy_id = v_policy.id
         and s.key       = v_key;
    end if;
    return v_released is not null;
  end;
$$;
comment on function ratelimit.release_ephemeral(ratelimit.policies, text, text) is
  'The steps of ratelimit_release for an ephemeral policy.';

-- The rows of ratelimit_holders. That has columns named like its arguments, which PL/pgSQL refuses. A standby has a statement of its own,
-- as in status.sql.
create or replace function ratelimit.leases_of(in of_policy text, in of_key text, in at_most integer,
    out policy text, out key text, out holder text, out cost bigint, out held_for interval)
  returns setof record
  language plpgsql
  stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name text collate "C" := of_policy;
  v_key  text collate "C" := of_key;
  v_now  constant timestamptz := clock();
begin
  if not pg_is_in_recovery() then
    return query
      select s.name, s.key, s.holder, s.cost::bigint,
             duration(least(microseconds(s.ends_at - v_now), microseconds(s.lease))::bigint)
        from (select p.name, l.key, l.holder, l.cost, l.ends_at, coalesce((o.calendar).lease, (p.calendar).lease) as lease
                from policies as p
                join (table leases union all table ephemeral_leases) as l on l.policy_id = p.id
                left join overrides as o on (p.calendar).overridden and o.policy_id = p.id and o.key = l.key and o.expires_at > v_now
               where l.ends_at > v_now
                 and (v_name is null or p.name = v_name)
                 and (v_key is null or l.key = v_key)
               order by p.name, l.key, l.ends_at, l.holder
               limit at_most) as s
       order by s.name, s.key, s.ends_at, s.holder;
  else
    perform refuse_ephemeral(v_name);  -- raises 0A000
    return query
      select s.name, s.key, s.holder, s.cost::bigint,
             duration(least(microseconds(s.ends_at - v_now), microseconds(s.lease))::bigint)
        from (select p.name, l.key, l.holder, l.cost, l.ends_at, coalesce((o.calendar).lease, (p.calendar).lease) as lease
                from policies as p
                join leases as l on l.policy_id = p.id
                left join overrides as o on (p.calendar).overridden and o.policy_id = p.id and o.key = l.key and o.expires_at > v_now
               where l.ends_at > v_now
                 and (v_name is null or p.name = v_name)
                 and (v_key is null or l.key = v_key)
               order by p.name, l.key, l.ends_at, l.holder
               limit at_most) as s
       order by s.name, s.key, s.ends_at, s.holder;
  end if;
end;
$$;
comment on function ratelimit.leases_of(text, text, integer) is
  'The leases that have not ended, at most at_most of them, by policy, key and end.';

create or replace function ratelimit_holders(policy text default null, key text default null, max_rows integer default 1000)
  returns table (policy text, key text, holder text, cost bigint, held_for interval)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $2, $3);
  select * from leases_of($1, $2, $3)
$$;
comment on function ratelimit_holders(text, text, integer) is
'Lists who holds slots, by policy, key and the end of the lease.
On a standby it lists durable policies only.
policy: null lists the holders of all policies.
key: null lists the holders of all keys.
max_rows: 1 or more.
cost: slots.
held_for: how long the lease lasts, the lease of the key at most.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 0A000 for an ephemeral policy on a standby.
Locks: nothing.
Writes: nothing.
Role: administrator.';

-- The rows of ratelimit_status about slots: keys that somebody holds, those with the smallest share of free slots first. An override that
-- ends is an instant without a lease: its rows have cost 0.
create or replace function ratelimit.fullest_slots(in of_policy text, in of_key text, in at_most integer,
    out policy text, out key text, out remaining bigint, out retry_after interval, out reset_after interval, out capacity bigint,
    out overridden boolean, out share numeric)
  returns setof record
  language plpgsql
  stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name text collate "C" := of_policy;
  v_key  text collate "C" := of_key;
  v_now  constant timestamptz := clock();
begin
  if not pg_is_in_recovery() then
    return query
      select s.name, s.key, s.capacity - s.held, duration(case when s.held < s.capacity then 0 when s.first is not null then least(microseconds(s.first - v_now), 3155760000000000000) end::bigint),
             duration(microseconds(s.last - v_now)::bigint), s.capacity, s.overridden, (s.capacity - s.held)::numeric / greatest(s.capacity, 1) as share
        from (select u.name, u.key, u.capacity, u.overridden, sum(u.cost) as held, max(u.at) filter (where u.cost > 0) as last,
                     min(u.at) filter (where u.later < case when u.at >= u.ends_at then u.own_capacity else u.capacity end) as first
                from (select p.name, l.key, e.cost, e.at, o.expires_at as ends_at, p.capacity as own_capacity,
                             coalesce(o.capacity, p.capacity) as capacity, o.key is not null as overridden,
                             coalesce(sum(e.cost) over (partition by l.policy_id, l.key order by e.at desc
                                                        groups between unbounded preceding and 1 preceding), 0) as later
                        from policies as p
                        join (table leases union all table ephemeral_leases) as l on l.policy_id = p.id
                        left join overrides as o on (p.calendar).overridden and o.policy_id = p.id and o.key = l.key and o.expires_at > v_now
                       cross join lateral (values (l.ends_at, l.cost), (nullif(o.expires_at, 'infinity'), 0)) as e (at, cost)
                       where l.ends_at > v_now
                         and e.at is not null
                         and (v_name is null or p.name = v_name)
                         and (v_key is null or l.key = v_key)) as u
               group by u.name, u.key, u.capacity, u.overridden) as s
       order by share, s.name, s.key
       limit at_most;
  else
    return query
      select s.name, s.key, s.capacity - s.held, duration(case when s.held < s.capacity then 0 when s.first is not null then least(microseconds(s.first - v_now), 3155760000000000000) end::bigint),
             duration(microseconds(s.last - v_now)::bigint), s.capacity, s.overridden, (s.capacity - s.held)::numeric / greatest(s.capacity, 1) as share
        from (select u.name, u.key, u.capacity, u.overridden, sum(u.cost) as held, max(u.at) filter (where u.cost > 0) as last,
                     min(u.at) filter (where u.later < case when u.at >= u.ends_at then u.own_capacity else u.capacity end) as first
                from (select p.name, l.key, e.cost, e.at, o.expires_at as ends_at, p.capacity as own_capacity,
                             coalesce(o.capacity, p.capacity) as capacity, o.key is not null as overridden,
                             coalesce(sum(e.cost) over (partition by l.policy_id, l.key order by e.at desc
                                                        groups between unbounded preceding and 1 preceding), 0) as later
                        from policies as p
                        join leases as l on l.policy_id = p.id
                        left join overrides as o on (p.calendar).overridden and o.policy_id = p.id and o.key = l.key and o.expires_at > v_now
                       cross join lateral (values (l.ends_at, l.cost), (nullif(o.expires_at, 'infinity'), 0)) as e (at, cost)
                       where l.ends_at > v_now
                         and e.at is not null
                         and (v_name is null or p.name = v_name)
                         and (v_key is null or l.key = v_key)) as u
               group by u.name, u.key, u.capacity, u.overridden) as s
       order by share, s.name, s.key
       limit at_most;
  end if;
end;
$$;
comment on function ratelimit.fullest_slots(text, text, integer) is
  'The keys of slots that somebody holds, the fullest first, at most at_most of them.';


-- Spend now, know later; wait in line; take what is there.
-- Takes cost tokens from one bucket, whatever it holds.
--
-- The steps:
--   1. A live idempotency key is replayed.
--   2. The bucket is locked. One without a row is full, and is created first.
--   3. The idempotency key is remembered, with the tokens that the charge takes: one that is cut at the floor is settled against that. If
--      another session has stored the key meanwhile, step 1 follows.
--   4. The level moves. So nothing that was moved is ever moved back.
create or replace function ratelimit_charge(
    policy          text,
    key             text,
    cost            bigint,
    idempotency_key text default null)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if not acceptable(key, cost) or cost > 9000000000000 or is_name(idempotency_key) is false then
    perform check_charge(policy, key, cost, idempotency_key);  -- raises 22023
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  if not v_policy.durable then
    return charge_ephemeral(v_policy, key, cost, idempotency_key);  -- what follows, on the twin tables
  end if;

  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_level           bigint;       -- microtokens in the bucket
    v_stored          bigint;       -- what the row of a quota has for that
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_held            bigint;       -- what the bucket held before the charge
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the charge that is remembered under the idempotency key
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).lease is not null then
        perform refuse_slots(v_policy.name);  -- raises 22023
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    if v_cost = 0 then
      select n.level, n.reset_us into v_level, v_reset_us from bucket_now(v_policy, v_key, v_now) as n;
      return spent_of(v_level, v_reset_us, v_policy.capacity, false);
    end if;

    loop
      -- 1. The idempotency key.
      if v_idempotency_key is not null then
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if v_first.cost <> v_cost then
            perform refuse_repeat(v_first, v_cost);  -- raises RL002
          end if;
          return replay_of(v_first);
        end if;
      end if;

      -- 2. The bucket.
      loop
        select b.level, b.refilled_at into v_level, v_refilled_at
          from buckets as b
         where b.policy_id = v_policy.id
           and b.key       = v_key
           for update;
        v_has_row := found;
        v_now     := clock();  -- the lock may have waited
        if v_policy.overridden or not v_has_row then
          v_policy := numbers_again(v_policy, v_key, v_now);
          if (v_policy.calendar).period is not null then
            v_level := level_now(v_level, v_refilled_at, v_now, v_policy);
          end if;
        end if;
        exit when v_has_row;
        v_level       := microtokens(v_policy.capacity);
        v_refilled_at := v_now;
        insert into buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, stored_level(v_level, v_policy), v_refilled_at, v_now)  -- due at once: clean-up will postpone it
        on conflict on constraint buckets_pkey do nothing;
        v_has_row := found;
        exit when v_has_row;
      end loop;

      -- 3. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
      v_held        := refilled(v_level, v_refilled_at, v_now, v_policy);
      v_level       := moved_level(v_held, -microtokens(v_cost), v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
      v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
      v_reset_us    := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
      if (v_policy.calendar).ends_at is not null then
        if (v_policy.calendar).period is not null then
          v_level  := greatest(v_level, lowest_level_of_quota(v_policy.capacity));
          v_stored := v_level - microtokens(v_policy.capacity);
        end if;
        v_reset_us := wait_past_end(null, coalesce(v_stored, v_level), v_refilled_at, v_now, v_policy, own_numbers(v_policy));
      end if;
      exit when v_idempotency_key is null;
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, taken, remaining, reset_after, capacity, expires_at, granted_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost, nullif(v_held - v_level, microtokens(v_cost)),
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us),
              case when (v_policy.calendar).period is not null then v_now end)
      on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      exit when found;
    end loop;

    -- 4. The level.
    update buckets as b
       set level = coalesce(v_stored, v_level), refilled_at = v_refilled_at, room = null
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  end;
end;
$$;
comment on function ratelimit_charge(text, text, bigint, text) is
'Takes cost tokens from one bucket whatever the bucket holds.
It is for usage that is known only afterwards. allowed is always true.
Tokens that the bucket does not hold are debt: remaining goes below zero, and refill pays the debt first. Debt ends at
  a floor: 9000000000000 tokens, or the refill of 10000 years if that is less and not 0. Of a quota at most 9000000000000
  tokens are used. The rest of a charge that
  reaches the floor is dropped.
A repeat under a live idempotency key gets the first answer and takes nothing, also after a settlement.
cost: whole tokens, 0 to 9000000000000. A cost of 0 takes nothing and ignores the idempotency key.
idempotency_key: as in ratelimit_acquire.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key that was granted with
  another cost, 25006 in a read-only transaction.
Locks: the bucket row, and then the row of the idempotency key, until the transaction ends. A cost of 0 locks nothing.
  A replay locks nothing, unless it ran beside the first request.
Writes: the bucket and the idempotency key. A replay and a cost of 0 take nothing and write no level.
Role: application.';

create or replace function ratelimit.charge_ephemeral(v_policy ratelimit.policies, key text, cost bigint, idempotency_key text)
  returns ratelimit.decision
  language plpgsql
  volatile
as $$
  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_level           bigint;       -- microtokens in the bucket
    v_stored          bigint;       -- what the row of a quota has for that
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_held            bigint;       -- what the bucket held before the charge
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the charge that is remembered under the idempotency key
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).lease is not null then
        perform refuse_slots(v_policy.name);  -- raises 22023
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    if v_cost = 0 then
      select n.level, n.reset_us into v_level, v_reset_us from bucket_now(v_policy, v_key, v_now) as n;
      return spent_of(v_level, v_reset_us, v_policy.capacity, false);
    end if;

    loop
      -- 1. The idempotency key.
      if v_idempotency_key is not null then
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if v_first.cost <> v_cost then
            perform refuse_repeat(v_first, v_cost);  -- raises RL002
          end if;
          return replay_of(v_first);
        end if;
      end if;

      -- 2. The bucket.
      loop
        select b.level, b.refilled_at into v_level, v_refilled_at
          from ephemeral_buckets as b
         where b.policy_id = v_policy.id
           and b.key       = v_key
           for update;
        v_has_row := found;
        v_now     := clock();  -- the lock may have waited
        if v_policy.overridden or not v_has_row then
          v_policy := numbers_again(v_policy, v_key, v_now);
          if (v_policy.calendar).period is not null then
            v_level := level_now(v_level, v_refilled_at, v_now, v_policy);
          end if;
        end if;
        exit when v_has_row;
        v_level       := microtokens(v_policy.capacity);
        v_refilled_at := v_now;
        insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, stored_level(v_level, v_policy), v_refilled_at, v_now)  -- due at once: clean-up will postpone it
        on conflict on constraint ephemeral_buckets_pkey do nothing;
        v_has_row := found;
        exit when v_has_row;
      end loop;

      -- 3. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
      v_held        := refilled(v_level, v_refilled_at, v_now, v_policy);
      v_level       := moved_level(v_held, -microtokens(v_cost), v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
      v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
      v_reset_us    := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
      if (v_policy.calendar).ends_at is not null then
        if (v_policy.calendar).period is not null then
          v_level  := greatest(v_level, lowest_level_of_quota(v_policy.capacity));
          v_stored := v_level - microtokens(v_policy.capacity);
        end if;
        v_reset_us := wait_past_end(null, coalesce(v_stored, v_level), v_refilled_at, v_now, v_policy, own_numbers(v_policy));
      end if;
      exit when v_idempotency_key is null;
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, taken, remaining, reset_after, capacity, expires_at, granted_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost, nullif(v_held - v_level, microtokens(v_cost)),
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us),
              case when (v_policy.calendar).period is not null then v_now end)
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      exit when found;
    end loop;

    -- 4. The level.
    update ephemeral_buckets as b
       set level = coalesce(v_stored, v_level), refilled_at = v_refilled_at, room = null
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  end;
$$;
comment on function ratelimit.charge_ephemeral(ratelimit.policies, text, bigint, text) is
  'The steps of ratelimit_charge for an ephemeral policy.';

-- Replaces the cost of a grant by the real one, exactly once.
--
-- The steps:
--   1. The grant is read.
--   2. The bucket is locked. One without a row is full, and is created first: without a lock, others would see a grant that
--      is not settled yet beside a level that this settlement did not.
--   3. The grant is marked as settled. If it is no longer as it was read, step 1 follows.
--   4. The level moves. So no move is ever undone; one that was cut at full could not be.
create or replace function ratelimit_settle(
    policy          text,
    key             text,
    idempotency_key text,
    cost            bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if not acceptable(key, cost) or cost > 9000000000000 or is_name(idempotency_key) is not true then
    perform check_charge(policy, key, cost, idempotency_key);  -- raises 22023
    perform check_name('idempotency_key', idempotency_key);    -- likewise
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  if not v_policy.durable then
    return settle_ephemeral(v_policy, key, idempotency_key, cost);  -- what follows, on the twin tables
  end if;

  declare
    v_key             text collate "C" := key;
    v_idempotency_key text collate "C" := idempotency_key;
    v_cost            alias for cost;
    v_now             timestamptz := clock();
    v_level           bigint;       -- microtokens in the bucket
    v_stored          bigint;       -- what the row of a quota has for that
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_back            bigint;       -- microtokens that the settlement gives back; below zero: that it takes
    v_first           ratelimit.idempotency_keys;  -- the grant
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).lease is not null then
        perform refuse_slots(v_policy.name);  -- raises 22023
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    loop
      -- 1. The grant. A shadow policy looks for it again after the bucket was read: a grant that was committed meanwhile is in the
      --    level that was read, and so must be found.
      select k.* into v_first
        from idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if (v_first.expires_at > v_now) is not true then
        if not v_policy.shadow then
          perform no_grant(v_policy.name, v_idempotency_key);  -- raises RL003
        end if;
        select n.level, n.reset_us into v_level, v_reset_us from bucket_now(v_policy, v_key, v_now) as n;
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if (v_first.expires_at > v_now) is not true then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
      end if;
      if v_first.settled is not null then
        if v_first.settled <> v_cost then
          perform another_cost(format('%L was settled with cost %s and is settled again with cost %s.', v_idempotency_key, v_first.settled, v_cost),
                               'The first settlement stands: charge or refund the difference.');
        end if;
        select n.level, n.reset_us into v_level, v_reset_us from bucket_now(v_policy, v_key, v_now) as n;
        return spent_of(v_level, v_reset_us, v_policy.capacity, true);
      end if;
      v_back := coalesce(v_first.taken, microtokens(v_first.cost)) - microtokens(v_cost);

      -- 2. The bucket.
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
      loop
        select b.level, b.refilled_at into v_level, v_refilled_at
          from buckets as b
         where b.policy_id = v_policy.id
           and b.key       = v_key
           for update;
        v_has_row := found;
        v_now     := clock();  -- the lock may have waited
        if v_policy.overridden or not v_has_row then
          v_policy := numbers_again(v_policy, v_key, v_now);
          if (v_policy.calendar).period is not null then
            v_level := level_now(v_level, v_refilled_at, v_now, v_policy);
            if v_back > 0 and v_first.granted_at < (v_policy.calendar).turned_at then
              v_back := 0;  -- the period of the grant is over
            end if;
          end if;
        end if;
        exit when v_has_row;
        v_level       := microtokens(v_policy.capacity);
        v_refilled_at := v_now;
        insert into buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, stored_level(v_level, v_policy), v_refilled_at, v_now)  -- due at once: clean-up will postpone it
        on conflict on constraint buckets_pkey do nothing;
        v_has_row := found;
        exit when v_has_row;
      end loop;

      -- 3. The mark, if the grant is still as it was read.
      update idempotency_keys as k
         set settled = v_cost
       where k.policy_id       = v_policy.id
         and k.key             = v_key
         and k.idempotency_key = v_idempotency_key
         and k.settled is null
         and k.cost            = v_first.cost
         and k.expires_at      = v_first.expires_at
         and k.expires_at      > v_now;
      exit when found;
    end loop;

    -- 4. The level.
    v_level       := moved_level(refilled(v_level, v_refilled_at, v_now, v_policy), v_back,
                                 v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
    v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
    v_reset_us    := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
    if (v_policy.calendar).ends_at is not null then
      if (v_policy.calendar).period is not null then
        v_level  := greatest(v_level, lowest_level_of_quota(v_policy.capacity));
        v_stored := v_level - microtokens(v_policy.capacity);
      end if;
      v_reset_us := wait_past_end(null, coalesce(v_stored, v_level), v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;
    update buckets as b
       set level = coalesce(v_stored, v_level), refilled_at = v_refilled_at, room = null
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  end;
end;
$$;
comment on function ratelimit_settle(text, text, text, bigint) is
'Replaces the cost of a grant by the real cost, exactly once.
Any function that takes an idempotency key can have made the grant. The level moves by the old cost minus the real
  one: up to full at most, and down to the floor of debt (see ratelimit_charge). allowed is always true, and the rest
  is the bucket after the settlement.
The first settlement stands. A repeat with the same cost has replayed true and changes nothing.
After a settlement any request under the key fails with RL004, but a charge is replayed.
What the grant of a quota took too much is not given back once its period is over.
Under a shadow policy a missing grant is no error: nothing is charged, and shadowed is true.
idempotency_key: the key of the grant.
cost: the real cost in whole tokens, 0 to 9000000000000.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a grant that was settled with another cost,
  RL003 if the transaction sees no live grant under the key, 25006 in a read-only transaction.
Locks: the bucket row, which is created if the bucket has none, and then the row of the idempotency key, until the
  transaction ends. A replay locks nothing, unless it ran beside the first settlement.
Writes: the bucket and the idempotency key. A replay changes nothing.
Role: application.';

create or replace function ratelimit.settle_ephemeral(v_policy ratelimit.policies, key text, idempotency_key text, cost bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
as $$
  declare
    v_key             text collate "C" := key;
    v_idempotency_key text collate "C" := idempotency_key;
    v_cost            alias for cost;
    v_now             timestamptz := clock();
    v_level           bigint;       -- microtokens in the bucket
    v_stored          bigint;       -- what the row of a quota has for that
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_back            bigint;       -- microtokens that the settlement gives back; below zero: that it takes
    v_first           ratelimit.idempotency_keys;  -- the grant
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).lease is not null then
        perform refuse_slots(v_policy.name);  -- raises 22023
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    loop
      -- 1. The grant. A shadow policy looks for it again after the bucket was read: a grant that was committed meanwhile is in the
      --    level that was read, and so must be found.
      select k.* into v_first
        from ephemeral_idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if (v_first.expires_at > v_now) is not true then
        if not v_policy.shadow then
          perform no_grant(v_policy.name, v_idempotency_key);  -- raises RL003
        end if;
        select n.level, n.reset_us into v_level, v_reset_us from bucket_now(v_policy, v_key, v_now) as n;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if (v_first.expires_at > v_now) is not true then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
      end if;
      if v_first.settled is not null then
        if v_first.settled <> v_cost then
          perform another_cost(format('%L was settled with cost %s and is settled again with cost %s.', v_idempotency_key, v_first.settled, v_cost),
                               'The first settlement stands: charge or refund the difference.');
        end if;
        select n.level, n.reset_us into v_level, v_reset_us from bucket_now(v_policy, v_key, v_now) as n;
        return spent_of(v_level, v_reset_us, v_policy.capacity, true);
      end if;
      v_back := coalesce(v_first.taken, microtokens(v_first.cost)) - microtokens(v_cost);

      -- 2. The bucket.
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
      loop
        select b.level, b.refilled_at into v_level, v_refilled_at
          from ephemeral_buckets as b
         where b.policy_id = v_policy.id
           and b.key       = v_key
           for update;
        v_has_row := found;
        v_now     := clock();  -- the lock may have waited
        if v_policy.overridden or not v_has_row then
          v_policy := numbers_again(v_policy, v_key, v_now);
          if (v_policy.calendar).period is not null then
            v_level := level_now(v_level, v_refilled_at, v_now, v_policy);
            if v_back > 0 and v_first.granted_at < (v_policy.calendar).turned_at then
              v_back := 0;  -- the period of the grant is over
            end if;
          end if;
        end if;
        exit when v_has_row;
        v_level       := microtokens(v_policy.capacity);
        v_refilled_at := v_now;
        insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, stored_level(v_level, v_policy), v_refilled_at, v_now)  -- due at once: clean-up will postpone it
        on conflict on constraint ephemeral_buckets_pkey do nothing;
        v_has_row := found;
        exit when v_has_row;
      end loop;

      -- 3. The mark, if the grant is still as it was read.
      update ephemeral_idempotency_keys as k
         set settled = v_cost
       where k.policy_id       = v_policy.id
         and k.key             = v_key
         and k.idempotency_key = v_idempotency_key
         and k.settled is null
         and k.cost            = v_first.cost
         and k.expires_at      = v_first.expires_at
         and k.expires_at      > v_now;
      exit when found;
    end loop;

    -- 4. The level.
    v_level       := moved_level(refilled(v_level, v_refilled_at, v_now, v_policy), v_back,
                                 v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
    v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
    v_reset_us    := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
    if (v_policy.calendar).ends_at is not null then
      if (v_policy.calendar).period is not null then
        v_level  := greatest(v_level, lowest_level_of_quota(v_policy.capacity));
        v_stored := v_level - microtokens(v_policy.capacity);
      end if;
      v_reset_us := wait_past_end(null, coalesce(v_stored, v_level), v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;
    update ephemeral_buckets as b
       set level = coalesce(v_stored, v_level), refilled_at = v_refilled_at, room = null
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  end;
$$;
comment on function ratelimit.settle_ephemeral(ratelimit.policies, text, text, bigint) is
  'The steps of ratelimit_settle for an ephemeral policy.';

-- Takes cost tokens from one bucket now, if it will have them within max_wait, and returns how long to wait before acting.
-- With max_wait 0 it decides as ratelimit_acquire does.
--
-- The wait is until the debt is paid that the reservation leaves: then the level is 0 or more, and a microsecond earlier it
-- is not.
--
-- The steps are those of ratelimit_acquire, but for two. The update of step 2 takes the tokens if the bucket will have them
-- within max_wait; it leaves that open if it is a matter of the last microtoken. So if the bucket was read in step 3, and the
-- cost fits, step 3c takes the tokens from the bucket as it was read. If another session has changed it since, step 2 is
-- repeated.
--
-- The wait counts from the clock after the update, which may have waited for another session. Other times count as those of
-- ratelimit_acquire.
-- Locks and writes are those of ratelimit_acquire.
create or replace function ratelimit_reserve(
    policy          text,
    key             text,
    max_wait        interval,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.reservation
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if not acceptable(key, cost) or is_max_wait(max_wait) is not true or idempotency_key is not null then
    if (acceptable(key, cost) and is_max_wait(max_wait) and is_name(idempotency_key) is not false) is not true then
      perform check_request(policy, key, cost, idempotency_key);  -- raises 22023
      perform check_max_wait(max_wait);                           -- likewise
    end if;
    if cost = 0 then
      idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  if not v_policy.durable then
    return reserve_ephemeral(v_policy, key, max_wait, cost, idempotency_key);  -- what follows, on the twin tables
  end if;

  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_until           timestamptz;  -- when the wait must be over
    v_wanted          bigint;       -- cost in microtokens; 0 if nothing can be taken
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_seen_level      bigint;       -- the row as it was read
    v_seen_at         timestamptz;  -- likewise
    v_wait_us         bigint;       -- microseconds until the debt is paid that cost would leave; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_ready_at        timestamptz;  -- when the grant holds; null: at once
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_rounds          integer;
    v_override        ratelimit.overrides;
    v_own             ratelimit.policies;  -- the policy without the numbers of the override
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return reservation_by(take_quota_of_buckets(v_policy, v_key, v_cost, v_cost, v_idempotency_key));
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_own    := v_policy;
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;

    -- 1. The idempotency key.
    if v_idempotency_key is not null then
      select k.* into v_first
        from idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update. max_wait counts without days, which may have 23 or 25 hours. The update rounds the refill down to whole
      --    microtokens, so the debt may be paid a microtoken later than the bucket as it was would have covered the cost: the
      --    bucket counts for one less. That the debt ends above the floor shows in the stored level.
      --    Where an override ends within max_wait, step 3c decides.
      v_until := v_now + date_part('epoch', max_wait) * interval '1 second';
      if v_wanted > 0 and ((v_policy.calendar).ends_at <= v_until) is not true then
        update buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level - 1, b.refilled_at, v_until, v_policy) >= v_wanted
           and b.level     >= v_wanted - deepest_debt()
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy),
             b.level, b.refilled_at
        into v_level, v_reset_us, v_seen_level, v_seen_at
        from buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_wanted   := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
        v_level    := microtokens(v_policy.capacity);
        v_reset_us := 0;
      end if;
      v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
      v_wait_us     := case
                         when v_cost = 0 then 0::bigint
                         when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), v_level, v_refilled_at, v_now, v_policy)
                       end;
      if (v_policy.calendar).ends_at is not null then
        v_own      := own_numbers(v_policy);
        v_reset_us := wait_past_end(null, v_seen_level, v_seen_at, v_now, v_policy, v_own);
        if v_wanted = 0 or not v_has_row then
          v_wait_us := case when v_cost = 0 then 0 else wait_past_end(v_cost, v_seen_level, v_seen_at, v_now, v_policy, v_own) end;
        else  -- as the row will be stored
          v_wait_us := wait_past_end(v_cost, v_level, v_refilled_at, v_now, v_policy, v_own);
        end if;
      end if;

      -- 3a. Too long to wait, or too deep a debt.
      if v_wanted = 0
         or (v_wait_us <= microseconds(max_wait)
             and (v_wait_us = 0 or v_level::numeric - v_wanted >= floor_level(v_policy.gain, v_policy.every_us))) is not true then
        if v_idempotency_key is not null then
          select k.* into v_first
            from idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
          end if;
        end if;
        return reservation_of(v_cost = 0, v_level, v_wait_us, v_reset_us, v_policy.capacity, v_policy.shadow);
      end if;

      -- 3b. No row. The insert may wait for a session that creates the same one.
      v_level := v_level - v_wanted;
      if not v_has_row then
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint buckets_pkey do nothing;
        exit when found;

      -- 3c. From the bucket as it was read.
      else
        update buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- Again. Each round is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, v_own);
      if v_level < 0 then
        v_ready_at := v_now + duration(wait_past_end(0, v_level, v_refilled_at, v_now, v_policy, v_own));
      end if;
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      if v_level < 0 then
        v_ready_at := coalesce(v_ready_at, v_refilled_at + duration(short_wait(0, v_level, 0, v_policy)));
      end if;
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, ready_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity,
              coalesce(v_ready_at, v_now) + duration(v_policy.remember_us), v_ready_at)
      on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    -- The update may have waited, so the clock is read again: nobody waits longer than until the debt is paid.
    if v_level < 0 then
      if (v_policy.calendar).ends_at is not null then
        return waiting_of(v_level, greatest(0, microseconds(v_ready_at - clock()))::double precision, v_reset_us, v_policy.capacity, v_policy.shadow);
      end if;
      return waiting_of(v_level, greatest(0, time_below(0, v_level, microseconds(clock() - v_refilled_at), v_policy.every_us, v_policy.tick_us,
                                                         v_policy.tick_gain, v_policy.round_up))::double precision,
                        v_reset_us, v_policy.capacity, v_policy.shadow);
    end if;
    return reserved_of(v_level, v_reset_us, v_policy.capacity);
  end;
end;
$$;
comment on function ratelimit_reserve(text, text, interval, bigint, text) is
'Takes cost tokens now if the bucket will hold them within max_wait, and returns how long to wait before using them.
Tokens that are not there yet are debt, which refill pays. So callers are served in order: each waits for its own
  tokens and for the tokens of earlier callers. ratelimit_acquire is denied while there is debt.
A wait above max_wait, a debt below the floor (see ratelimit_charge), or a cost above the capacity that applies now is a
  denial and takes nothing.
A repeat under a live idempotency key has the rest of the wait. Until the wait is over ratelimit_acquire under the key
  is denied, with that rest as retry_after.
Tokens that are given back do not shorten the wait of earlier reservations.
A shadow policy returns wait 0.
A quota lends nothing of a period that has not begun: it grants with wait 0, or denies.
max_wait: 0 to 365 days, without months and years. 0 takes only tokens that the bucket holds now.
cost: as in ratelimit_acquire.
idempotency_key: as in ratelimit_acquire. The grant is remembered until remember after the end of the wait.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key that was granted with
  another cost, RL004 for a live idempotency key whose grant was settled, 25006 in a read-only transaction.
Locks: as ratelimit_acquire.
Writes: as ratelimit_acquire.
Role: application.';

create or replace function ratelimit.reserve_ephemeral(v_policy ratelimit.policies, key text, max_wait interval, cost bigint, idempotency_key text)
  returns ratelimit.reservation
  language plpgsql
  volatile
as $$
  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_until           timestamptz;  -- when the wait must be over
    v_wanted          bigint;       -- cost in microtokens; 0 if nothing can be taken
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_seen_level      bigint;       -- the row as it was read
    v_seen_at         timestamptz;  -- likewise
    v_wait_us         bigint;       -- microseconds until the debt is paid that cost would leave; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_ready_at        timestamptz;  -- when the grant holds; null: at once
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_rounds          integer;
    v_override        ratelimit.overrides;
    v_own             ratelimit.policies;  -- the policy without the numbers of the override
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return reservation_by(take_quota_of_ephemeral_buckets(v_policy, v_key, v_cost, v_cost, v_idempotency_key));
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_own    := v_policy;
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;

    -- 1. The idempotency key.
    if v_idempotency_key is not null then
      select k.* into v_first
        from ephemeral_idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update. max_wait counts without days, which may have 23 or 25 hours. The update rounds the refill down to whole
      --    microtokens, so the debt may be paid a microtoken later than the bucket as it was would have covered the cost: the
      --    bucket counts for one less. That the debt ends above the floor shows in the stored level.
      --    Where an override ends within max_wait, step 3c decides.
      v_until := v_now + date_part('epoch', max_wait) * interval '1 second';
      if v_wanted > 0 and ((v_policy.calendar).ends_at <= v_until) is not true then
        update ephemeral_buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level - 1, b.refilled_at, v_until, v_policy) >= v_wanted
           and b.level     >= v_wanted - deepest_debt()
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy),
             b.level, b.refilled_at
        into v_level, v_reset_us, v_seen_level, v_seen_at
        from ephemeral_buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_wanted   := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
        v_level    := microtokens(v_policy.capacity);
        v_reset_us := 0;
      end if;
      v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
      v_wait_us     := case
                         when v_cost = 0 then 0::bigint
                         when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), v_level, v_refilled_at, v_now, v_policy)
                       end;
      if (v_policy.calendar).ends_at is not null then
        v_own      := own_numbers(v_policy);
        v_reset_us := wait_past_end(null, v_seen_level, v_seen_at, v_now, v_policy, v_own);
        if v_wanted = 0 or not v_has_row then
          v_wait_us := case when v_cost = 0 then 0 else wait_past_end(v_cost, v_seen_level, v_seen_at, v_now, v_policy, v_own) end;
        else  -- as the row will be stored
          v_wait_us := wait_past_end(v_cost, v_level, v_refilled_at, v_now, v_policy, v_own);
        end if;
      end if;

      -- 3a. Too long to wait, or too deep a debt.
      if v_wanted = 0
         or (v_wait_us <= microseconds(max_wait)
             and (v_wait_us = 0 or v_level::numeric - v_wanted >= floor_level(v_policy.gain, v_policy.every_us))) is not true then
        if v_idempotency_key is not null then
          select k.* into v_first
            from ephemeral_idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
          end if;
        end if;
        return reservation_of(v_cost = 0, v_level, v_wait_us, v_reset_us, v_policy.capacity, v_policy.shadow);
      end if;

      -- 3b. No row. The insert may wait for a session that creates the same one.
      v_level := v_level - v_wanted;
      if not v_has_row then
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint ephemeral_buckets_pkey do nothing;
        exit when found;

      -- 3c. From the bucket as it was read.
      else
        update ephemeral_buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- Again. Each round is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, v_own);
      if v_level < 0 then
        v_ready_at := v_now + duration(wait_past_end(0, v_level, v_refilled_at, v_now, v_policy, v_own));
      end if;
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      if v_level < 0 then
        v_ready_at := coalesce(v_ready_at, v_refilled_at + duration(short_wait(0, v_level, 0, v_policy)));
      end if;
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, ready_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity,
              coalesce(v_ready_at, v_now) + duration(v_policy.remember_us), v_ready_at)
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update ephemeral_buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    -- The update may have waited, so the clock is read again: nobody waits longer than until the debt is paid.
    if v_level < 0 then
      if (v_policy.calendar).ends_at is not null then
        return waiting_of(v_level, greatest(0, microseconds(v_ready_at - clock()))::double precision, v_reset_us, v_policy.capacity, v_policy.shadow);
      end if;
      return waiting_of(v_level, greatest(0, time_below(0, v_level, microseconds(clock() - v_refilled_at), v_policy.every_us, v_policy.tick_us,
                                                         v_policy.tick_gain, v_policy.round_up))::double precision,
                        v_reset_us, v_policy.capacity, v_policy.shadow);
    end if;
    return reserved_of(v_level, v_reset_us, v_policy.capacity);
  end;
$$;
comment on function ratelimit.reserve_ephemeral(ratelimit.policies, text, interval, bigint, text) is
  'The steps of ratelimit_reserve for an ephemeral policy.';

-- Takes as many whole tokens as one bucket has, at_most, or none if it has fewer than at_least.
--
-- The steps are those of ratelimit_acquire for at_most tokens, but for one. If the update of step 2 took nothing, and the
-- bucket was read in step 3 and has at_least, step 3c takes its whole tokens, up to at_most, from the bucket as it was read. If another
-- session has changed it since, it is read again. So taken is what the locked row had. Locks and writes are those of ratelimit_acquire.
create or replace function ratelimit_acquire_up_to(
    policy          text,
    key             text,
    at_most         bigint,
    at_least        bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.partial_decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if (is_name(key) and at_least between 1 and at_most and is_name(idempotency_key) is not false) is not true then
    perform check_request(policy, key, 0, idempotency_key);  -- raises 22023
    perform check_bounds(at_most, at_least);                 -- likewise
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  if not v_policy.durable then
    return acquire_up_to_ephemeral(v_policy, key, at_most, at_least, idempotency_key);  -- what follows, on the twin tables
  end if;

  declare
    v_key             text collate "C" := key;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_taken           bigint := at_most;
    v_wanted          bigint;       -- the tokens to take in microtokens; 0 if at_most never fits
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_seen_level      bigint;       -- the row as it was read
    v_seen_at         timestamptz;  -- likewise
    v_retry_us        bigint;       -- microseconds until the bucket holds at_least; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_answer          ratelimit.decision;
    v_rounds          integer;
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return take_quota_of_buckets(v_policy, v_key, at_most, at_least, v_idempotency_key);
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when at_most <= v_policy.capacity then microtokens(at_most) else 0 end;

    -- 1. The idempotency key.
    if v_idempotency_key is not null then
      select k.* into v_first
        from idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update, for all of at_most. It is worth one try.
      if v_wanted > 0 and v_rounds is null then
        update buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             case when at_least <= v_policy.capacity then wait_until(microtokens(at_least), b.level, b.refilled_at, v_now, v_policy) end,
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy),
             b.level, b.refilled_at
        into v_level, v_retry_us, v_reset_us, v_seen_level, v_seen_at
        from buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_level    := microtokens(v_policy.capacity);
        v_retry_us := case when at_least <= v_policy.capacity then 0::bigint end;
        v_reset_us := 0;
      end if;

      -- 3a. Too few tokens.
      if v_retry_us is distinct from 0 then
        if (v_policy.calendar).ends_at is not null then
          v_retry_us := wait_past_end(at_least, v_seen_level, v_seen_at, v_now, v_policy, own_numbers(v_policy));
          v_reset_us := wait_past_end(null, v_seen_level, v_seen_at, v_now, v_policy, own_numbers(v_policy));
        end if;
        if v_idempotency_key is not null then
          select k.* into v_first
            from idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
          end if;
        end if;
        if v_policy.shadow then
          v_answer := shadow_of(v_level, v_reset_us, v_policy.capacity);
          return partial_of(v_answer, at_most);
        end if;
        v_answer := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        return partial_of(v_answer, 0);
      end if;
      v_taken  := least(at_most, whole_tokens(v_level));
      v_wanted := microtokens(v_taken);

      -- 3b. No row. The insert may wait for a session that creates the same one.
      v_level := v_level - v_wanted;
      if not v_has_row then
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint buckets_pkey do nothing;
        exit when found;

      -- 3c. From the bucket as it was read.
      else
        v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
        update buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- Again. Each round is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_taken,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us))
      on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
      end if;
    end if;
    v_answer := grant_of(v_level, v_reset_us, v_policy.capacity);
    return partial_of(v_answer, case when v_policy.shadow then at_most else v_taken end);
  end;
end;
$$;
comment on function ratelimit_acquire_up_to(text, text, bigint, bigint, text) is
'Takes as many whole tokens as one bucket holds, at_most, or none if it holds fewer than at_least.
retry_after of a denial is the time until the bucket holds at_least.
A repeat under a live idempotency key has the same taken. For ratelimit_acquire the grant has the cost taken.
A shadow policy returns taken = at_most, although it takes what an enforced policy would.
at_most: whole tokens, 1 or more.
at_least: whole tokens, 1 to at_most. An at_least above the capacity is denied.
idempotency_key: as in ratelimit_acquire.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key that was granted with
  fewer tokens than at_least or more than at_most, RL004 for a live idempotency key whose grant was settled, 25006 in
  a read-only transaction.
Locks: as ratelimit_acquire.
Writes: as ratelimit_acquire.
Role: application.';

create or replace function ratelimit.acquire_up_to_ephemeral(v_policy ratelimit.policies, key text, at_most bigint, at_least bigint, idempotency_key text)
  returns ratelimit.partial_decision
  language plpgsql
  volatile
as $$
  declare
    v_key             text collate "C" := key;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_taken           bigint := at_most;
    v_wanted          bigint;       -- the tokens to take in microtokens; 0 if at_most never fits
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_seen_level      bigint;       -- the row as it was read
    v_seen_at         timestamptz;  -- likewise
    v_retry_us        bigint;       -- microseconds until the bucket holds at_least; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_answer          ratelimit.decision;
    v_rounds          integer;
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return take_quota_of_ephemeral_buckets(v_policy, v_key, at_most, at_least, v_idempotency_key);
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when at_most <= v_policy.capacity then microtokens(at_most) else 0 end;

    -- 1. The idempotency key.
    if v_idempotency_key is not null then
      select k.* into v_first
        from ephemeral_idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update, for all of at_most. It is worth one try.
      if v_wanted > 0 and v_rounds is null then
        update ephemeral_buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             case when at_least <= v_policy.capacity then wait_until(microtokens(at_least), b.level, b.refilled_at, v_now, v_policy) end,
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy),
             b.level, b.refilled_at
        into v_level, v_retry_us, v_reset_us, v_seen_level, v_seen_at
        from ephemeral_buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_level    := microtokens(v_policy.capacity);
        v_retry_us := case when at_least <= v_policy.capacity then 0::bigint end;
        v_reset_us := 0;
      end if;

      -- 3a. Too few tokens.
      if v_retry_us is distinct from 0 then
        if (v_policy.calendar).ends_at is not null then
          v_retry_us := wait_past_end(at_least, v_seen_level, v_seen_at, v_now, v_policy, own_numbers(v_policy));
          v_reset_us := wait_past_end(null, v_seen_level, v_seen_at, v_now, v_policy, own_numbers(v_policy));
        end if;
        if v_idempotency_key is not null then
          select k.* into v_first
            from ephemeral_idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
          end if;
        end if;
        if v_policy.shadow then
          v_answer := shadow_of(v_level, v_reset_us, v_policy.capacity);
          return partial_of(v_answer, at_most);
        end if;
        v_answer := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        return partial_of(v_answer, 0);
      end if;
      v_taken  := least(at_most, whole_tokens(v_level));
      v_wanted := microtokens(v_taken);

      -- 3b. No row. The insert may wait for a session that creates the same one.
      v_level := v_level - v_wanted;
      if not v_has_row then
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint ephemeral_buckets_pkey do nothing;
        exit when found;

      -- 3c. From the bucket as it was read.
      else
        v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
        update ephemeral_buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- Again. Each round is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_taken,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us))
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update ephemeral_buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
      end if;
    end if;
    v_answer := grant_of(v_level, v_reset_us, v_policy.capacity);
    return partial_of(v_answer, case when v_policy.shadow then at_most else v_taken end);
  end;
$$;
comment on function ratelimit.acquire_up_to_ephemeral(ratelimit.policies, text, bigint, bigint, text) is
  'The steps of ratelimit_acquire_up_to for an ephemeral policy.';


-- Many requests, or many buckets, in one call.
-- Checks the arguments of a batch, and gives them the form that the rest wants: subscripts from 1, all costs, and for each element
-- its idempotency key and the number of its request. misfits are the requests of a size that is refused: their elements
-- lose their costs, so that they are refused, too.
create or replace function ratelimit.batch_form(
    inout policies text[], inout keys text[], inout costs bigint[], inout sizes integer[], inout idempotency_keys text[],
    out requests bigint[], out misfits bigint[])
  language plpgsql
  immutable
as $$
declare
  v_count constant integer := cardinality(policies);
begin
  perform check_length('policies', v_count, v_count);
  perform check_length('keys', cardinality(keys), v_count);
  perform check_length('costs', coalesce(cardinality(costs), v_count), v_count);
  if sizes is null then
    perform check_length('idempotency_keys', coalesce(cardinality(idempotency_keys), v_count), v_count);
  else
    perform check_sizes(sizes, v_count, cardinality(idempotency_keys));
  end if;
  if (is_list(policies) and is_list(keys) and is_list(costs) is not false and is_list(sizes) is not false
      and is_list(idempotency_keys) is not false) is not true then
    policies         := array(select unnest(policies));
    keys             := array(select unnest(keys));
    costs            := case when costs is not null then array(select unnest(batch_form.costs)) end;
    sizes            := case when sizes is not null then array(select unnest(batch_form.sizes)) end;
    idempotency_keys := case when idempotency_keys is not null then array(select unnest(batch_form.idempotency_keys)) end;
  end if;
  costs := coalesce(costs, array_fill(1::bigint, array[v_count]));
  if sizes is not null then
    select array_agg(u.request),
           case when batch_form.idempotency_keys is not null then array_agg(batch_form.idempotency_keys[u.request]) end
      into requests, idempotency_keys
      from (select u.request, generate_series(1, u.size) from unnest(batch_form.sizes) with ordinality as u (size, request)) as u;
    if 1 > any (sizes) or 1000 < any (sizes) then
      misfits := array(select u.request
                         from unnest(batch_form.sizes) with ordinality as u (size, request)
                        where u.size not between 1 and 1000);
      costs   := array(select case when requests[u.element] <> all (misfits) then u.cost end
                         from unnest(costs) with ordinality as u (cost, element));
    end if;
  end if;
end;
$$;
comment on function ratelimit.batch_form(text[], text[], bigint[], integer[], text[]) is
  'Checks the arguments of a batch, and gives them one form.';

-- Tells the errors of requests that are too large or empty, however the others were decided.
create or replace function ratelimit.with_misfits(answers ratelimit.packed, sizes integer[], misfits bigint[])
  returns ratelimit.packed
  language plpgsql
  immutable
as $$
declare
  v_misfit bigint;
  v_i      integer;
begin
  foreach v_misfit in array misfits loop
    v_i := coalesce(array_position(answers.refused, v_misfit), coalesce(cardinality(answers.refused), 0) + 1);
    answers.refused[v_i]        := v_misfit;
    answers.error_codes[v_i]    := '22023';
    answers.error_messages[v_i] := 'invalid sizes';
    answers.error_details[v_i]  := format('Request %s has %s elements.', v_misfit, sizes[v_misfit]);
    answers.error_hints[v_i]    := 'Pass 1 to 1000 elements for each request.';
  end loop;
  return answers;
end;
$$;
comment on function ratelimit.with_misfits(ratelimit.packed, integer[], bigint[]) is
  'The answers of a batch with the errors of requests that are too large or empty.';

-- The tokens that a batch about one policy asks of each bucket, in the order of key: size is the number of elements, and places are their
-- positions in the batch. wanted, in microtokens, is their sum, at most just above the largest capacity. A bucket
-- with an element that is not about 1 to 2147483647 tokens is left out. The sum of integers is a bigint, which costs less than the
-- numeric sum of bigints. The function is inlined.
create or replace function ratelimit.asked_of(keys text[], costs bigint[])
  returns setof ratelimit.asked
  language sql
  immutable
as $$
  select e.key, least(sum(e.cost), 9000000000001) * 1000000, array_agg(e.place), count(*)
    from (select u.key collate "C" as key, u.place, case when u.cost between 1 and 2147483647 then u.cost::integer end as cost
            from unnest(keys, costs) with ordinality as u (key, cost, place)
           order by u.key collate "C", u.place) as e
   group by e.key
  having count(e.cost) = count(*)
   order by e.key
$$;
comment on function ratelimit.asked_of(text[], bigint[]) is
  'What a batch about one policy asks of each bucket, in the order of key.';

-- The same for a batch about several policies, in the order in which buckets are locked: durable policies first, then by name, and
-- then by key. size is the number of elements that are not left out, and twice tells that a request names a bucket twice: that is
-- left to decide_in_order, which answers both elements with the sum. requests has the number of the request of each element; null:
-- its own number.
create or replace function ratelimit.parts_of(
    in policies text[], in keys text[], in costs bigint[], in requests bigint[],
    out parts ratelimit.part[], out size bigint, out twice boolean)
  language plpgsql
  stable
as $$
begin
  select coalesce(array_agg(row(p, s.asked, null)::part order by p.durable desc, p.name), '{}'), sum(s.size)::bigint, bool_or(s.twice)
    into parts, size, twice
    from (select a.policy, array_agg(row(a.key, a.wanted, a.places, a.size)::asked) as asked, sum(a.size) as size,
                 bool_or(requests is not null and a.size > 1
                         and a.size > (select count(distinct requests[u.place]) from unnest(a.places) as u (place))) as twice
            from (select e.policy, e.key, least(sum(e.cost), 9000000000001) * 1000000 as wanted, array_agg(e.place) as places, count(*) as size
                    from (select u.policy collate "C" as policy, u.key collate "C" as key, u.place,
                                 case when u.cost between 1 and 2147483647 then u.cost::integer end as cost  -- as in asked_of
                            from unnest(parts_of.policies, keys, costs) with ordinality as u (policy, key, cost, place)
                           order by u.policy collate "C", u.key collate "C", u.place) as e
                   group by e.policy, e.key
                  having count(e.cost) = count(*)
                   order by e.policy, e.key) as a
           group by a.policy) as s
    join policies as p on p.name = s.policy;
end;
$$;
comment on function ratelimit.parts_of(text[], text[], bigint[], bigint[]) is
  'What a batch asks of the buckets of each of its policies, in the order in which they are locked.';

-- What is asked of each bucket of one policy by those elements of a batch that places names: elements and charges are parallel, and
-- smallest is the least of them; 0 if one is not about 1 to 2147483647 tokens. The function is inlined.
create or replace function ratelimit.sought(policy_name text, policies text[], keys text[], costs bigint[], places bigint[])
  returns table (key text, elements bigint[], charges bigint[], smallest bigint)
  language sql
  immutable
as $$
  select keys[u.place] collate "C", array_agg(u.place), array_agg(costs[u.place]),
         min(case when costs[u.place] between 1 and 2147483647 then costs[u.place] else 0 end)
    from unnest(places) as u (place)
   where policies[u.place] collate "C" = policy_name
   group by 1
$$;
comment on function ratelimit.sought(text, text[], text[], bigint[], bigint[]) is
  'What some elements of a batch ask of each bucket of one policy.';

-- The fast path of requests about many buckets of one policy, in buckets. It charges them in one lean statement, and
-- does not look first. Elements that it does not charge are left to decide_left.
--
-- Elements for the same bucket are summed: it charges a bucket that covers the sum, and so grants all its elements. It leaves
-- alone a bucket that covers less, one without a row, one with an element that is not about 1 to 2147483647 tokens, and one that
-- another session changed while the statement waited for it. (Some minor releases of PostgreSQL charge the changed row, if
-- it still covers the sum.)
--
-- asked has the sums. If it is null, all elements of the batch are about this policy, and the update sums them, which costs less
-- than to pass sums. row_ids is parallel to asked, and has the row ids of the buckets if the caller knows them. A bucket that was
-- changed since is left alone, too. By now its row id may be that of another bucket, so the policy and the key are compared.
--
-- places is null if no bucket was charged, and capacities if all buckets have that of the policy.
--
-- Locks:  the bucket rows that it charges, and those that it has waited for, in the order of key. Under the settings of
-- acquire_batch the order does not depend on a choice of the
--         planner: a row found by ctid is read on the inside of a nested loop, and the outside comes sorted.
-- Writes: these rows.
create or replace function ratelimit.take_from_buckets(
    in  policy ratelimit.policies, in keys text[], in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql
  volatile
as $$
declare
  v_policy     alias for policy;
  v_now        alias for now;
  v_tick       interval := policy.tick;  -- these, down to v_ticks, are the small numbers of arithmetic.sql
  v_tick_us    bigint   := policy.tick_us::bigint;
  v_full_level bigint   := policy.full_level::bigint;
  v_divisor    numeric  := gcd(policy.tick_gain, policy.every_us);
  v_gain       bigint   := div(policy.tick_gain, v_divisor)::bigint;
  v_per        bigint   := div(policy.every_us, v_divisor)::bigint;
  v_fill_ticks double precision := policy.full_level::double precision * v_per / nullif(v_gain, 0);
  v_ticks      bigint;
  v_shared     ratelimit.charged[];  -- buckets of several elements
  v_bucket     ratelimit.charged;
  v_place      bigint;
  v_level      bigint;    -- the bucket after the element
  v_elapsed_us bigint;
begin
  -- 1. Are the numbers small?
  if policy.overridden
     or (policy.full_level::double precision * (2 * v_per + 1) + v_gain < 9e18 and (v_fill_ticks + 1) * v_tick_us < 4.7e14) is false then
    if asked is null then
      asked := array(select row(a.*)::asked from asked_of(keys, costs) as a);
    end if;
    if (policy.calendar).period is not null then
      select t.* into places, remaining, reset_us, capacities from take_quotas_from_buckets(policy, costs, asked, row_ids, v_now) as t;
    else
      select t.* into places, remaining, reset_us, capacities from take_any_from_buckets(policy, costs, asked, row_ids, v_now) as t;
    end if;
    return;
  end if;
  v_ticks := floor(2 * v_fill_ticks + 1)::bigint;

  -- 2. Charge. Most buckets cover by their stored level, which is cheaper to tell.
  if asked is null then
    with taken as (
      update buckets as b
         set level       = refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, v_tick),
             room        = null
        from asked_of(keys, costs) as u
       where b.ctid = (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1)
         and (least(b.level, v_full_level) >= u.wanted
           or b.level > -v_full_level
              and refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) >= u.wanted)
      returning u.places, u.size, u.wanted, b.level, b.refilled_at
    )
    select array_agg(t.places[1]) filter (where t.size = 1), array_agg(t.level / 1000000) filter (where t.size = 1),
           array_agg(wait_below_small(v_full_level, t.level, case when t.refilled_at = v_now then 0 else microseconds(v_now - t.refilled_at)::bigint end,
                                      v_gain, v_per, v_tick_us)) filter (where t.size = 1),
           array_agg(row(t.places, t.wanted, t.level, t.refilled_at)::charged) filter (where t.size > 1)
      into places, remaining, reset_us, v_shared
      from taken as t;
  else
    with taken as (
      update buckets as b
         set level       = refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, v_tick),
             room        = null
        from unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1))
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and (least(b.level, v_full_level) >= u.wanted
           or b.level > -v_full_level
              and refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) >= u.wanted)
      returning u.places, u.size, u.wanted, b.level, b.refilled_at
    )
    select array_agg(t.places[1]) filter (where t.size = 1), array_agg(t.level / 1000000) filter (where t.size = 1),
           array_agg(wait_below_small(v_full_level, t.level, case when t.refilled_at = v_now then 0 else microseconds(v_now - t.refilled_at)::bigint end,
                                      v_gain, v_per, v_tick_us)) filter (where t.size = 1),
           array_agg(row(t.places, t.wanted, t.level, t.refilled_at)::charged) filter (where t.size > 1)
      into places, remaining, reset_us, v_shared
      from taken as t;
  end if;

  -- 3. Elements that share a bucket are answered one after another.
  if v_shared is not null then
    foreach v_bucket in array v_shared loop
      v_level      := v_bucket.level + v_bucket.wanted;
      v_elapsed_us := microseconds(v_now - v_bucket.refilled_at)::bigint;
      foreach v_place in array v_bucket.places loop
        v_level   := v_level - microtokens(costs[v_place]);
        places    := places || v_place;
        remaining := remaining || v_level / 1000000;
        reset_us  := reset_us || wait_below_small(v_full_level, v_level, v_elapsed_us, v_gain, v_per, v_tick_us);
      end loop;
    end loop;
  end if;
end;
$$;
comment on function ratelimit.take_from_buckets(ratelimit.policies, text[], bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Charges the buckets of one policy that cover all that is asked of them, and answers their elements.';

-- As take_from_buckets, whatever the numbers of the policy and its overrides are; it costs more for a bucket. Nothing is
-- charged if the policy has changed since it was read: it and its overrides, which this reads, are as of one instant.
create or replace function ratelimit.take_any_from_buckets(
    in  policy ratelimit.policies, in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql
  volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  with taken as (
      update buckets as b
         set level       = refilled(b.level, b.refilled_at, v_now, u.p) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, (u.p).tick),
             room        = null
        from (select u.*, coalesce((select with_override(v_policy, o) from overrides as o
                                     where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy) as p
                from unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
               where (select p = v_policy from policies as p where p.id = v_policy.id)
              offset 0) as u
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1))
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and (least(b.level, (u.p).capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, u.p) >= u.wanted)
      returning u.*, b.level, b.refilled_at
    )
    select array_agg(u.place), array_agg(whole_tokens(u.level)),
           array_agg(case
                       when ((u.p).calendar).ends_at is null then short_wait((u.p).full_level, u.level, microseconds(v_now - u.refilled_at), u.p)
                       else wait_past_end(null, u.level, u.refilled_at, v_now, u.p, v_policy)
                     end),
           array_agg((u.p).capacity)
      into places, remaining, reset_us, capacities
      from (select e.place, t.p, t.refilled_at,
                   t.level + t.wanted - microtokens(sum(costs[e.place]::integer) over (partition by t.places[1] order by e.place)) as level
              from taken as t
             cross join lateral unnest(t.places) as e (place)) as u;
end;
$$;
comment on function ratelimit.take_any_from_buckets(ratelimit.policies, bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Does what take_from_buckets does, for a policy with overrides or large numbers.';

-- For requests of several elements, which are granted only if every bucket covers what is charged to it. row_ids is null if a
-- bucket does not cover what is asked of it. contended is a guess that another session changes or locks a bucket: xmax is
-- set, and is not the lock of the transaction that wrote this row. A lock that was rolled back leaves it set, too.
create or replace function ratelimit.covered_in_buckets(
    in  policy ratelimit.policies, in asked ratelimit.asked[], in now timestamptz,
    out row_ids tid[], out contended boolean)
  language plpgsql
  stable
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  if v_policy.overridden then
    select case when bool_and(b.covers is true) then array_agg(b.ctid) end, bool_or(b.contended)
      into row_ids, contended
      from (select u.*, coalesce((select with_override(v_policy, o) from overrides as o
                                   where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy) as p
              from unnest(asked) as u (key, wanted, places, size)
            offset 0) as u
      left join lateral (select b.ctid, b.xmax <> 0 and b.xmax <> b.xmin as contended,
                                least(b.level, (u.p).capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, u.p) >= u.wanted as covers
                           from buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on true;
  else
    select case when bool_and(b.covers is true) then array_agg(b.ctid) end, bool_or(b.contended)
      into row_ids, contended
      from unnest(asked) as u (key, wanted, places, size)
      left join lateral (select b.ctid, b.xmax <> 0 and b.xmax <> b.xmin as contended,
                                least(b.level, v_policy.capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, v_policy) >= u.wanted as covers
                           from buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on true;
  end if;
end;
$$;
comment on function ratelimit.covered_in_buckets(ratelimit.policies, ratelimit.asked[], timestamptz) is
  'The row ids of the buckets of one policy if all cover what is asked of them, and whether other sessions are at them.';

-- For requests of several elements, of which others may be waiting for the same bucket: the update would not charge a bucket that
-- it waited for. This waits first, and the update no longer needs to. The answer is null if a bucket has no row: one that is
-- created later would be locked after higher keys.
create or replace function ratelimit.lock_asked_of_buckets(policy ratelimit.policies, asked ratelimit.asked[])
  returns tid[]
  language plpgsql
  volatile
as $$
declare
  v_policy  alias for policy;
  v_row_ids tid[];
begin
  select case when bool_and(b.ctid is not null) then array_agg(b.ctid) end
    into v_row_ids
    from unnest(asked) as u (key, wanted, places, size)
    left join lateral (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1
                           for update) as b on true;
  return v_row_ids;
end;
$$;
comment on function ratelimit.lock_asked_of_buckets(ratelimit.policies, ratelimit.asked[]) is
  'Locks the buckets of one policy, in order, and answers with their row ids.';

-- The fast path of requests about many buckets of one policy, in ephemeral_buckets. It charges them in one lean statement, and
-- does not look first. Elements that it does not charge are left to decide_left.
--
-- Elements for the same bucket are summed: it charges a bucket that covers the sum, and so grants all its elements. It leaves
-- alone a bucket that covers less, one without a row, one with an element that is not about 1 to 2147483647 tokens, and one that
-- another session changed while the statement waited for it. (Some minor releases of PostgreSQL charge the changed row, if
-- it still covers the sum.)
--
-- asked has the sums. If it is null, all elements of the batch are about this policy, and the update sums them, which costs less
-- than to pass sums. row_ids is parallel to asked, and has the row ids of the buckets if the caller knows them. A bucket that was
-- changed since is left alone, too. By now its row id may be that of another bucket, so the policy and the key are compared.
--
-- places is null if no bucket was charged, and capacities if all buckets have that of the policy.
--
-- Locks:  the bucket rows that it charges, and those that it has waited for, in the order of key. Under the settings of
-- acquire_batch the order does not depend on a choice of the
--         planner: a row found by ctid is read on the inside of a nested loop, and the outside comes sorted.
-- Writes: these rows.
create or replace function ratelimit.take_from_ephemeral_buckets(
    in  policy ratelimit.policies, in keys text[], in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql
  volatile
as $$
declare
  v_policy     alias for policy;
  v_now        alias for now;
  v_tick       interval := policy.tick;  -- these, down to v_ticks, are the small numbers of arithmetic.sql
  v_tick_us    bigint   := policy.tick_us::bigint;
  v_full_level bigint   := policy.full_level::bigint;
  v_divisor    numeric  := gcd(policy.tick_gain, policy.every_us);
  v_gain       bigint   := div(policy.tick_gain, v_divisor)::bigint;
  v_per        bigint   := div(policy.every_us, v_divisor)::bigint;
  v_fill_ticks double precision := policy.full_level::double precision * v_per / nullif(v_gain, 0);
  v_ticks      bigint;
  v_shared     ratelimit.charged[];  -- buckets of several elements
  v_bucket     ratelimit.charged;
  v_place      bigint;
  v_level      bigint;    -- the bucket after the element
  v_elapsed_us bigint;
begin
  -- 1. Are the numbers small?
  if policy.overridden
     or (policy.full_level::double precision * (2 * v_per + 1) + v_gain < 9e18 and (v_fill_ticks + 1) * v_tick_us < 4.7e14) is false then
    if asked is null then
      asked := array(select row(a.*)::asked from asked_of(keys, costs) as a);
    end if;
    if (policy.calendar).period is not null then
      select t.* into places, remaining, reset_us, capacities from take_quotas_from_ephemeral_buckets(policy, costs, asked, row_ids, v_now) as t;
    else
      select t.* into places, remaining, reset_us, capacities from take_any_from_ephemeral_buckets(policy, costs, asked, row_ids, v_now) as t;
    end if;
    return;
  end if;
  v_ticks := floor(2 * v_fill_ticks + 1)::bigint;

  -- 2. Charge. Most buckets cover by their stored level, which is cheaper to tell.
  if asked is null then
    with taken as (
      update ephemeral_buckets as b
         set level       = refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, v_tick),
             room        = null
        from asked_of(keys, costs) as u
       where b.ctid = (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1)
         and (least(b.level, v_full_level) >= u.wanted
           or b.level > -v_full_level
              and refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) >= u.wanted)
      returning u.places, u.size, u.wanted, b.level, b.refilled_at
    )
    select array_agg(t.places[1]) filter (where t.size = 1), array_agg(t.level / 1000000) filter (where t.size = 1),
           array_agg(wait_below_small(v_full_level, t.level, case when t.refilled_at = v_now then 0 else microseconds(v_now - t.refilled_at)::bigint end,
                                      v_gain, v_per, v_tick_us)) filter (where t.size = 1),
           array_agg(row(t.places, t.wanted, t.level, t.refilled_at)::charged) filter (where t.size > 1)
      into places, remaining, reset_us, v_shared
      from taken as t;
  else
    with taken as (
      update ephemeral_buckets as b
         set level       = refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, v_tick),
             room        = null
        from unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1))
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and (least(b.level, v_full_level) >= u.wanted
           or b.level > -v_full_level
              and refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) >= u.wanted)
      returning u.places, u.size, u.wanted, b.level, b.refilled_at
    )
    select array_agg(t.places[1]) filter (where t.size = 1), array_agg(t.level / 1000000) filter (where t.size = 1),
           array_agg(wait_below_small(v_full_level, t.level, case when t.refilled_at = v_now then 0 else microseconds(v_now - t.refilled_at)::bigint end,
                                      v_gain, v_per, v_tick_us)) filter (where t.size = 1),
           array_agg(row(t.places, t.wanted, t.level, t.refilled_at)::charged) filter (where t.size > 1)
      into places, remaining, reset_us, v_shared
      from taken as t;
  end if;

  -- 3. Elements that share a bucket are answered one after another.
  if v_shared is not null then
    foreach v_bucket in array v_shared loop
      v_level      := v_bucket.level + v_bucket.wanted;
      v_elapsed_us := microseconds(v_now - v_bucket.refilled_at)::bigint;
      foreach v_place in array v_bucket.places loop
        v_level   := v_level - microtokens(costs[v_place]);
        places    := places || v_place;
        remaining := remaining || v_level / 1000000;
        reset_us  := reset_us || wait_below_small(v_full_level, v_level, v_elapsed_us, v_gain, v_per, v_tick_us);
      end loop;
    end loop;
  end if;
end;
$$;
comment on function ratelimit.take_from_ephemeral_buckets(ratelimit.policies, text[], bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Charges the buckets of one policy that cover all that is asked of them, and answers their elements.';

-- As take_from_ephemeral_buckets, whatever the numbers of the policy and its overrides are; it costs more for a bucket. Nothing is
-- charged if the policy has changed since it was read: it and its overrides, which this reads, are as of one instant.
create or replace function ratelimit.take_any_from_ephemeral_buckets(
    in  policy ratelimit.policies, in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql
  volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  with taken as (
      update ephemeral_buckets as b
         set level       = refilled(b.level, b.refilled_at, v_now, u.p) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, (u.p).tick),
             room        = null
        from (select u.*, coalesce((select with_override(v_policy, o) from overrides as o
                                     where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy) as p
                from unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
               where (select p = v_policy from policies as p where p.id = v_policy.id)
              offset 0) as u
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1))
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and (least(b.level, (u.p).capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, u.p) >= u.wanted)
      returning u.*, b.level, b.refilled_at
    )
    select array_agg(u.place), array_agg(whole_tokens(u.level)),
           array_agg(case
                       when ((u.p).calendar).ends_at is null then short_wait((u.p).full_level, u.level, microseconds(v_now - u.refilled_at), u.p)
                       else wait_past_end(null, u.level, u.refilled_at, v_now, u.p, v_policy)
                     end),
           array_agg((u.p).capacity)
      into places, remaining, reset_us, capacities
      from (select e.place, t.p, t.refilled_at,
                   t.level + t.wanted - microtokens(sum(costs[e.place]::integer) over (partition by t.places[1] order by e.place)) as level
              from taken as t
             cross join lateral unnest(t.places) as e (place)) as u;
end;
$$;
comment on function ratelimit.take_any_from_ephemeral_buckets(ratelimit.policies, bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Does what take_from_ephemeral_buckets does, for a policy with overrides or large numbers.';

-- For requests of several elements, which are granted only if every bucket covers what is charged to it. row_ids is null if a
-- bucket does not cover what is asked of it. contended is a guess that another session changes or locks a bucket: xmax is
-- set, and is not the lock of the transaction that wrote this row. A lock that was rolled back leaves it set, too.
create or replace function ratelimit.covered_in_ephemeral_buckets(
    in  policy ratelimit.policies, in asked ratelimit.asked[], in now timestamptz,
    out row_ids tid[], out contended boolean)
  language plpgsql
  stable
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  if v_policy.overridden then
    select case when bool_and(b.covers is true) then array_agg(b.ctid) end, bool_or(b.contended)
      into row_ids, contended
      from (select u.*, coalesce((select with_override(v_policy, o) from overrides as o
                                   where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy) as p
              from unnest(asked) as u (key, wanted, places, size)
            offset 0) as u
      left join lateral (select b.ctid, b.xmax <> 0 and b.xmax <> b.xmin as contended,
                                least(b.level, (u.p).capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, u.p) >= u.wanted as covers
                           from ephemeral_buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on true;
  else
    select case when bool_and(b.covers is true) then array_agg(b.ctid) end, bool_or(b.contended)
      into row_ids, contended
      from unnest(asked) as u (key, wanted, places, size)
      left join lateral (select b.ctid, b.xmax <> 0 and b.xmax <> b.xmin as contended,
                                least(b.level, v_policy.capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, v_policy) >= u.wanted as covers
                           from ephemeral_buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on true;
  end if;
end;
$$;
comment on function ratelimit.covered_in_ephemeral_buckets(ratelimit.policies, ratelimit.asked[], timestamptz) is
  'The row ids of the buckets of one policy if all cover what is asked of them, and whether other sessions are at them.';

-- For requests of several elements, of which others may be waiting for the same bucket: the update would not charge a bucket that
-- it waited for. This waits first, and the update no longer needs to. The answer is null if a bucket has no row: one that is
-- created later would be locked after higher keys.
create or replace function ratelimit.lock_asked_of_ephemeral_buckets(policy ratelimit.policies, asked ratelimit.asked[])
  returns tid[]
  language plpgsql
  volatile
as $$
declare
  v_policy  alias for policy;
  v_row_ids tid[];
begin
  select case when bool_and(b.ctid is not null) then array_agg(b.ctid) end
    into v_row_ids
    from unnest(asked) as u (key, wanted, places, size)
    left join lateral (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1
                           for update) as b on true;
  return v_row_ids;
end;
$$;
comment on function ratelimit.lock_asked_of_ephemeral_buckets(ratelimit.policies, ratelimit.asked[]) is
  'Locks the buckets of one policy, in order, and answers with their row ids.';

-- The denials of a batch that take nothing to tell: of single requests without an idempotency key, about buckets of one policy.
-- A bucket that does not cover the least of what is asked of it denies all of it, and is read once for that. A bucket that covers
-- something is left to decide_in_order, and so is one without a row, and one with an element that is not about 1 to 2147483647 tokens.
--
-- places are the elements to look at, of all policies. The answer has the elements that are denied.
--
-- Locks and writes nothing.
create or replace function ratelimit.denied_in_buckets(
    policy ratelimit.policies, policies text[], keys text[], costs bigint[], places bigint[], now timestamptz)
  returns ratelimit.packed
  language plpgsql
  stable
as $$
declare
  v_policy     alias for policy;
  v_now        alias for now;
  v_tick       interval := policy.tick;  -- these, down to v_ticks, are the small numbers of arithmetic.sql
  v_tick_us    bigint   := policy.tick_us::bigint;
  v_full_level bigint   := policy.full_level::bigint;
  v_divisor    numeric  := gcd(policy.tick_gain, policy.every_us);
  v_gain       bigint   := div(policy.tick_gain, v_divisor)::bigint;
  v_per        bigint   := div(policy.every_us, v_divisor)::bigint;
  v_fill_ticks double precision := policy.full_level::double precision * v_per / nullif(v_gain, 0);
  v_ticks      bigint;
  v_denied     ratelimit.packed;
begin
  if policy.overridden
     or (policy.full_level::double precision * (2 * v_per + 1) + v_gain < 9e18 and (v_fill_ticks + 1) * v_tick_us < 4.7e14) is false then
    return denied_in_any_buckets(v_policy, policies, keys, costs, places, v_now);
  end if;
  v_ticks := floor(2 * v_fill_ticks + 1)::bigint;

  select array_agg(e.place), array_agg(e.remaining),
         array_agg(case
                     when e.cost = e.smallest then e.retry_us
                     when e.cost <= v_policy.capacity then wait_below_small(microtokens(e.cost), e.level, e.elapsed_us, v_gain, v_per, v_tick_us)
                   end),
         array_agg(e.reset_us)
    into v_denied.elements, v_denied.remaining, v_denied.retry_after_us, v_denied.reset_after_us
    from (select unnest(d.elements) as place, unnest(d.charges) as cost, d.*
            from (select b.*, whole_tokens(b.level_now) as remaining,
                         case
                           when b.smallest <= v_policy.capacity then wait_below_small(microtokens(b.smallest), b.level, b.elapsed_us, v_gain, v_per, v_tick_us)
                         end as retry_us,
                         case
                           when b.level_now < v_full_level then wait_below_small(v_full_level, b.level, b.elapsed_us, v_gain, v_per, v_tick_us)
                           else 0
                         end as reset_us
                    from (select u.*, b.level, microseconds(v_now - b.refilled_at)::bigint as elapsed_us,
                                 refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) as level_now
                            from sought(v_policy.name, policies, keys, costs, places) as u
                           cross join lateral (select b.level, b.refilled_at
                                                 from buckets as b
                                                where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b
                          offset 0) as b
                   where b.smallest > 0
                     and b.level > -v_full_level
                     and b.level_now < microtokens(b.smallest)
                  offset 0) as d) as e;
  v_denied.capacity := array_fill(v_policy.capacity, array[coalesce(cardinality(v_denied.elements), 0)]);
  return v_denied;
end;
$$;
comment on function ratelimit.denied_in_buckets(ratelimit.policies, text[], text[], bigint[], bigint[], timestamptz) is
  'The single requests of a batch that the buckets of one policy plainly deny.';

-- As denied_in_buckets, whatever the numbers of the policy and its overrides are; it costs more for a bucket.
create or replace function ratelimit.denied_in_any_buckets(
    policy ratelimit.policies, policies text[], keys text[], costs bigint[], places bigint[], now timestamptz)
  returns ratelimit.packed
  language plpgsql
  stable
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_denied ratelimit.packed;
begin
  select array_agg(e.place), array_agg(whole_tokens(e.level_now)),
         array_agg(case
                     when ((e.p).calendar).ends_at is not null then wait_past_end(e.cost, e.level, e.refilled_at, v_now, e.p, v_policy)
                     when e.cost <= (e.p).capacity then wait_until(microtokens(e.cost), e.level, e.refilled_at, v_now, e.p)
                   end),
         array_agg(case
                     when ((e.p).calendar).ends_at is null then wait_until((e.p).full_level, e.level, e.refilled_at, v_now, e.p)
                     else wait_past_end(null, e.level, e.refilled_at, v_now, e.p, v_policy)
                   end),
         array_agg((e.p).capacity)
    into v_denied.elements, v_denied.remaining, v_denied.retry_after_us, v_denied.reset_after_us, v_denied.capacity
    from (select unnest(b.elements) as place, unnest(b.charges) as cost, b.*
            from (select u.*, b.level, b.refilled_at, refilled(b.level, b.refilled_at, v_now, u.p) as level_now
                    from (select u.*, coalesce((select with_override(v_policy, o) from overrides as o
                                                 where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy) as p
                            from sought(v_policy.name, policies, keys, costs, places) as u
                          offset 0) as u
                   cross join lateral (select b.level, b.refilled_at
                                         from buckets as b
                                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b
                  offset 0) as b
           where b.smallest > 0
             and b.level_now < microtokens(b.smallest)
          offset 0) as e;
  return v_denied;
end;
$$;
comment on function ratelimit.denied_in_any_buckets(ratelimit.policies, text[], text[], bigint[], bigint[], timestamptz) is
  'Does what denied_in_buckets does, for a policy with overrides or large numbers.';

-- The denials of a batch that take nothing to tell: of single requests without an idempotency key, about ephemeral_buckets of one policy.
-- A bucket that does not cover the least of what is asked of it denies all of it, and is read once for that. A bucket that covers
-- something is left to decide_in_order, and so is one without a row, and one with an element that is not about 1 to 2147483647 tokens.
--
-- places are the elements to look at, of all policies. The answer has the elements that are denied.
--
-- Locks and writes nothing.
create or replace function ratelimit.denied_in_ephemeral_buckets(
    policy ratelimit.policies, policies text[], keys text[], costs bigint[], places bigint[], now timestamptz)
  returns ratelimit.packed
  language plpgsql
  stable
as $$
declare
  v_policy     alias for policy;
  v_now        alias for now;
  v_tick       interval := policy.tick;  -- these, down to v_ticks, are the small numbers of arithmetic.sql
  v_tick_us    bigint   := policy.tick_us::bigint;
  v_full_level bigint   := policy.full_level::bigint;
  v_divisor    numeric  := gcd(policy.tick_gain, policy.every_us);
  v_gain       bigint   := div(policy.tick_gain, v_divisor)::bigint;
  v_per        bigint   := div(policy.every_us, v_divisor)::bigint;
  v_fill_ticks double precision := policy.full_level::double precision * v_per / nullif(v_gain, 0);
  v_ticks      bigint;
  v_denied     ratelimit.packed;
begin
  if policy.overridden
     or (policy.full_level::double precision * (2 * v_per + 1) + v_gain < 9e18 and (v_fill_ticks + 1) * v_tick_us < 4.7e14) is false then
    return denied_in_any_ephemeral_buckets(v_policy, policies, keys, costs, places, v_now);
  end if;
  v_ticks := floor(2 * v_fill_ticks + 1)::bigint;

  select array_agg(e.place), array_agg(e.remaining),
         array_agg(case
                     when e.cost = e.smallest then e.retry_us
                     when e.cost <= v_policy.capacity then wait_below_small(microtokens(e.cost), e.level, e.elapsed_us, v_gain, v_per, v_tick_us)
                   end),
         array_agg(e.reset_us)
    into v_denied.elements, v_denied.remaining, v_denied.retry_after_us, v_denied.reset_after_us
    from (select unnest(d.elements) as place, unnest(d.charges) as cost, d.*
            from (select b.*, whole_tokens(b.level_now) as remaining,
                         case
                           when b.smallest <= v_policy.capacity then wait_below_small(microtokens(b.smallest), b.level, b.elapsed_us, v_gain, v_per, v_tick_us)
                         end as retry_us,
                         case
                           when b.level_now < v_full_level then wait_below_small(v_full_level, b.level, b.elapsed_us, v_gain, v_per, v_tick_us)
                           else 0
                         end as reset_us
                    from (select u.*, b.level, microseconds(v_now - b.refilled_at)::bigint as elapsed_us,
                                 refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) as level_now
                            from sought(v_policy.name, policies, keys, costs, places) as u
                           cross join lateral (select b.level, b.refilled_at
                                                 from ephemeral_buckets as b
                                                where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b
                          offset 0) as b
                   where b.smallest > 0
                     and b.level > -v_full_level
                     and b.level_now < microtokens(b.smallest)
                  offset 0) as d) as e;
  v_denied.capacity := array_fill(v_policy.capacity, array[coalesce(cardinality(v_denied.elements), 0)]);
  return v_denied;
end;
$$;
comment on function ratelimit.denied_in_ephemeral_buckets(ratelimit.policies, text[], text[], bigint[], bigint[], timestamptz) is
  'The single requests of a batch that the buckets of one policy plainly deny.';

-- As denied_in_ephemeral_buckets, whatever the numbers of the policy and its overrides are; it costs more for a bucket.
create or replace function ratelimit.denied_in_any_ephemeral_buckets(
    policy ratelimit.policies, policies text[], keys text[], costs bigint[], places bigint[], now timestamptz)
  returns ratelimit.packed
  language plpgsql
  stable
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_denied ratelimit.packed;
begin
  select array_agg(e.place), array_agg(whole_tokens(e.level_now)),
         array_agg(case
                     when ((e.p).calendar).ends_at is not null then wait_past_end(e.cost, e.level, e.refilled_at, v_now, e.p, v_policy)
                     when e.cost <= (e.p).capacity then wait_until(microtokens(e.cost), e.level, e.refilled_at, v_now, e.p)
                   end),
         array_agg(case
                     when ((e.p).calendar).ends_at is null then wait_until((e.p).full_level, e.level, e.refilled_at, v_now, e.p)
                     else wait_past_end(null, e.level, e.refilled_at, v_now, e.p, v_policy)
                   end),
         array_agg((e.p).capacity)
    into v_denied.elements, v_denied.remaining, v_denied.retry_after_us, v_denied.reset_after_us, v_denied.capacity
    from (select unnest(b.elements) as place, unnest(b.charges) as cost, b.*
            from (select u.*, b.level, b.refilled_at, refilled(b.level, b.refilled_at, v_now, u.p) as level_now
                    from (select u.*, coalesce((select with_override(v_policy, o) from overrides as o
                                                 where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy) as p
                            from sought(v_policy.name, policies, keys, costs, places) as u
                          offset 0) as u
                   cross join lateral (select b.level, b.refilled_at
                                         from ephemeral_buckets as b
                                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b
                  offset 0) as b
           where b.smallest > 0
             and b.level_now < microtokens(b.smallest)
          offset 0) as e;
  return v_denied;
end;
$$;
comment on function ratelimit.denied_in_any_ephemeral_buckets(ratelimit.policies, text[], text[], bigint[], bigint[], timestamptz) is
  'Does what denied_in_ephemeral_buckets does, for a policy with overrides or large numbers.';

-- Stores the idempotency keys of a batch, of one policy, by which the elements were decided.
--
-- The caller holds the bucket rows of these elements, so no other request is at the same keys; clean-up may be, at expired ones.
-- Element n of keys, idempotency_keys and costs is element n of the batch; places are the elements that were granted, and the
-- arrays after it are parallel to it.
--
-- new is the guess that no row has any of these keys. If one does, live or expired, unique_violation is raised. ON CONFLICT
-- costs more, because it looks before it inserts, and confirms after it.
--
-- Locks:  the rows that it writes, and those of live keys.
-- Writes: the idempotency keys, an expired one over the old row.
create or replace function ratelimit.remember_idempotency_keys(
    policy ratelimit.policies, keys text[], idempotency_keys text[], costs bigint[], now timestamptz, new boolean,
    places bigint[], remaining bigint[], capacities bigint[], reset_us bigint[])
  returns boolean
  language plpgsql
  volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_all    alias for idempotency_keys;
  v_stored bigint;
begin
  if new then
    insert into idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    select v_policy.id, keys[g.place], v_all[g.place], costs[g.place],
           g.remaining, duration(g.reset_us), g.capacity, v_now + duration(v_policy.remember_us),
           case when (v_policy.calendar).period is not null then v_now end
      from unnest(places, remember_idempotency_keys.remaining, capacities, reset_us) as g (place, remaining, capacity, reset_us)
     where is_name(v_all[g.place]);
  else
    insert into idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    select v_policy.id, keys[g.place], v_all[g.place], costs[g.place],
           g.remaining, duration(g.reset_us), g.capacity, v_now + duration(v_policy.remember_us),
           case when (v_policy.calendar).period is not null then v_now end
      from unnest(places, remember_idempotency_keys.remaining, capacities, reset_us) as g (place, remaining, capacity, reset_us)
     where is_name(v_all[g.place])
    on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
  end if;
  get diagnostics v_stored = row_count;
  return v_stored = (select count(v_all[u.place]) from unnest(places) as u (place));
end;
$$;
comment on function ratelimit.remember_idempotency_keys(ratelimit.policies, text[], text[], bigint[], timestamptz, boolean, bigint[], bigint[], bigint[], bigint[]) is
  'Stores the idempotency keys of granted elements; false if one of them is live already, or is no valid key.';

-- Stores the idempotency keys of a batch, of one policy, by which the elements were decided.
--
-- The caller holds the bucket rows of these elements, so no other request is at the same keys; clean-up may be, at expired ones.
-- Element n of keys, idempotency_keys and costs is element n of the batch; places are the elements that were granted, and the
-- arrays after it are parallel to it.
--
-- new is the guess that no row has any of these keys. If one does, live or expired, unique_violation is raised. ON CONFLICT
-- costs more, because it looks before it inserts, and confirms after it.
--
-- Locks:  the rows that it writes, and those of live keys.
-- Writes: the idempotency keys, an expired one over the old row.
create or replace function ratelimit.remember_ephemeral_idempotency_keys(
    policy ratelimit.policies, keys text[], idempotency_keys text[], costs bigint[], now timestamptz, new boolean,
    places bigint[], remaining bigint[], capacities bigint[], reset_us bigint[])
  returns boolean
  language plpgsql
  volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_all    alias for idempotency_keys;
  v_stored bigint;
begin
  if new then
    insert into ephemeral_idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    select v_policy.id, keys[g.place], v_all[g.place], costs[g.place],
           g.remaining, duration(g.reset_us), g.capacity, v_now + duration(v_policy.remember_us),
           case when (v_policy.calendar).period is not null then v_now end
      from unnest(places, remember_ephemeral_idempotency_keys.remaining, capacities, reset_us) as g (place, remaining, capacity, reset_us)
     where is_name(v_all[g.place]);
  else
    insert into ephemeral_idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    select v_policy.id, keys[g.place], v_all[g.place], costs[g.place],
           g.remaining, duration(g.reset_us), g.capacity, v_now + duration(v_policy.remember_us),
           case when (v_policy.calendar).period is not null then v_now end
      from unnest(places, remember_ephemeral_idempotency_keys.remaining, capacities, reset_us) as g (place, remaining, capacity, reset_us)
     where is_name(v_all[g.place])
    on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
  end if;
  get diagnostics v_stored = row_count;
  return v_stored = (select count(v_all[u.place]) from unnest(places) as u (place));
end;
$$;
comment on function ratelimit.remember_ephemeral_idempotency_keys(ratelimit.policies, text[], text[], bigint[], timestamptz, boolean, bigint[], bigint[], bigint[], bigint[]) is
  'Stores the idempotency keys of granted elements; false if one of them is live already, or is no valid key.';

-- The steps of decide_in_order on the rows of buckets and idempotency_keys. Each function is about the buckets of one
-- policy. But for live_idempotency_keys, keys are theirs, in order, and the arrays after it are parallel to it.

-- Reads the buckets: the policy with the numbers that apply to the key; the level as stored, and when; the level now; whether there is
-- a row. A bucket whose row the caller has just created stands for one without. That is full by the numbers that apply, and by those of
-- the policy once an override has ended.
create or replace function ratelimit.rows_of_buckets(
    in policy ratelimit.policies, in keys text[], in created boolean[], in now timestamptz,
    out numbers ratelimit.policies[], out levels bigint[], out refilled_at timestamptz[], out levels_now bigint[], out has_row boolean[])
  language plpgsql
  stable
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  if (v_policy.calendar).period is not null then
    select array_agg(filling(u.p, b.refilled_at) order by u.n), array_agg(microtokens((u.p).capacity) + coalesce(b.level, 0) order by u.n),
           array_agg(coalesce(b.refilled_at, v_now) order by u.n),
           array_agg(coalesce(level_now(b.level, b.refilled_at, v_now, u.p), microtokens((u.p).capacity)) order by u.n),
           array_agg(b.level is not null order by u.n)
      into numbers, levels, refilled_at, levels_now, has_row
      from (select u.key, u.created, u.n, quota_of_key(v_policy, u.key, v_now) as p
              from unnest(keys, created) with ordinality as u (key, created, n)
            offset 0) as u
      left join lateral (select b.level, b.refilled_at
                           from buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on u.created is not true;
    return;
  end if;
  select array_agg(u.p order by u.n), array_agg(coalesce(b.level, microtokens(greatest((u.p).capacity, v_policy.capacity))) order by u.n),
         array_agg(coalesce(b.refilled_at, v_now) order by u.n),
         array_agg(case when b.level is null then microtokens((u.p).capacity) else refilled(b.level, b.refilled_at, v_now, u.p) end order by u.n),
         array_agg(b.level is not null order by u.n)
    into numbers, levels, refilled_at, levels_now, has_row
    from (select u.key, u.created, u.n, case when v_policy.overridden then
                                     coalesce((select with_override(v_policy, o) from overrides as o
                                                where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy)
                                   else v_policy end as p
            from unnest(keys, created) with ordinality as u (key, created, n)
          offset 0) as u
    left join lateral (select b.level, b.refilled_at
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on u.created is not true;
end;
$$;
comment on function ratelimit.rows_of_buckets(ratelimit.policies, text[], boolean[], timestamptz) is
  'The buckets of one policy as they are now, and the numbers that apply to each.';

-- Reads the idempotency keys that are live, of the elements on the buckets from_bucket to to_bucket. expires_at is compared after the
-- row is found, as in ratelimit_acquire. The function is inlined.
create or replace function ratelimit.live_idempotency_keys(
    policy_id bigint, keys text[], from_bucket integer, to_bucket integer, buckets integer[], charges bigint[], idempotency_keys text[], now timestamptz)
  returns table (place integer, granted ratelimit.idempotency_keys)
  language sql
  stable
as $$
  select u.place::integer, k.granted
    from unnest(buckets, charges, idempotency_keys) with ordinality as u (bucket, charge, idempotency_key, place)
   cross join lateral (select row(k.*)::ratelimit.idempotency_keys as granted, k.expires_at
                         from ratelimit.idempotency_keys as k
                        where k.policy_id       = live_idempotency_keys.policy_id
                          and k.key             = keys[u.bucket] collate "C"
                          and k.idempotency_key = u.idempotency_key collate "C"
                       offset 0) as k
   where u.bucket between from_bucket and to_bucket
     and u.charge > 0
     and k.expires_at > now
$$;
comment on function ratelimit.live_idempotency_keys(bigint, text[], integer, integer, integer[], bigint[], text[], timestamptz) is
  'The grants that live idempotency keys of a batch remember, by the number of the element.';

-- Locks the buckets that are wanted, in order, and answers which of their rows it has created: a bucket without a row gets one, which
-- is full.
create or replace function ratelimit.lock_buckets(policy_id bigint, keys text[], wanted boolean[], numbers ratelimit.policies[], now timestamptz)
  returns boolean[]
  language plpgsql
  volatile
as $$
declare
  v_policy_id alias for policy_id;
  v_key       text collate "C";
  v_created   boolean[] := array_fill(false, array[cardinality(keys)]);
begin
  for v_n in 1..cardinality(keys) loop
    continue when not wanted[v_n];
    v_key := keys[v_n];
    loop
      perform from buckets as b  -- by its newest row version, as in include/newest.sql
        where b.policy_id = v_policy_id
          and b.key      >= v_key
          and b.key      <= v_key
        order by b.key desc
        limit 1
          for update;
      exit when found;
      insert into buckets (policy_id, key, level, refilled_at, due_at)
      values (v_policy_id, v_key, stored_level(microtokens(numbers[v_n].capacity), numbers[v_n]), now, now)  -- due at once, as in ratelimit_charge
      on conflict on constraint buckets_pkey do nothing;
      v_created[v_n] := found;
      exit when found;
    end loop;
  end loop;
  return v_created;
end;
$$;
comment on function ratelimit.lock_buckets(bigint, text[], boolean[], ratelimit.policies[], timestamptz) is
  'Locks the wanted buckets of one policy, in order, and answers which rows it has created.';

-- Creates the rows of the buckets that are wanted and have none, and answers how many.
create or replace function ratelimit.create_buckets(
    policy_id bigint, keys text[], wanted boolean[], has_row boolean[], levels bigint[], refilled_at timestamptz[], numbers ratelimit.policies[])
  returns bigint
  language plpgsql
  volatile
as $$
declare
  v_created bigint;
begin
  insert into buckets (policy_id, key, level, refilled_at, due_at)
  select create_buckets.policy_id, u.key, u.level, u.refilled_at, due_after(u.reset_us, u.refilled_at)
    from (select u.*, short_wait((u.p).full_level, u.level, 0, u.p) as reset_us
            from (select u.*, numbers[u.n] as p
                    from unnest(keys, wanted, has_row, levels, create_buckets.refilled_at)
                         with ordinality as u (key, wanted, has_row, level, refilled_at, n)
                   where u.wanted and not u.has_row
                  offset 0) as u
          offset 0) as u
   order by u.key collate "C"
  on conflict on constraint buckets_pkey do nothing;
  get diagnostics v_created = row_count;
  return v_created;
end;
$$;
comment on function ratelimit.create_buckets(bigint, text[], boolean[], boolean[], bigint[], timestamptz[], ratelimit.policies[]) is
  'Creates the rows of the wanted buckets of one policy that have none, and answers how many.';

-- Writes the locked buckets that are wanted, and answers how many. It removes the rows that lock_buckets has created for
-- buckets that are not wanted.
create or replace function ratelimit.write_buckets(
    policy ratelimit.policies, keys text[], wanted boolean[], created boolean[], levels bigint[], refilled_at timestamptz[])
  returns bigint
  language plpgsql
  volatile
as $$
declare
  v_policy  alias for policy;
  v_written bigint;
begin
  for v_n in 1..cardinality(keys) loop
    continue when wanted[v_n] or not created[v_n];
    delete from buckets as b where b.policy_id = v_policy.id and b.key = keys[v_n] collate "C";
  end loop;
  update buckets as b
     set level = u.level, refilled_at = u.refilled_at, room = null
    from unnest(keys, wanted, levels, write_buckets.refilled_at) as u (key, wanted, level, refilled_at)
   where u.wanted
     and b.ctid = (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1);
  get diagnostics v_written = row_count;
  return v_written;
end;
$$;
comment on function ratelimit.write_buckets(ratelimit.policies, text[], boolean[], boolean[], bigint[], timestamptz[]) is
  'Writes the wanted buckets of one policy, which are locked, and answers how many.';

-- The steps of decide_in_order on the rows of ephemeral_buckets and ephemeral_idempotency_keys. Each function is about the buckets of one
-- policy. But for live_ephemeral_idempotency_keys, keys are theirs, in order, and the arrays after it are parallel to it.

-- Reads the buckets: the policy with the numbers that apply to the key; the level as stored, and when; the level now; whether there is
-- a row. A bucket whose row the caller has just created stands for one without. That is full by the numbers that apply, and by those of
-- the policy once an override has ended.
create or replace function ratelimit.rows_of_ephemeral_buckets(
    in policy ratelimit.policies, in keys text[], in created boolean[], in now timestamptz,
    out numbers ratelimit.policies[], out levels bigint[], out refilled_at timestamptz[], out levels_now bigint[], out has_row boolean[])
  language plpgsql
  stable
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  if (v_policy.calendar).period is not null then
    select array_agg(filling(u.p, b.refilled_at) order by u.n), array_agg(microtokens((u.p).capacity) + coalesce(b.level, 0) order by u.n),
           array_agg(coalesce(b.refilled_at, v_now) order by u.n),
           array_agg(coalesce(level_now(b.level, b.refilled_at, v_now, u.p), microtokens((u.p).capacity)) order by u.n),
           array_agg(b.level is not null order by u.n)
      into numbers, levels, refilled_at, levels_now, has_row
      from (select u.key, u.created, u.n, quota_of_key(v_policy, u.key, v_now) as p
              from unnest(keys, created) with ordinality as u (key, created, n)
            offset 0) as u
      left join lateral (select b.level, b.refilled_at
                           from ephemeral_buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on u.created is not true;
    return;
  end if;
  select array_agg(u.p order by u.n), array_agg(coalesce(b.level, microtokens(greatest((u.p).capacity, v_policy.capacity))) order by u.n),
         array_agg(coalesce(b.refilled_at, v_now) order by u.n),
         array_agg(case when b.level is null then microtokens((u.p).capacity) else refilled(b.level, b.refilled_at, v_now, u.p) end order by u.n),
         array_agg(b.level is not null order by u.n)
    into numbers, levels, refilled_at, levels_now, has_row
    from (select u.key, u.created, u.n, case when v_policy.overridden then
                                     coalesce((select with_override(v_policy, o) from overrides as o
                                                where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy)
                                   else v_policy end as p
            from unnest(keys, created) with ordinality as u (key, created, n)
          offset 0) as u
    left join lateral (select b.level, b.refilled_at
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on u.created is not true;
end;
$$;
comment on function ratelimit.rows_of_ephemeral_buckets(ratelimit.policies, text[], boolean[], timestamptz) is
  'The buckets of one policy as they are now, and the numbers that apply to each.';

-- Reads the idempotency keys that are live, of the elements on the buckets from_bucket to to_bucket. expires_at is compared after the
-- row is found, as in ratelimit_acquire. The function is inlined.
create or replace function ratelimit.live_ephemeral_idempotency_keys(
    policy_id bigint, keys text[], from_bucket integer, to_bucket integer, buckets integer[], charges bigint[], idempotency_keys text[], now timestamptz)
  returns table (place integer, granted ratelimit.idempotency_keys)
  language sql
  stable
as $$
  select u.place::integer, k.granted
    from unnest(buckets, charges, idempotency_keys) with ordinality as u (bucket, charge, idempotency_key, place)
   cross join lateral (select row(k.*)::ratelimit.idempotency_keys as granted, k.expires_at
                         from ratelimit.ephemeral_idempotency_keys as k
                        where k.policy_id       = live_ephemeral_idempotency_keys.policy_id
                          and k.key             = keys[u.bucket] collate "C"
                          and k.idempotency_key = u.idempotency_key collate "C"
                       offset 0) as k
   where u.bucket between from_bucket and to_bucket
     and u.charge > 0
     and k.expires_at > now
$$;
comment on function ratelimit.live_ephemeral_idempotency_keys(bigint, text[], integer, integer, integer[], bigint[], text[], timestamptz) is
  'The grants that live idempotency keys of a batch remember, by the number of the element.';

-- Locks the buckets that are wanted, in order, and answers which of their rows it has created: a bucket without a row gets one, which
-- is full.
create or replace function ratelimit.lock_ephemeral_buckets(policy_id bigint, keys text[], wanted boolean[], numbers ratelimit.policies[], now timestamptz)
  returns boolean[]
  language plpgsql
  volatile
as $$
declare
  v_policy_id alias for policy_id;
  v_key       text collate "C";
  v_created   boolean[] := array_fill(false, array[cardinality(keys)]);
begin
  for v_n in 1..cardinality(keys) loop
    continue when not wanted[v_n];
    v_key := keys[v_n];
    loop
      perform from ephemeral_buckets as b  -- by its newest row version, as in include/newest.sql
        where b.policy_id = v_policy_id
          and b.key      >= v_key
          and b.key      <= v_key
        order by b.key desc
        limit 1
          for update;
      exit when found;
      insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
      values (v_policy_id, v_key, stored_level(microtokens(numbers[v_n].capacity), numbers[v_n]), now, now)  -- due at once, as in ratelimit_charge
      on conflict on constraint ephemeral_buckets_pkey do nothing;
      v_created[v_n] := found;
      exit when found;
    end loop;
  end loop;
  return v_created;
end;
$$;
comment on function ratelimit.lock_ephemeral_buckets(bigint, text[], boolean[], ratelimit.policies[], timestamptz) is
  'Locks the wanted buckets of one policy, in order, and answers which rows it has created.';

-- Creates the rows of the buckets that are wanted and have none, and answers how many.
create or replace function ratelimit.create_ephemeral_buckets(
    policy_id bigint, keys text[], wanted boolean[], has_row boolean[], levels bigint[], refilled_at timestamptz[], numbers ratelimit.policies[])
  returns bigint
  language plpgsql
  volatile
as $$
declare
  v_created bigint;
begin
  insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
  select create_ephemeral_buckets.policy_id, u.key, u.level, u.refilled_at, due_after(u.reset_us, u.refilled_at)
    from (select u.*, short_wait((u.p).full_level, u.level, 0, u.p) as reset_us
            from (select u.*, numbers[u.n] as p
                    from unnest(keys, wanted, has_row, levels, create_ephemeral_buckets.refilled_at)
                         with ordinality as u (key, wanted, has_row, level, refilled_at, n)
                   where u.wanted and not u.has_row
                  offset 0) as u
          offset 0) as u
   order by u.key collate "C"
  on conflict on constraint ephemeral_buckets_pkey do nothing;
  get diagnostics v_created = row_count;
  return v_created;
end;
$$;
comment on function ratelimit.create_ephemeral_buckets(bigint, text[], boolean[], boolean[], bigint[], timestamptz[], ratelimit.policies[]) is
  'Creates the rows of the wanted buckets of one policy that have none, and answers how many.';

-- Writes the locked buckets that are wanted, and answers how many. It removes the rows that lock_ephemeral_buckets has created for
-- buckets that are not wanted.
create or replace function ratelimit.write_ephemeral_buckets(
    policy ratelimit.policies, keys text[], wanted boolean[], created boolean[], levels bigint[], refilled_at timestamptz[])
  returns bigint
  language plpgsql
  volatile
as $$
declare
  v_policy  alias for policy;
  v_written bigint;
begin
  for v_n in 1..cardinality(keys) loop
    continue when wanted[v_n] or not created[v_n];
    delete from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = keys[v_n] collate "C";
  end loop;
  update ephemeral_buckets as b
     set level = u.level, refilled_at = u.refilled_at, room = null
    from unnest(keys, wanted, levels, write_ephemeral_buckets.refilled_at) as u (key, wanted, level, refilled_at)
   where u.wanted
     and b.ctid = (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1);
  get diagnostics v_written = row_count;
  return v_written;
end;
$$;
comment on function ratelimit.write_ephemeral_buckets(ratelimit.policies, text[], boolean[], boolean[], bigint[], timestamptz[]) is
  'Writes the wanted buckets of one policy, which are locked, and answers how many.';

-- Prepares a batch for decide_in_order: numbers its policies and buckets, in the order in which buckets are locked within their
-- kind, and relates each element to earlier elements on its bucket. It reads no table. The arguments are parallel to the elements.
create or replace function ratelimit.numbered(
    in  policies text[], in keys text[], in costs bigint[], in idempotency_keys text[], in requests bigint[],
    out names          text[],     -- of the policies, in order
    out first          integer[],  -- for each policy, the number of its first bucket; one more: the number after the last
    out bucket_keys    text[],     -- for each bucket, its key
    out bucket_numbers integer[],  -- for each element, the number of its bucket
    out charges        bigint[],   -- what its request charges to that bucket
    out same           integer[],  -- the first element of its request on the same bucket
    out twins          integer[],  -- the last element of an earlier request on the same bucket, under the same idempotency key
    out bad            boolean[])  -- whether an argument is out of range
  language plpgsql
  immutable
as $$
begin
  select array_agg(s.bucket::integer order by s.place), array_agg(s.charge order by s.place), array_agg(s.same::integer order by s.place),
         array_agg(s.twin::integer order by s.place), array_agg(s.bad order by s.place)
    into bucket_numbers, charges, same, twins, bad
    from (select e.place, dense_rank() over (order by e.policy, e.key) as bucket,
                 least(sum(greatest(e.cost, 0)) over same, 9223372036854775807)::bigint as charge,
                 min(e.place) over same as same,
                 case when e.idempotency_key is not null then
                   max(e.place) over (partition by e.policy, e.key, e.idempotency_key order by e.request
                                      range between unbounded preceding and 1 preceding)
                 end as twin,
                 (acceptable(e.key, e.cost) and is_name(e.policy) and is_name(e.idempotency_key) is not false) is not true as bad
            from (select u.policy collate "C" as policy, u.key collate "C" as key, u.cost,
                         u.idempotency_key collate "C" as idempotency_key, u.request, u.place
                    from unnest(policies, keys, costs, idempotency_keys, requests)
                         with ordinality as u (policy, key, cost, idempotency_key, request, place)) as e
          window same as (partition by e.policy, e.key, e.request)) as s;
  select array_agg(b.key order by b.policy, b.key)
    into bucket_keys
    from (select distinct u.policy collate "C" as policy, u.key collate "C" as key from unnest(policies, keys) as u (policy, key)) as b;
  select array_agg(p.name order by p.first), array_agg(p.first order by p.first) || cardinality(bucket_keys) + 1
    into names, first
    from (select u.policy collate "C" as name, min(u.bucket) as first
            from unnest(policies, bucket_numbers) as u (policy, bucket)
           group by 1) as p;
end;
$$;
comment on function ratelimit.numbered(text[], text[], bigint[], text[], bigint[]) is
  'The policies and buckets of a batch, numbered in order, and how its elements are related.';

-- The order in which the buckets of policies are locked: durable policies first, then by name, as numbered has them. Policies that are
-- not known have no place in it.
create or replace function ratelimit.in_locking_order(policies ratelimit.policies[])
  returns integer[]
  language plpgsql
  immutable
as $$
begin
  return array(select p.n
                 from generate_subscripts(policies, 1) as p (n)
                where (policies[p.n]).id is not null
                order by (policies[p.n]).durable desc, p.n);
end;
$$;
comment on function ratelimit.in_locking_order(ratelimit.policies[]) is
  'The numbers of the policies that are known, in the order in which their buckets are locked.';

-- Reads everything that the requests of a batch are decided by: policies, overrides, buckets and idempotency keys.
--
-- The function is STABLE, so all of it is as of one snapshot. If a second statement read the idempotency keys, it could find
-- one whose tokens the bucket had not lost yet. (ratelimit_acquire may read twice: it asks about one bucket, and denies.)
--
-- names, first, keys (bucket_keys), buckets (bucket_numbers) and charges are those of numbered, and idempotency_keys those of the elements; null for none.
-- created are the buckets whose rows the caller has just created, which stand for none.
--
-- policies is parallel to names, and known to the elements: the grant that a live idempotency key remembers. The others are
-- parallel to the buckets: the policy with the numbers that apply to the key; the level as stored, and when; the level
-- now; whether there is a row. own is null if no policy has overrides; else it has the policies without the numbers of an override.
--
-- Locks and writes nothing.
create or replace function ratelimit.look_at_buckets(
    in  names text[], in first integer[], in keys text[], in created boolean[],
    in  buckets integer[], in charges bigint[], in idempotency_keys text[], in now timestamptz,
    out policies ratelimit.policies[], out known ratelimit.idempotency_keys[],
    out numbers ratelimit.policies[], out own ratelimit.policies[], out levels bigint[], out refilled_at timestamptz[], out levels_now bigint[], out has_row boolean[])
  language plpgsql
  stable
as $$
declare
  v_policy ratelimit.policies;
  v_from   integer;
  v_to     integer;
  v_read   record;
  v_found  record;
begin
  known := array_fill(null::ratelimit.idempotency_keys, array[cardinality(buckets)]);
  for v_n in 1..cardinality(names) loop
    select p.* into v_policy from policies as p where p.name = names[v_n] collate "C";
    policies[v_n] := v_policy;
    v_from        := first[v_n];
    v_to          := first[v_n + 1] - 1;
    if v_policy.durable is not false then  -- an unknown policy has no buckets
      v_read := rows_of_buckets(v_policy, keys[v_from:v_to], created[v_from:v_to], now);
    else
      v_read := rows_of_ephemeral_buckets(v_policy, keys[v_from:v_to], created[v_from:v_to], now);
    end if;
    if v_policy.overridden then
      own[v_from:v_to] := array_fill(v_policy, array[v_to - v_from + 1]);
    end if;
    numbers     := numbers || v_read.numbers;
    levels      := levels || v_read.levels;
    refilled_at := refilled_at || v_read.refilled_at;
    levels_now  := levels_now || v_read.levels_now;
    has_row     := has_row || v_read.has_row;
    if idempotency_keys is null then
      continue;
    elsif v_policy.durable is not false then
      for v_found in
        select k.place, k.granted from live_idempotency_keys(v_policy.id, keys, v_from, v_to, buckets, charges, idempotency_keys, now) as k
      loop
        known[v_found.place] := v_found.granted;
      end loop;
    else
      for v_found in
        select k.place, k.granted from live_ephemeral_idempotency_keys(v_policy.id, keys, v_from, v_to, buckets, charges, idempotency_keys, now) as k
      loop
        known[v_found.place] := v_found.granted;
      end loop;
    end if;
  end loop;
end;
$$;
comment on function ratelimit.look_at_buckets(text[], integer[], text[], boolean[], integer[], bigint[], text[], timestamptz) is
  'The policies, buckets and idempotency keys of many requests, as of one snapshot.';

-- Decides the requests of a batch one after another, as of one instant. It reads no table and writes none: its arguments have all
-- that it needs, and its answer has the buckets and idempotency keys as they are to be stored.
--
-- Parallel to the elements: requests, the number of its request; idempotency_keys, null for none; charges, buckets, same, twins and
-- bad, as of numbered; known, the grant that a live idempotency key remembers. Parallel to the buckets: numbers, the policy with
-- the numbers that apply; own, the policy without those of an override, null where a policy has had none; levels and refilled_at,
-- as stored, and after it as they are to be stored; levels_now, the level now.
--
-- wanted tells the buckets that are charged. The answers are parallel to the elements: remaining, retry_us, reset_us, capacities,
-- replayed and shadowed; granted tells of its request whether it is granted, null: refused; charged, whether a bucket is charged for
-- it; fits, whether its bucket allows it; kept, whether its grant is to be remembered. refused are the elements that have an error,
-- one for each request; known has the grant that a repeat differs from.
--
-- The steps for each request:
--   1. Each element is refused, replayed, or it fits or not. Of several errors the first counts, in this order: an argument out of range or slots,
--      an unknown policy, another cost under the idempotency key, a grant that was settled.
--   2. If all but those of shadow policies fit, the buckets are charged. The next request sees them so.
-- Then the answers are worked out, from the buckets as they were after each request.
create or replace function ratelimit.decide(
    in    requests bigint[], in idempotency_keys text[], in charges bigint[], in buckets integer[], in same integer[], in twins integer[], in bad boolean[],
    inout known ratelimit.idempotency_keys[], in numbers ratelimit.policies[], in own ratelimit.policies[], inout levels bigint[], inout refilled_at timestamptz[],
    in    levels_now bigint[], in now timestamptz,
    out wanted boolean[], out remaining bigint[], out retry_us bigint[], out reset_us bigint[], out capacities bigint[],
    out replayed boolean[], out shadowed boolean[], out granted boolean[], out charged boolean[], out fits boolean[], out kept boolean[],
    out refused integer[])
  language plpgsql
  immutable
as $$
declare
  v_count      integer := cardinality(requests);
  v_none       constant boolean[] := array_fill(null::boolean, array[v_count]);
  v_start      integer;        -- the first element of a request
  v_end        integer := 0;   -- the last
  v_b          integer;        -- the bucket of an element
  v_earlier    integer;        -- an element of an earlier request
  v_errors     integer[];      -- by kind of error: the first element that has it
  v_granted    boolean;
  v_charged    boolean;
  v_then_level bigint[]      := array_fill(null::bigint, array[v_count]);       -- parallel to the elements: what the bucket held after the request, ...
  v_then_at    timestamptz[] := array_fill(null::timestamptz, array[v_count]);  -- ... and when
begin
  replayed := v_none;
  shadowed := v_none;
  granted  := v_none;
  charged  := v_none;
  fits     := v_none;
  kept     := array_fill(false, array[v_count]);
  wanted   := array_fill(false, array[cardinality(levels)]);
  while v_end < v_count loop
    v_start   := v_end + 1;
    v_end     := v_start;
    v_granted := true;
    v_charged := false;
    v_errors  := '{}';
    while requests[v_end + 1] = requests[v_start] loop
      v_end := v_end + 1;
    end loop;

    -- 1. Each element.
    for v_i in v_start..v_end loop
      v_b := buckets[v_i];
      if bad[v_i] or own is not null and (own[v_b].calendar).lease is not null then
        v_errors[1] := coalesce(v_errors[1], v_i);
        continue;
      elsif numbers[v_b].id is null then
        v_errors[2] := coalesce(v_errors[2], v_i);
        continue;
      end if;
      if charges[v_i] > 0 and twins[v_i] is not null and known[v_i] is null then
        -- Granted and remembered by an earlier request of this call? Its twin may have been denied, and a twin of that granted.
        v_earlier := twins[v_i];
        while v_earlier is not null and not kept[v_earlier] loop
          v_earlier := twins[v_earlier];
        end loop;
        if v_earlier is not null and charges[v_earlier] <> charges[v_i] then
          known[v_i] := row(null, charges[v_earlier], null, null, null, null, null, idempotency_keys[v_i], null, null, null, null)::ratelimit.idempotency_keys;
        elsif v_earlier is not null then
          replayed[v_i]     := true;
          v_then_level[v_i] := v_then_level[v_earlier];
          v_then_at[v_i]    := v_then_at[v_earlier];
          fits[v_i]         := true;
          continue;
        end if;
      end if;
      if known[v_i].cost <> charges[v_i] then
        v_errors[3] := coalesce(v_errors[3], v_i);
        continue;
      elsif known[v_i].settled is not null then
        v_errors[4] := coalesce(v_errors[4], v_i);
        continue;
      end if;
      replayed[v_i] := known[v_i].cost is not null;
      if replayed[v_i] then
        fits[v_i] := left_us(known[v_i], now) = 0;  -- a reserved grant may have to wait
      else
        fits[v_i] := charges[v_i] = 0
                     or case when charges[v_i] <= numbers[v_b].capacity then microtokens(charges[v_i]) <= levels_now[v_b] else false end;
      end if;
      v_granted := v_granted and (fits[v_i] or numbers[v_b].shadow);
    end loop;
    if v_errors <> '{}' then
      refused := refused || coalesce(v_errors[1], v_errors[2], v_errors[3], v_errors[4]);
      for v_i in v_start..v_end loop
        fits[v_i] := null;
      end loop;
      continue;
    end if;

    -- 2. The buckets.
    for v_i in v_start..v_end loop
      v_b := buckets[v_i];
      if v_granted and fits[v_i] and not replayed[v_i] and charges[v_i] > 0 then
        v_charged := true;
        if same[v_i] = v_i then
          if not wanted[v_b] then
            wanted[v_b]      := true;
            refilled_at[v_b] := refilled_until(refilled_at[v_b], now, numbers[v_b].tick);
          end if;
          levels_now[v_b] := levels_now[v_b] - microtokens(charges[v_i]);
          levels[v_b]     := levels_now[v_b];
        end if;
        kept[v_i] := idempotency_keys[v_i] is not null;
      end if;
      shadowed[v_i] := not fits[v_i] and numbers[v_b].shadow;
      if v_then_level[v_i] is null then
        v_then_level[v_i] := levels[v_b];
        v_then_at[v_i]    := refilled_at[v_b];
      end if;
    end loop;
    for v_i in v_start..v_end loop
      granted[v_i] := v_granted;
      charged[v_i] := v_charged;
    end loop;
  end loop;

  -- The answers.
  select array_agg(a.remaining order by a.place), array_agg(a.retry_us order by a.place),
         array_agg(a.reset_us order by a.place), array_agg(a.capacity order by a.place)
    into remaining, retry_us, reset_us, capacities
    from (select e.place,
                 case
                   when (e.known).cost is not null then (e.known).remaining
                   else whole_tokens(refilled(e.level, e.refilled_at, decide.now, e.p))
                 end as remaining,
                 case
                   when e.fits or (e.p).shadow then 0
                   when (e.known).cost is not null then left_us(e.known, decide.now)
                   when ((e.p).calendar).ends_at is not null then wait_past_end(e.charge, stored_level(e.level, e.p), e.refilled_at, decide.now, e.p, own[e.bucket])
                   when e.charge <= (e.p).capacity then wait_until(microtokens(e.charge), e.level, e.refilled_at, decide.now, e.p)
                 end as retry_us,
                 case
                   when (e.known).cost is not null then microseconds((e.known).reset_after)::bigint
                   when ((e.p).calendar).ends_at is not null then wait_past_end(null, stored_level(e.level, e.p), e.refilled_at, decide.now, e.p, own[e.bucket])
                   else wait_until((e.p).full_level, e.level, e.refilled_at, decide.now, e.p)
                 end as reset_us,
                 coalesce((e.known).capacity, (e.p).capacity) as capacity
            from (select u.*, numbers[u.bucket] as p, decide.known[u.place] as known
                    from unnest(decide.buckets, charges, decide.fits, v_then_level, v_then_at)
                         with ordinality as u (bucket, charge, fits, level, refilled_at, place)
                  offset 0) as e) as a;
  if own is not null then
    retry_us := waits_of_all(requests, charges, buckets, replayed, numbers, own, granted, v_then_level, v_then_at, now, retry_us);
  end if;
end;
$$;
comment on function ratelimit.decide(bigint[], text[], bigint[], integer[], integer[], integer[], boolean[], ratelimit.idempotency_keys[], ratelimit.policies[], ratelimit.policies[], bigint[], timestamptz[], bigint[], timestamptz) is
  'Decides the requests of a batch one after another, from buckets and idempotency keys as they were read.';

-- retry_us, where overrides end: the longest wait of a denied request is to be the first instant at which all its elements fit. An
-- element may fit until its override ends, and then no more. While there is one whose override is over by the longest wait, it waits
-- by the numbers of the policy.
create or replace function ratelimit.waits_of_all(
    requests bigint[], charges bigint[], buckets integer[], replayed boolean[], numbers ratelimit.policies[],
    own ratelimit.policies[], granted boolean[], levels bigint[], refilled_at timestamptz[], now timestamptz, retry_us bigint[])
  returns bigint[]
  language plpgsql
  immutable
as $$
declare
  v_count   integer := cardinality(requests);
  v_start   integer;       -- the first element of a request
  v_end     integer := 0;  -- the last
  v_policy  ratelimit.policies;
  v_left_us bigint[];      -- parallel to the elements: microseconds until the numbers end; null: they do not, or do not count any more
  v_longest bigint;
  v_over    boolean;       -- an override is over by then
begin
  for v_i in 1..v_count loop
    v_policy := numbers[buckets[v_i]];
    if (v_policy.calendar).ends_at is not null and replayed[v_i] is false and charges[v_i] > 0 and not v_policy.shadow then
      v_left_us[v_i] := left_of_numbers(v_policy, now);
    end if;
  end loop;
  while v_left_us is not null and v_end < v_count loop
    v_start := v_end + 1;
    v_end   := v_start;
    while requests[v_end + 1] = requests[v_start] loop
      v_end := v_end + 1;
    end loop;
    while granted[v_start] is false loop
      select case when count(u.wait_us) = count(*) then max(u.wait_us) end into v_longest from unnest(retry_us[v_start:v_end]) as u (wait_us);
      v_over := false;
      for v_i in v_start..v_end loop
        continue when (v_left_us[v_i] <= v_longest) is not true;
        v_over         := true;
        v_left_us[v_i] := null;
        retry_us[v_i]  := wait_after_end(charges[v_i], stored_level(levels[v_i], numbers[buckets[v_i]]), refilled_at[v_i], now, numbers[buckets[v_i]], own[buckets[v_i]]);
      end loop;
      exit when not v_over;
    end loop;
  end loop;
  return retry_us;
end;
$$;
comment on function ratelimit.waits_of_all(bigint[], bigint[], integer[], boolean[], ratelimit.policies[], ratelimit.policies[], boolean[], bigint[], timestamptz[], timestamptz, bigint[]) is
  'The waits of the elements of a batch, where an override may end before all elements of a request fit.';

-- Decides requests one after another at one instant, whatever they ask for. The fast path is take; this is the rest.
--
-- The arguments are parallel arrays of elements. The elements of a request follow each other and have its number in
-- requests. idempotency_keys is null, or has the key of the request in each element. elements has their numbers in the
-- batch. joint asks for the answers of whole requests, too.
--
-- The steps of a round:
--   1. Lock the buckets that this round may write, and create their rows. The first round locks none.
--   2. Read the clock, and then by one snapshot the policies, overrides, buckets and idempotency keys.
--   3. Decide all requests in order, in memory.
--   4. Is it to be done so? If nothing is taken, the answers stand, and locks and rows of step 1 are rolled back. The first round
--      creates rows and remembers their grants, and changes no row. If one is to change, a second round locks the buckets that are wanted. So it does if an
--      element with an idempotency key is denied by a bucket whose row would be created: since the read, its first grant may have
--      been committed, and the row removed. A later round that wants a bucket that is not locked makes the next one lock all.
--   5. Write each bucket once, and remember the grants. If another session created a row or stored an idempotency key first, the
--      next round locks all. Each round after the second is due to another session, or to refill meanwhile.
--   6. After the last round: the answer.
--
-- taken tells that the caller has charged buckets for other requests of the batch.
--
-- The private errors, none of which leaves the package:
--   RL00A  here: rolls back a round, for the next one or for the end.
--   RL00T  here if taken, and in acquire_batch, which catches it: the fast path is rolled back, and the whole batch is decided here.
--          ratelimit_acquire_all raises and catches its own: it reads and charges the buckets once more, and then asks acquire_batch.
--   RL00L  acquire_batch raises and catches it: the fast path is rolled back, and begins again with the buckets locked; if they were, the whole
--          batch is decided here.
--
-- All that take from more than one bucket lock them in one order: durable policies first, then by policy and key. To
-- create a row is part of the order, because an INSERT waits for the session that has created the row. So calls that are
-- transactions of their own never deadlock with each other. If the caller has charged buckets already (taken), a grant here would break
-- the order: it is RL00T.
--
-- Locks:  the buckets of the requests that are granted, and those that a second round has locked in vain; all buckets, if a third
--         round was needed. Of each policy the buckets, and then the rows of its idempotency keys.
-- Writes: buckets and idempotency keys of granted requests.
create or replace function ratelimit.decide_in_order(
    policies text[], keys text[], costs bigint[], requests bigint[], idempotency_keys text[], elements bigint[], joint boolean, taken boolean)
  returns ratelimit.packed
  language plpgsql
  volatile
as $$
declare
  v_batch       record;             -- the requests, as of numbered
  v_look        record;             -- what look_at_buckets has read
  v_verdict     record;             -- what decide has decided
  v_now         timestamptz;
  v_round       integer   := 0;
  v_lock        boolean[];          -- parallel to the buckets: the next round locks it
  v_created     boolean[];          -- likewise: this round has created its row
  v_policies    ratelimit.policies[];  -- parallel to the names: as they were read
  v_numbers     ratelimit.policies[];  -- parallel to the buckets: the policy with the numbers that apply
  v_locked      ratelimit.policies[];  -- the policies by which this round has locked
  v_in_order    integer[];          -- the numbers of the known policies, durable ones first
  v_policy      ratelimit.policies;
  v_from        integer;            -- the first bucket of v_policy
  v_to          integer;            -- the last
  v_places      bigint[];           -- the elements of v_policy whose grants are to be remembered; parallel to it:
  v_remaining   bigint[];
  v_capacities  bigint[];
  v_reset_us    bigint[];
  v_written     bigint;
  v_remembered  boolean;
  v_refused     boolean[];          -- parallel to the elements: it is the one that its request is refused for
  v_place       integer;
  v_over        boolean   := false; -- nothing is taken, and the locks are to be rolled back
  v_packed      ratelimit.packed;
begin
  v_batch := numbered(policies, keys, costs, idempotency_keys, requests);
  v_lock  := array_fill(false, array[cardinality(v_batch.bucket_keys)]);

  -- Taken here, and not by the reads of a round: a round that is rolled back would give it back, and the next one would lock
  -- buckets before policies. A migration locks policies first.
  lock table policies in access share mode;

  <<rounds>>
  loop
    v_round := v_round + 1;
    if v_round = 1000 then
      raise exception 'the buckets changed at every look'
        using errcode = '40001',
              hint    = 'Try again.';
    end if;
    begin
      -- 1. Lock.
      v_created := array_fill(false, array[cardinality(v_lock)]);
      if v_round > 1 then
        v_now      := clock();
        v_locked   := v_policies;
        v_in_order := in_locking_order(v_policies);
        for v_n in 1..coalesce(cardinality(v_in_order), 0) loop
          v_policy := v_policies[v_in_order[v_n]];
          v_from   := v_batch.first[v_in_order[v_n]];
          v_to     := v_batch.first[v_in_order[v_n] + 1] - 1;
          if v_policy.durable then
            v_created[v_from:v_to] := lock_buckets(v_policy.id, v_batch.bucket_keys[v_from:v_to], v_lock[v_from:v_to], v_numbers[v_from:v_to], v_now);
          else
            v_created[v_from:v_to] := lock_ephemeral_buckets(v_policy.id, v_batch.bucket_keys[v_from:v_to], v_lock[v_from:v_to], v_numbers[v_from:v_to], v_now);
          end if;
        end loop;
      end if;

      -- 2. Read. The locks may have waited.
      v_now      := clock();
      v_look     := look_at_buckets(v_batch.names, v_batch.first, v_batch.bucket_keys, v_created, v_batch.bucket_numbers, v_batch.charges, idempotency_keys, v_now);
      v_policies := v_look.policies;
      v_numbers  := v_look.numbers;
      if v_round > 1 and exists (select from generate_subscripts(v_policies, 1) as p (n)
                                  where (v_policies[p.n]).id is distinct from (v_locked[p.n]).id) then
        -- a policy was defined anew since the locks
        v_lock := array_fill(true, array[cardinality(v_lock)]);
        raise exception sqlstate 'RL00A';
      end if;

      -- 3. Decide.
      v_verdict := decide(requests, idempotency_keys, v_batch.charges, v_batch.bucket_numbers, v_batch.same, v_batch.twins, v_batch.bad, v_look.known,
                          v_numbers, v_look.own, v_look.levels, v_look.refilled_at, v_look.levels_now, v_now);

      -- 4. To be done so?
      if not true = any (v_verdict.wanted) then
        exit rounds when v_round = 1;
        v_over := true;
        raise exception sqlstate 'RL00A';
      end if;
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
      if taken then
        raise exception sqlstate 'RL00T';
      elsif v_round = 1 then
        if exists (select from unnest(v_verdict.wanted, v_look.has_row) as u (wanted, has_row) where u.wanted and u.has_row)
           or idempotency_keys is not null
              and exists (select from unnest(v_batch.bucket_numbers, v_verdict.fits, idempotency_keys) as u (bucket, fits, idempotency_key)
                           where not u.fits and u.idempotency_key is not null and v_verdict.wanted[u.bucket]) then
          v_lock := v_verdict.wanted;
          raise exception sqlstate 'RL00A';
        end if;
      elsif exists (select from unnest(v_verdict.wanted, v_lock) as u (wanted, locked) where u.wanted and not u.locked) then
        v_lock := array_fill(true, array[cardinality(v_lock)]);
        raise exception sqlstate 'RL00A';
      end if;

      -- 5. Write and remember.
      if v_look.own is not null then
        v_verdict.levels := array(select stored_level(u.level, v_numbers[u.n]) from unnest(v_verdict.levels) with ordinality as u (level, n) order by u.n);
      end if;
      v_in_order := in_locking_order(v_policies);
      for v_n in 1..cardinality(v_in_order) loop
        v_policy := v_policies[v_in_order[v_n]];
        v_from   := v_batch.first[v_in_order[v_n]];
        v_to     := v_batch.first[v_in_order[v_n] + 1] - 1;
        if v_round > 1 and v_policy.durable then
          v_written := write_buckets(v_policy, v_batch.bucket_keys[v_from:v_to], v_verdict.wanted[v_from:v_to], v_created[v_from:v_to],
                                     v_verdict.levels[v_from:v_to], v_verdict.refilled_at[v_from:v_to]);
        elsif v_round > 1 then
          v_written := write_ephemeral_buckets(v_policy, v_batch.bucket_keys[v_from:v_to], v_verdict.wanted[v_from:v_to], v_created[v_from:v_to],
                                               v_verdict.levels[v_from:v_to], v_verdict.refilled_at[v_from:v_to]);
        elsif v_policy.durable then
          v_written := create_buckets(v_policy.id, v_batch.bucket_keys[v_from:v_to], v_verdict.wanted[v_from:v_to], v_look.has_row[v_from:v_to],
                                      v_verdict.levels[v_from:v_to], v_verdict.refilled_at[v_from:v_to], v_numbers[v_from:v_to]);
        else
          v_written := create_ephemeral_buckets(v_policy.id, v_batch.bucket_keys[v_from:v_to], v_verdict.wanted[v_from:v_to], v_look.has_row[v_from:v_to],
                                                v_verdict.levels[v_from:v_to], v_verdict.refilled_at[v_from:v_to], v_numbers[v_from:v_to]);
        end if;
        v_remembered := true;
        if true = any (v_verdict.kept) then
          select array_agg(u.place order by u.bucket, u.place), array_agg(u.remaining order by u.bucket, u.place),
                 array_agg(u.capacity order by u.bucket, u.place), array_agg(u.reset_us order by u.bucket, u.place)
            into v_places, v_remaining, v_capacities, v_reset_us
            from unnest(v_batch.bucket_numbers, v_verdict.kept, v_batch.same, v_verdict.remaining, v_verdict.capacities, v_verdict.reset_us)
                 with ordinality as u (bucket, kept, same, remaining, capacity, reset_us, place)
           where u.kept and u.same = u.place and u.bucket between v_from and v_to;
          if v_places is not null and v_policy.durable then
            v_remembered := remember_idempotency_keys(v_policy, keys, idempotency_keys, v_batch.charges, v_now, false,
                                                      v_places, v_remaining, v_capacities, v_reset_us);
          elsif v_places is not null then
            v_remembered := remember_ephemeral_idempotency_keys(v_policy, keys, idempotency_keys, v_batch.charges, v_now, false,
                                                                v_places, v_remaining, v_capacities, v_reset_us);
          end if;
        end if;
        if v_written < (select count(*) from unnest(v_verdict.wanted[v_from:v_to]) as u (wanted) where u.wanted) or v_remembered is not true then
          v_lock := array_fill(true, array[cardinality(v_lock)]);
          raise exception sqlstate 'RL00A';
        end if;
      end loop;
      exit rounds;
    exception when sqlstate 'RL00A' then
      exit rounds when v_over;
    end;
  end loop;

  -- 6. The answer.
  select array_agg(elements[a.place]), array_agg(a.remaining), array_agg(a.retry_us), array_agg(a.reset_us), array_agg(a.capacity),
         case when bool_or(a.replayed) then array_agg(a.replayed) end, case when bool_or(a.shadowed) then array_agg(a.shadowed) end
    into v_packed.elements, v_packed.remaining, v_packed.retry_after_us, v_packed.reset_after_us, v_packed.capacity,
         v_packed.replayed, v_packed.shadowed
    from unnest(v_verdict.remaining, v_verdict.retry_us, v_verdict.reset_us, v_verdict.capacities, v_verdict.replayed, v_verdict.shadowed, v_verdict.granted)
         with ordinality as a (remaining, retry_us, reset_us, capacity, replayed, shadowed, granted, place)
   where a.granted is not null;
  if joint then
    select array_agg(r.request), array_agg(r.granted),
           array_agg(case when r.granted then r.replayed and not r.charged else r.waits end),
           array_agg(r.granted and r.shadowed), array_agg(r.binding::integer)
      into v_packed.requests, v_packed.requests_allowed, v_packed.requests_replayed, v_packed.requests_shadowed, v_packed.bindings
      from (select a.request, bool_and(a.granted) as granted, bool_or(a.charged) as charged, bool_or(a.replayed) as replayed,
                   bool_or(a.shadowed) as shadowed,
                   bool_and((a.replayed or a.retry_us = 0) is true) as waits,
                   (min(binding_rank(v_numbers[a.bucket].shadow, a.cost = 0, a.granted, a.remaining, a.charge, a.retry_us, a.place)))[4]
                     - min(a.place) + 1 as binding
              from unnest(requests, costs, v_batch.charges, v_batch.bucket_numbers, v_verdict.remaining, v_verdict.retry_us, v_verdict.replayed,
                          v_verdict.shadowed, v_verdict.granted, v_verdict.charged)
                   with ordinality as a (request, cost, charge, bucket, remaining, retry_us, replayed, shadowed, granted, charged, place)
             where a.granted is not null
             group by a.request) as r;
  end if;
  if v_verdict.refused is not null then
    v_refused := array_fill(false, array[cardinality(requests)]);
    foreach v_place in array v_verdict.refused loop
      v_refused[v_place] := true;
    end loop;
    select array_agg(r.request order by r.place), array_agg(f.error_code order by r.place), array_agg(f.error_message order by r.place),
           array_agg(detail_of_element(f.error_message, f.error_detail, r.element, r.elements) order by r.place), array_agg(f.error_hint order by r.place)
      into v_packed.refused, v_packed.error_codes, v_packed.error_messages, v_packed.error_details, v_packed.error_hints
      from (select u.*, u.place - min(u.place) over same + 1 as element, count(*) over same as elements
              from unnest(requests, policies, keys, costs, v_batch.charges, v_batch.bad, decide_in_order.idempotency_keys, v_refused)
                   with ordinality as u (request, policy, key, cost, charge, bad, idempotency_key, refused, place)
            window same as (partition by u.request)
            offset 0) as r
     cross join lateral refusal(r.policy, r.key, case when r.bad then r.cost else r.charge end, r.idempotency_key, v_verdict.known[r.place]) as f
     where r.refused;
  end if;
  return v_packed;
end;
$$;
comment on function ratelimit.decide_in_order(text[], text[], bigint[], bigint[], text[], bigint[], boolean, boolean) is
  'Decides requests one after another at one instant, whatever they ask for.';

-- Decides the elements of a batch that the fast path has not granted: places are their numbers. First the plain denials, which lock
-- nothing, and then what is left of them, by decide_in_order. requests is parallel to all elements, null: each is one; joint and
-- taken are for decide_in_order.
--
-- Locks and writes: as decide_in_order, for the elements that are left to it.
create or replace function ratelimit.decide_left(
    policies text[], keys text[], costs bigint[], requests bigint[], idempotency_keys text[], places bigint[], joint boolean, taken boolean)
  returns ratelimit.packed
  language plpgsql
  volatile
as $$
declare
  v_denied ratelimit.packed;
  v_rest   bigint[] := places;
begin
  if not joint and idempotency_keys is null then
    v_denied := denied(policies, keys, costs, places, clock());
    if cardinality(v_denied.elements) = cardinality(places) then
      return v_denied;
    elsif v_denied.elements is not null then
      v_rest := array(select unnest(places) except select unnest(v_denied.elements) order by 1);
    end if;
  end if;
  requests := coalesce(requests, array(select generate_series(1, cardinality(policies))));
  if cardinality(v_rest) < cardinality(policies) then
    policies := array(select decide_left.policies[u.n] from unnest(v_rest) as u (n));
    keys     := array(select decide_left.keys[u.n] from unnest(v_rest) as u (n));
    costs    := array(select decide_left.costs[u.n] from unnest(v_rest) as u (n));
    requests := array(select decide_left.requests[u.n] from unnest(v_rest) as u (n));
    if idempotency_keys is not null then
      idempotency_keys := array(select decide_left.idempotency_keys[u.n] from unnest(v_rest) as u (n));
    end if;
  end if;
  return both_of(v_denied, decide_in_order(policies, keys, costs, requests, idempotency_keys, v_rest, joint, taken));
end;
$$;
comment on function ratelimit.decide_left(text[], text[], bigint[], bigint[], text[], bigint[], boolean, boolean) is
  'Decides the elements of a batch that were not granted at first sight.';

-- The denials of all policies, as of one snapshot, because the function is STABLE: a policy could be redefined between two reads. A
-- shadow policy denies nothing, and a quota is left to decide_in_order.
create or replace function ratelimit.denied(policies text[], keys text[], costs bigint[], places bigint[], now timestamptz)
  returns ratelimit.packed
  language plpgsql
  stable
as $$
declare
  v_names  text[] := policies[1:1];
  v_name   text;
  v_policy ratelimit.policies;
  v_part   ratelimit.packed;
  v_all    ratelimit.packed;
begin
  if (policies[1] collate "C" = all (policies)) is not true then
    v_names := array(select distinct denied.policies[u.place] collate "C" from unnest(places) as u (place));
  end if;
  foreach v_name in array v_names loop
    select p.* into v_policy from policies as p where p.name = v_name collate "C" and not p.shadow and (p.calendar).period is null;
    continue when not found;
    if v_policy.durable then
      v_part := denied_in_buckets(v_policy, policies, keys, costs, places, now);
    else
      v_part := denied_in_ephemeral_buckets(v_policy, policies, keys, costs, places, now);
    end if;
    if v_all.elements is null then
      v_all := v_part;
    else
      v_all := both_of(v_all, v_part);
    end if;
  end loop;
  return v_all;
end;
$$;
comment on function ratelimit.denied(text[], text[], bigint[], bigint[], timestamptz) is
  'The single requests of a batch that are plainly denied.';

-- Two parts of an answer as one. If neither has requests of several elements, the columns about them are null.
create or replace function ratelimit.both_of(a ratelimit.packed, b ratelimit.packed)
  returns ratelimit.packed
  language plpgsql
  immutable
as $$
begin
  if a.elements is null then
    return b;
  end if;
  b.replayed       := case when b.replayed is not null then array_fill(false, array[cardinality(a.elements)]) || b.replayed end;
  b.shadowed       := case when b.shadowed is not null then array_fill(false, array[cardinality(a.elements)]) || b.shadowed end;
  b.elements       := a.elements || b.elements;
  b.remaining      := a.remaining || b.remaining;
  b.retry_after_us := a.retry_after_us || b.retry_after_us;
  b.reset_after_us := a.reset_after_us || b.reset_after_us;
  b.capacity       := a.capacity || b.capacity;
  return b;
end;
$$;
comment on function ratelimit.both_of(ratelimit.packed, ratelimit.packed) is
  'The answers to grants or denials that are neither replayed nor shadowed, and to other requests.';

-- Decides many requests, as if each were asked on its own, one after another. The functions for many requests differ only
-- in how they take the requests and show the answers; the comments of ratelimit_acquire_packed and of type ratelimit.packed explain them.
--
-- There are two ways. The fast path is for requests that fit, and most do. take.sql charges the buckets of one policy; a batch of
-- several policies is split into parts, in the order in which buckets are locked: durable policies first, then by name. The other
-- way is decide_left: plain denials take one look at the bucket (deny.sql), and decide_in_order decides all other requests. The
-- fast path is a subtransaction, and this is what follows it:
--
--   all elements are charged             the answers
--   some are, of single requests         decide_left decides the others: without a grant, the answers of both
--   ... and it would grant one of them   RL00T: all is rolled back, because its bucket would be locked out of order
--   none is                              RL00T: locks are given back, of buckets that were waited for and not charged
--   an idempotency key is stored before  unique_violation, and RL00T for one that is no valid key
-- After either, decide_left decides the whole batch.
--
-- Requests of several elements (sizes) are granted only if all their buckets cover what is charged to them. So all buckets of the
-- batch are read first, and charged only if all cover; otherwise decide_left follows. If another session is at one of them, they are
-- locked before they are charged. If one was not charged after all, RL00L: the fast path is rolled back, and begins again with the
-- locks, once.
--
-- In a read-only transaction decide_left decides from the start, because an UPDATE fails there even if it would take
-- nothing.
--
-- Locks:  as decide_in_order; and the buckets that the fast path has waited for and not charged, unless it was rolled back.
-- Writes: buckets and idempotency keys of granted requests.
--
-- The settings of this function are for all statements about many buckets: also those of the functions in
-- asked_of.sql, take.sql, deny.sql, look_at_buckets.sql, rows.sql, remember.sql and decide_in_order.sql, which nobody else calls.
create or replace function ratelimit.acquire_batch(
    policies text[], keys text[], costs bigint[], sizes integer[], idempotency_keys text[])
  returns ratelimit.packed
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan  -- no plan is better for some arguments than for others, and planning is slow
  set enable_seqscan = off    -- as in ratelimit_acquire
  set enable_hashjoin = off   -- nested loops alone keep the order of key, in which buckets are locked
  set enable_mergejoin = off  -- likewise
  set enable_tidscan = on     -- likewise: found by row id, the bucket is on the inner side
  set enable_indexscan = on   -- include/newest.sql reads the index from its end
  set enable_bitmapscan = off  -- likewise; a bitmap would read every version
  set jit = off               -- the statements take less time than compiling them
as $$
declare
  v_count    integer := cardinality(policies);
  v_requests bigint[];  -- for each element, the number of its request; null without sizes: its own number
  v_misfits  bigint[];  -- requests of a size that is refused
  v_policy   policies;  -- that of all elements, or of a part
  v_asked    record;
  v_parts    part[];    -- the batch by policy; null if all elements have one
  v_seen     record;
  v_row_ids  tid[];
  v_now      timestamptz;
  v_covered  boolean;   -- every bucket covers all that is asked of it; true without sizes; null: all elements have one policy
  v_lock     boolean;   -- lock the buckets before take
  v_taken    record;
  v_kept     boolean := true;  -- the idempotency keys of what was taken are stored
  v_places   bigint[];  -- elements that the fast path granted; parallel to it:
  v_remaining bigint[];
  v_reset_us bigint[];
  v_capacity bigint[];
  v_shadows  boolean[];
  v_left     bigint[];  -- the other elements
  v_answers  packed;
begin
  if (array_dims(policies) = '[1:' || v_count || ']' and array_dims(keys) = array_dims(policies)
      and (costs is null or array_dims(costs) = array_dims(policies)) and sizes is null
      and (idempotency_keys is null or array_dims(idempotency_keys) = array_dims(policies))) is not true then
    select f.policies, f.keys, f.costs, f.sizes, f.idempotency_keys, f.requests, f.misfits
      into policies, keys, costs, sizes, idempotency_keys, v_requests, v_misfits
      from batch_form(policies, keys, costs, sizes, idempotency_keys) as f;
  elsif costs is null then
    costs := array_fill(1::bigint, array[v_count]);
  end if;

  loop
    begin
      if v_count > 0 and current_setting('transaction_read_only') = 'off' then
        v_now := clock();
        if sizes is null and policies[1] collate "C" = all (policies) then
          select p.* into v_policy from policies as p where p.name = acquire_batch.policies[1] collate "C";
          if v_policy.durable then
            v_taken := take_from_buckets(v_policy, keys, costs, null, null, v_now);
          else
            v_taken := take_from_ephemeral_buckets(v_policy, keys, costs, null, null, v_now);
          end if;
          if cardinality(v_taken.places) = v_count and idempotency_keys is null then  -- so end most batches
            return (v_taken.places, v_taken.remaining, array_fill(0::bigint, array[v_count]), v_taken.reset_us,
                    coalesce(v_taken.capacities, array_fill(v_policy.capacity, array[v_count])), null, null,
                    null, null, null, null, null, null, null, null, null, null)::packed;
          end if;
        else
          v_asked   := parts_of(policies, keys, costs, v_requests);
          v_parts   := v_asked.parts;
          v_covered := sizes is null or (v_asked.size = v_count and not v_asked.twice) is true;
        end if;
        if sizes is not null and v_covered then
          for v_n in 1..cardinality(v_parts) loop
            v_policy := (v_parts[v_n]).policy;
            if v_policy.durable then
              v_seen := covered_in_buckets(v_policy, (v_parts[v_n]).asked, v_now);
            else
              v_seen := covered_in_ephemeral_buckets(v_policy, (v_parts[v_n]).asked, v_now);
            end if;
            v_covered := v_seen.row_ids is not null;
            exit when not v_covered;
            v_lock    := v_lock or v_seen.contended;
            v_parts[v_n].row_ids := v_seen.row_ids;
          end loop;
          if v_covered and v_lock then
            for v_n in 1..cardinality(v_parts) loop
              v_policy := (v_parts[v_n]).policy;
              if v_policy.durable then
                v_row_ids := lock_asked_of_buckets(v_policy, (v_parts[v_n]).asked);
              else
                v_row_ids := lock_asked_of_ephemeral_buckets(v_policy, (v_parts[v_n]).asked);
              end if;
              if v_row_ids is null then
                raise exception sqlstate 'RL00T';  -- rolls back to the begin above; caught below, so no caller sees it
              end if;
              v_parts[v_n].row_ids := v_row_ids;
            end loop;
            if exists (select from unnest(v_parts) as u
                        where u.policy is distinct from (select p from policies as p where p.id = (u.policy).id)) then
              raise exception sqlstate 'RL00T';  -- the buckets are as of now, and the policy was read before
            end if;
            v_now := clock();  -- it may have waited
          end if;
        end if;
        if v_covered is not false then
          for v_n in 1..coalesce(cardinality(v_parts), 1) loop
            if v_parts is not null then
              v_policy := (v_parts[v_n]).policy;
              if v_policy.durable then
                v_taken := take_from_buckets(v_policy, keys, costs, (v_parts[v_n]).asked, (v_parts[v_n]).row_ids, v_now);
              else
                v_taken := take_from_ephemeral_buckets(v_policy, keys, costs, (v_parts[v_n]).asked, (v_parts[v_n]).row_ids, v_now);
              end if;
            end if;
            continue when v_taken.places is null;
            v_taken.capacities := coalesce(v_taken.capacities, array_fill(v_policy.capacity, array[cardinality(v_taken.places)]));
            v_places    := v_places || v_taken.places;
            v_remaining := v_remaining || v_taken.remaining;
            v_reset_us  := v_reset_us || v_taken.reset_us;
            v_capacity  := v_capacity || v_taken.capacities;
            if sizes is not null then
              v_shadows := v_shadows || array_fill(v_policy.shadow, array[cardinality(v_taken.places)]);
            end if;
            if idempotency_keys is not null and v_policy.durable then
              v_kept := v_kept and remember_idempotency_keys(
                v_policy, keys, idempotency_keys, costs, v_now, true, v_taken.places, v_taken.remaining, v_taken.capacities, v_taken.reset_us);
            elsif idempotency_keys is not null then
              v_kept := v_kept and remember_ephemeral_idempotency_keys(
                v_policy, keys, idempotency_keys, costs, v_now, true, v_taken.places, v_taken.remaining, v_taken.capacities, v_taken.reset_us);
            end if;
          end loop;
          if sizes is not null and coalesce(cardinality(v_places), 0) < v_count then
            raise exception sqlstate 'RL00L';  -- another session was faster; caught below, too
          end if;
        end if;
      end if;

      if (v_places is null and v_count > 0 and v_covered is not false) or not v_kept then
        raise exception sqlstate 'RL00T';  -- gives back what was waited for and not charged, or what an invalid key took
      elsif cardinality(v_places) < v_count then
        v_left    := array(select generate_series(1, v_count) except select unnest(v_places) order by 1);
        v_answers := decide_left(policies, keys, costs, null, idempotency_keys, v_left, false, true);
      end if;
      exit;
    exception
      when sqlstate 'RL00L' then
        v_places    := null;
        v_remaining := null;
        v_reset_us  := null;
        v_capacity  := null;
        v_shadows   := null;
        v_kept      := true;
        exit when v_lock;
        v_lock      := true;
      when sqlstate 'RL00T' or unique_violation then  -- an idempotency key is stored already, or granted twice
        v_places := null;
        exit;
    end;
  end loop;

  if cardinality(v_places) = v_count and sizes is null then
    return (v_places, v_remaining, array_fill(0::bigint, array[v_count]), v_reset_us, v_capacity, null, null,
            null, null, null, null, null, null, null, null, null, null)::packed;
  elsif cardinality(v_places) = v_count then
    select array_agg(r.request), array_agg(r.binding::integer)
      into v_answers.requests, v_answers.bindings
      from (select v_requests[u.place] as request,
                   (min(binding_rank(u.shadow, false, true, u.remaining, acquire_batch.costs[u.place], 0, u.place)))[4] - min(u.place) + 1 as binding
              from unnest(v_places, v_remaining, v_shadows) as u (place, remaining, shadow)
             group by 1) as r;
    v_answers := (v_places, v_remaining, array_fill(0::bigint, array[v_count]), v_reset_us, v_capacity, null, null,
                  v_answers.requests, array_fill(true, array[cardinality(v_answers.requests)]), array_fill(false, array[cardinality(v_answers.requests)]),
                  array_fill(false, array[cardinality(v_answers.requests)]), v_answers.bindings, null, null, null, null, null)::packed;
  elsif v_places is not null then
    return both_of((v_places, v_remaining, array_fill(0::bigint, array[cardinality(v_places)]), v_reset_us, v_capacity, null, null,
                    null, null, null, null, null, null, null, null, null, null)::packed, v_answers);
  elsif v_count > 0 then
    v_left    := array(select generate_series(1, v_count));
    v_answers := decide_left(policies, keys, costs, v_requests, idempotency_keys, v_left, sizes is not null, false);
  end if;
  if v_misfits is not null then
    v_answers := with_misfits(v_answers, sizes, v_misfits);
  end if;
  return v_answers;
end;
$$;
comment on function ratelimit.acquire_batch(text[], text[], bigint[], integer[], text[]) is
  'Decides many requests, as if each were asked on its own, one after another.';

-- Takes from several buckets if every one covers what is charged to it, and otherwise from none.
--
-- The steps, for a request whose buckets have rows and do not know its idempotency key:
--   1. One statement reads all buckets. If they cover by their stored levels, which is most often so, step 3 follows.
--   2. Each bucket is read again with all that an answer needs. If one does not cover, the answer is the denial. The
--      idempotency key is looked up after the bucket, because the request that emptied it may have had the same one.
--   3. Each bucket is charged by a conditional update, in the order of policy and key, durable ones first, and remembers the
--      idempotency key before the next one is charged. If another session took the tokens in between, or if a bucket has the
--      idempotency key already, live or expired, the charges are rolled back.
-- acquire_batch decides what these steps do not: there it is a batch of one request. So it does where an override has an end, and in a
-- read-only transaction, as those of a standby are, which cannot read ephemeral buckets.
create or replace function ratelimit_acquire_all(
    in  policies        text[],
    in  keys            text[],
    in  costs           bigint[] default null,
    in  idempotency_key text     default null,
    out allowed         boolean,
    out remaining       bigint,
    out retry_after     interval,
    out reset_after     interval,
    out capacity        bigint,
    out replayed        boolean,
    out shadowed        boolean,
    out binding         integer,
    out decisions       ratelimit.decision[])
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan  -- as in acquire_batch
  set enable_seqscan = off  -- as in ratelimit_acquire
  set jit = off             -- as in acquire_batch
as $$
declare
  v_count       integer := cardinality(policies);
  v_simple      boolean := false;  -- the steps above decide the request
  v_order       integer[];   -- the elements in the order of policy and key, durable policies first
  v_sorted      policies[];  -- their policies, in this order
  v_keys        text[];      -- likewise
  v_costs       bigint[];    -- likewise; 0 for what is not charged
  v_enough      boolean;     -- the buckets cover by their stored levels
  v_rows        boolean;     -- all buckets have rows
  v_n           integer;
  v_policy      policies;
  v_override    overrides;
  v_key         text collate "C";
  v_cost        bigint;
  v_now         timestamptz;
  v_wanted      bigint;
  v_level       bigint;
  v_refilled_at timestamptz;
  v_expires_at  timestamptz;
  v_retry_us    bigint;
  v_reset_us    bigint;
  v_rank        bigint;      -- of an element: the least one binds, as of binding_rank; shadows come after all others
  v_least       bigint;
  v_idempotency_key text collate "C" := idempotency_key;
  v_decision    decision;
  v_whole       record;
begin
  if (v_count between 1 and 1000) is not true then
    perform check_length('policies', v_count, v_count);
    perform refuse('policies', v_count || ' elements long', 'Pass 1 to 1000 elements.');
  end if;
  if current_setting('transaction_read_only') = 'off' then
    v_now := clock();
    select array_agg(s.n::integer), array_agg(s.policy), array_agg(s.key), array_agg(s.cost), bool_and(s.covers is true)
      into v_order, v_sorted, v_keys, v_costs, v_enough
      from (select u.n, p as policy, u.key, u.cost,
                   case when u.cost between 1 and p.capacity and not p.overridden then
                     case
                       when p.durable then (select b.level from buckets as b where b.policy_id = p.id and b.key = u.key collate "C")
                       else (select b.level from ephemeral_buckets as b where b.policy_id = p.id and b.key = u.key collate "C")
                     end >= microtokens(u.cost)
                   end as covers
              from unnest(policies, keys, coalesce(costs, array_fill(1::bigint, array[v_count]))) with ordinality as u (policy, key, cost, n)
              left join policies as p on p.name = u.policy collate "C"
             order by p.durable desc, u.policy collate "C", u.key collate "C"
            offset 0) as s;
    v_simple := cardinality(v_order) = v_count and is_name(v_idempotency_key) is not false;
    for v_i in 2..v_count loop
      v_simple := v_simple and (v_keys[v_i] = v_keys[v_i - 1] and v_sorted[v_i].id = v_sorted[v_i - 1].id) is not true;
    end loop;
  end if;

  for v_try in case when v_enough then 1 else 2 end..2 loop
    exit when not v_simple;
    allowed  := true;
    replayed := false;
    shadowed := false;
    v_least  := null;
    if v_try = 2 then
      v_rows := true;
      for v_i in 1..v_count loop
        v_n      := v_order[v_i];
        v_policy := v_sorted[v_i];
        v_key    := v_keys[v_i];
        v_cost   := v_costs[v_i];
        v_simple := (v_policy.id is not null and acceptable(v_key, v_cost) and v_cost > 0) is true;
        exit when not v_simple;
        if v_policy.overridden then
          select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
          if found then
            v_policy := with_override(v_policy, v_override);
          end if;
          v_sorted[v_i] := v_policy;
          v_simple      := (v_policy.calendar).ends_at is null;  -- an element may fit now, and not when the others do
          exit when not v_simple;
        end if;
        if v_policy.durable then
          select b.level, b.refilled_at into v_level, v_refilled_at from buckets as b where b.policy_id = v_policy.id and b.key = v_key;
        else
          select b.level, b.refilled_at into v_level, v_refilled_at from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = v_key;
        end if;
        if not found then  -- full
          v_rows        := false;
          v_level       := microtokens(v_policy.capacity);
          v_refilled_at := v_now;
        end if;
        v_retry_us := case when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), v_level, v_refilled_at, v_now, v_policy) end;
        v_reset_us := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
        v_level    := refilled(v_level, v_refilled_at, v_now, v_policy);
        if v_idempotency_key is not null then
          if v_policy.durable then
            v_simple := not exists (select from idempotency_keys as k
                                     where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key);
          else
            v_simple := not exists (select from ephemeral_idempotency_keys as k
                                     where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key);
          end if;
          exit when not v_simple;
        end if;
        if v_retry_us = 0 then
          decisions[v_n] := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
          continue;
        elsif v_policy.shadow then
          shadowed       := true;
          decisions[v_n] := shadow_of(v_level, v_reset_us, v_policy.capacity);
          v_costs[v_i]   := 0;
          v_rank         := 20000000000000 + repeats(decisions[v_n].remaining, v_cost);
        else
          allowed        := false;
          decisions[v_n] := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
          v_rank         := -coalesce(v_retry_us, 9223372036854775807);
        end if;
        if v_least is null or v_rank < v_least or v_rank = v_least and v_n < binding then
          v_least := v_rank;
          binding := v_n;
        end if;
      end loop;
      v_simple := v_simple and (v_rows or not allowed);
      shadowed := shadowed and allowed;
      exit when not v_simple or not allowed;
    end if;
    begin
      for v_i in 1..v_count loop
        v_cost := v_costs[v_i];
        continue when v_cost = 0;
        v_n      := v_order[v_i];
        v_policy := v_sorted[v_i];
        v_key    := v_keys[v_i];
        v_wanted := microtokens(v_cost);
        if v_policy.durable then
          update buckets as b
             set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
                 room        = null
           where b.policy_id = v_policy.id
             and b.key       = v_key
             and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
          returning b.level, b.refilled_at into v_level, v_refilled_at;
        else
          update ephemeral_buckets as b
             set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
                 room        = null
           where b.policy_id = v_policy.id
             and b.key       = v_key
             and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
          returning b.level, b.refilled_at into v_level, v_refilled_at;
        end if;
        if not found then
          raise exception sqlstate 'RL00T';  -- rolls back to the begin above; caught below, so no caller sees it
        end if;
        v_reset_us     := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);
        decisions[v_n] := grant_of(v_level, v_reset_us, v_policy.capacity);
        v_rank         := v_policy.shadow::integer * 20000000000000 + v_level / v_wanted;
        if v_least is null or v_rank < v_least or v_rank = v_least and v_n < binding then
          v_least := v_rank;
          binding := v_n;
        end if;
        if v_idempotency_key is not null then
          v_expires_at := v_now + duration(v_policy.remember_us);
          if v_policy.durable then
            insert into idempotency_keys
                   (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
            values (v_policy.id, v_key, v_idempotency_key, v_cost, tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at);
          else
            insert into ephemeral_idempotency_keys
                   (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
            values (v_policy.id, v_key, v_idempotency_key, v_cost, tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at);
          end if;
        end if;
      end loop;
      exit;
    exception when sqlstate 'RL00T' or unique_violation then
      v_now    := clock();  -- it may have waited
      v_simple := v_try = 1 and sqlstate = 'RL00T';
    end;
  end loop;

  if not v_simple then
    v_whole   := acquire_all_in_batch(policies, keys, costs, idempotency_key);
    allowed   := v_whole.allowed;
    replayed  := v_whole.replayed;
    shadowed  := v_whole.shadowed;
    binding   := v_whole.binding;
    decisions := v_whole.decisions;
  end if;
  v_decision  := decisions[binding];
  remaining   := v_decision.remaining;
  retry_after := case when allowed then interval '0' else v_decision.retry_after end;
  reset_after := v_decision.reset_after;
  capacity    := v_decision.capacity;
end;
$$;
comment on function ratelimit_acquire_all(text[], text[], bigint[], text) is
'Takes from several buckets if every bucket covers its charge, and otherwise from none.
Element n of policies, keys and costs is one charge. A bucket that is named twice is charged the sum.
A bucket that remembers the idempotency key gives its first answer and is not charged again. The other buckets are
  asked.
Buckets of shadow policies count for retry_after and binding only if the request names no other buckets.
policies: 1 to 1000 elements.
keys: as many elements as policies.
costs: whole tokens, 0 or more, as many elements as policies. null: 1 for each element. An element of cost 0 looks at
  its bucket and takes nothing.
idempotency_key: as in ratelimit_acquire. Each bucket remembers it by itself.
allowed: whether every bucket covers its charge.
remaining: of the bucket of the binding element.
retry_after: the longest wait of the elements. Zero if the request is granted; null if an element is always denied.
reset_after: of the bucket of the binding element.
capacity: of the bucket of the binding element.
replayed: the request is granted and charged nothing, because a bucket remembers the idempotency key; or it is denied
  only because a reservation under the key still waits.
shadowed: the request is granted, and a shadow policy would have denied an element.
binding: the number of the element that decides, from 1. Of a denial it is the element with the longest wait, of a
  grant the element whose bucket covers the fewest repeats of its charge.
decisions: one decision for each element, about all that the request charges to the bucket of the element. allowed and
  retry_after are as if the bucket were asked alone, remaining and reset_after as after the whole request. Where the
  override of an element ends before the longest wait, the element of a denied request waits by the numbers of the policy.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key that was granted with
  another cost, RL004 for a live idempotency key whose grant was settled, 25006 in a read-only transaction. DETAIL
  begins with the number of the element if there are several.
Locks: a grant locks the bucket rows and the rows of the idempotency key until the transaction ends, in one order:
  durable policies first, then by policy and key. A denial keeps no lock.
Writes: a grant writes the buckets and the idempotency keys. A denial writes nothing.
Role: application.';

-- ratelimit_acquire_all as a batch of one request.
create or replace function ratelimit.acquire_all_in_batch(
    in  policies text[], in keys text[], in costs bigint[], in idempotency_key text,
    out allowed boolean, out replayed boolean, out shadowed boolean, out binding integer, out decisions ratelimit.decision[])
  language plpgsql
  volatile
as $$
declare
  v_batch ratelimit.packed := acquire_batch(policies, keys, costs, array[cardinality(policies)], case when idempotency_key is not null then array[idempotency_key] end);
begin
  if v_batch.refused is not null then
    raise exception using errcode = v_batch.error_codes[1], message = v_batch.error_messages[1],
                          detail  = v_batch.error_details[1], hint = v_batch.error_hints[1];
  end if;
  allowed   := v_batch.requests_allowed[1];
  replayed  := v_batch.requests_replayed[1];
  shadowed  := v_batch.requests_shadowed[1];
  binding   := v_batch.bindings[1];
  decisions := decisions_of(v_batch.elements, v_batch.remaining, v_batch.retry_after_us, v_batch.reset_after_us, v_batch.capacity,
                            v_batch.replayed, v_batch.shadowed);
end;
$$;
comment on function ratelimit.acquire_all_in_batch(text[], text[], bigint[], text) is
  'What ratelimit_acquire_all does, as a batch of one request.';

-- Shows the answers of acquire_batch as rows. Requests on different buckets do not affect each other.
create or replace function ratelimit_acquire_many(
    policies         text[],
    keys             text[],
    costs            bigint[] default null,
    idempotency_keys text[]   default null)
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean, shadowed boolean,
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_batch packed;
begin
  v_batch := acquire_batch(policies, keys, costs, null, ratelimit_acquire_many.idempotency_keys);
  return query
    select e.element, e.retry_us is not distinct from 0, e.remaining, duration(e.retry_us), duration(e.reset_us), e.capacity,
           coalesce(e.replayed, false), coalesce(e.shadowed, false), null::text, null::text, null::text, null::text
      from unnest(v_batch.elements, v_batch.remaining, v_batch.retry_after_us, v_batch.reset_after_us, v_batch.capacity,
                  v_batch.replayed, v_batch.shadowed)
           as e (element, remaining, retry_us, reset_us, capacity, replayed, shadowed)
    union all
    select r.refused, null, null, null, null, null, null, null, r.code, r.message, r.detail, r.hint
      from unnest(v_batch.refused, v_batch.error_codes, v_batch.error_messages, v_batch.error_details, v_batch.error_hints)
           as r (refused, code, message, detail, hint)
     order by 1;
end;
$$;
comment on function ratelimit_acquire_many(text[], text[], bigint[], text[]) is
'Decides many requests in one call, as ratelimit_acquire would one after another.
Row n answers request n. A request with an error does not fail the other requests.
policies: the policy of each request.
keys: as many elements as policies.
costs: whole tokens, 0 or more, as many elements as policies. null: 1 for each request.
idempotency_keys: as many elements as policies, or null. An element can be null.
request: the number of the request, from 1.
error_code: the SQLSTATE of the error of this request, null for a decision. The columns of the decision are null
  beside an error.
Errors: 22023 for arrays of different lengths, 25006 in a read-only transaction. error_code has 22023, RL001, RL002
  and RL004.
Locks: the buckets of granted requests and their idempotency keys until the transaction ends, in the order of
  ratelimit_acquire_all. If other sessions change a bucket during the call, buckets of denied requests can stay
  locked, too.
Writes: granted requests write their buckets and idempotency keys.
Role: application.';

-- Shows the answers of acquire_batch to requests of several elements as rows.
create or replace function ratelimit_acquire_all_many(
    policies         text[],
    keys             text[],
    costs            bigint[],
    sizes            integer[],
    idempotency_keys text[] default null)
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean, shadowed boolean, binding integer, decisions ratelimit.decision[],
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_batch     packed;
  v_decisions ratelimit.decision[];
begin
  if sizes is null then
    perform refuse('sizes', null, 'Pass the number of elements of each request.');
  end if;
  v_batch := acquire_batch(policies, keys, costs, sizes, ratelimit_acquire_all_many.idempotency_keys);
  v_decisions := decisions_of(v_batch.elements, v_batch.remaining, v_batch.retry_after_us, v_batch.reset_after_us, v_batch.capacity,
                              v_batch.replayed, v_batch.shadowed);
  return query
    select r.request, r.allowed, (r.decided).remaining,
           case when r.allowed then interval '0' else (r.decided).retry_after end, (r.decided).reset_after, (r.decided).capacity,
           r.replayed, r.shadowed, r.binding, r.decisions, null::text, null::text, null::text, null::text
      from (select u.*, v_decisions[s.first + u.binding - 1] as decided, v_decisions[s.first:s.first + s.size - 1] as decisions
              from unnest(v_batch.requests, v_batch.requests_allowed, v_batch.requests_replayed, v_batch.requests_shadowed, v_batch.bindings)
                   as u (request, allowed, replayed, shadowed, binding)
              join (select n.request, n.size, (sum(n.size) over (order by n.request))::integer - n.size + 1 as first
                      from unnest(ratelimit_acquire_all_many.sizes) with ordinality as n (size, request)) as s using (request)) as r
    union all
    select e.refused, null, null, null, null, null, null, null, null, null, e.code, e.message, e.detail, e.hint
      from unnest(v_batch.refused, v_batch.error_codes, v_batch.error_messages, v_batch.error_details, v_batch.error_hints)
           as e (refused, code, message, detail, hint)
     order by 1;
end;
$$;
comment on function ratelimit_acquire_all_many(text[], text[], bigint[], integer[], text[]) is
'Decides many requests of several elements in one call, as ratelimit_acquire_all would one after another.
Row n answers request n. A request with an error does not fail the other requests.
policies: the elements of all requests: those of request 1, then those of request 2, and so on.
keys: as many elements as policies.
costs: whole tokens, 0 or more, as many elements as policies. null: 1 for each element.
sizes: the number of elements of each request, 1 to 1000.
idempotency_keys: one for each request, or null. An element can be null.
request: the number of the request, from 1.
allowed: whether every bucket covers its charge.
remaining: of the bucket of the binding element.
retry_after: the longest wait of the elements. Zero if the request is granted; null if an element is always denied.
reset_after: of the bucket of the binding element.
capacity: of the bucket of the binding element.
replayed: as in ratelimit_acquire_all.
shadowed: as in ratelimit_acquire_all.
binding: the number of the element within the request, from 1.
decisions: one decision for each element of the request.
error_code: the SQLSTATE of the error of this request, null for a decision. The columns of the decision are null
  beside an error.
Errors: 22023 for arrays that do not fit together, 25006 in a read-only transaction. error_code has 22023, RL001,
  RL002 and RL004.
Locks: the buckets of granted requests and their idempotency keys until the transaction ends, in the order of
  ratelimit_acquire_all. If other sessions change a bucket during the call, buckets of denied requests can stay
  locked, too.
Writes: granted requests write their buckets and idempotency keys.
Role: application.';

-- The answers of acquire_batch as they are: the compact form, for clients that combine requests. ratelimit_acquire_many and
-- ratelimit_acquire_all_many give rows to people. The columns are explained at the type ratelimit.packed.
create or replace function ratelimit_acquire_packed(
    policies         text[],
    keys             text[],
    costs            bigint[]  default null,
    sizes            integer[] default null,
    idempotency_keys text[]    default null)
  returns ratelimit.packed
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
begin
  return acquire_batch(policies, keys, costs, sizes, idempotency_keys);
end;
$$;
comment on function ratelimit_acquire_packed(text[], text[], bigint[], integer[], text[]) is
'Decides many requests in one call and returns one row of arrays, for clients that combine requests.
Without sizes each element is a request, as in ratelimit_acquire_many. With sizes a request has several elements, as
  in ratelimit_acquire_all_many.
costs: whole tokens, 0 or more. null: 1 for each element.
sizes: the number of elements of each request, 1 to 1000. null: each element is a request.
idempotency_keys: one for each request, or null. An element can be null.
Errors: 22023 for arrays that do not fit together, 25006 in a read-only transaction. error_codes has 22023, RL001,
  RL002 and RL004.
Locks: the buckets of granted requests and their idempotency keys until the transaction ends, in the order of
  ratelimit_acquire_all. If other sessions change a bucket during the call, buckets of denied requests can stay
  locked, too. Calls that are transactions of their own never deadlock with each other.
Writes: granted requests write their buckets and idempotency keys.
Role: application.';


-- Guards, which raise where the functions above answer with a denial.
-- The steps of ratelimit_acquire for functions of this package, which know the policy, and do not depend on the schema of the public
-- functions.
create or replace function ratelimit.acquire(v_policy ratelimit.policies, key text, cost bigint, idempotency_key text)
  returns ratelimit.decision
  language plpgsql
  volatile
as $$
begin
  if not v_policy.durable then
    return acquire_ephemeral(v_policy, key, cost, idempotency_key);
  end if;
  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_wanted          bigint;       -- cost in microtokens; 0 if nothing can be taken
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_retry_us        bigint;       -- microseconds until the bucket holds cost; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_rounds          integer;
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return decision_of(take_quota_of_buckets(v_policy, v_key, v_cost, v_cost, v_idempotency_key));
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;

    -- 1. The idempotency key. Its expiry is compared after the row is found: in WHERE, a planner without statistics might
    --    choose the index of expires_at.
    if v_idempotency_key is not null then
      select k.* into v_first
        from idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update.
      if v_wanted > 0 then
        update buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null  -- what a new row has more, so that its page has room for this version
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             case
               when v_wanted > 0 then wait_until(v_wanted, b.level, b.refilled_at, v_now, v_policy)
               when v_cost = 0 then 0
             end,
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
        into v_level, v_retry_us, v_reset_us
        from buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_wanted   := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
        v_level    := microtokens(v_policy.capacity);
        v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
        v_reset_us := 0;
      end if;

      -- 3a. Too few tokens.
      if v_wanted = 0 or v_retry_us is distinct from 0 then
        if (v_policy.calendar).ends_at is not null then
          select b.level, b.retry_us, b.reset_us into v_level, v_retry_us, v_reset_us from look_past_end(v_policy, v_key, v_now, v_cost) as b;
          continue when v_wanted > 0 and v_retry_us = 0;  -- another session gave tokens back
        end if;
        if v_idempotency_key is not null then
          select k.* into v_first
            from idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return answer_again(v_first, v_cost, v_now, v_policy.shadow);
          end if;
        end if;
        if v_policy.shadow and v_retry_us is distinct from 0 then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
        return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
      end if;

      -- 3b. No row. The insert may wait for a session that creates the same one.
      if not v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint buckets_pkey do nothing;
        exit when found;
      end if;

      -- 3c. Again. Each repetition but the first is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us))
      on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;
    return grant_of(v_level, v_reset_us, v_policy.capacity);
  end;
end;
$$;
comment on function ratelimit.acquire(ratelimit.policies, text, bigint, text) is
  'The steps of ratelimit_acquire, for the guards.';

create or replace function ratelimit_enforce(
    policy          text,
    key             text,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy   policies;
  v_decision decision;
begin
  if not acceptable(key, cost) or idempotency_key is not null then
    if (acceptable(key, cost) and is_name(idempotency_key)) is not true then
      perform check_request(policy, key, cost, idempotency_key);  -- raises 22023
    end if;
    if cost = 0 then
      idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  v_decision := acquire(v_policy, key, cost, idempotency_key);
  if not v_decision.allowed then
    perform rate_limit_exceeded(policy, cost, v_decision, false);
  end if;
  return v_decision;
end;
$$;
comment on function ratelimit_enforce(text, text, bigint, text) is
'Takes cost tokens as ratelimit_acquire does, and raises RL429 in place of a denial.
It can stand in a function, a trigger or a policy of row level security, where a denial would go unread.
cost: as in ratelimit_acquire.
idempotency_key: as in ratelimit_acquire.
Errors: RL429 for a denial, 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key
  that was granted with another cost, RL004 for a live idempotency key whose grant was settled, 25006 in a read-only
  transaction. DETAIL of RL429 is a JSON object with policy, cost, remaining, retry_after (in seconds, or null) and
  capacity. It never has the key. In a request of PostgREST the SQLSTATE is PGRST, and the response has status 429.
Locks: as ratelimit_acquire. The rollback after RL429 releases them.
Writes: as ratelimit_acquire.
Role: application.';

-- The checks of ratelimit_guard, before it reads a row.
--
-- The guard runs with its owner's rights, and it reads a relation by the name inserted. So that must be the transition table
-- of the trigger. Without one, it would be what the inserting session calls so, a temporary view for example, and the
-- code of that view would run. Likewise the columns must be of these types themselves: to read a domain, an enum or any
-- other type as text, or to compare it, can be somebody's code.
create or replace function ratelimit.check_guard(relation oid, trigger_name name, arguments text[])
  returns void language plpgsql stable
as $$
declare
  v_least constant integer := array_lower(arguments, 1);
  v_usage constant text := 'Attach it like this: create trigger limited after insert on orders referencing new table as inserted '
                           'for each statement execute function ratelimit_guard(''policy'', ''key column''), and a cost column if there is one.';
begin
  if (cardinality(arguments) between 2 and 3) is not true then
    raise exception 'invalid trigger arguments'
      using errcode = '22023',
            detail  = format('The trigger has %s.', ratelimit.counted(coalesce(cardinality(arguments), 0), 'argument')),
            hint    = v_usage;
  end if;
  if not exists (select from pg_trigger as t
                  where t.tgrelid    = relation
                    and t.tgname     = trigger_name
                    and t.tgtype     = 4  -- after insert for each statement
                    and t.tgnewtable = 'inserted') then
    raise exception 'invalid trigger'
      using errcode = '22023',
            detail  = format('Trigger %I of %s is not one after insert for each statement with the transition table inserted.', trigger_name, relation::regclass),
            hint    = v_usage;
  end if;
  if to_regclass('pg_temp.inserted') is not null then  -- a trigger that was renamed during the statement is found above as another
    raise exception 'invalid trigger'
      using errcode = '22023',
            detail  = 'The session has a temporary relation called inserted, as the transition table is.',
            hint    = 'Rename or drop it.';
  end if;
  for v_n in v_least + 1..array_upper(arguments, 1) loop
    if not exists (select from pg_attribute as a
                    where a.attrelid     = relation
                      and a.attname      = arguments[v_n]
                      and a.attnum       > 0
                      and a.attgenerated in ('', 's')  -- a virtual column is not in a transition table
                      and (a.atttypid in ('integer'::regtype, 'bigint'::regtype)
                           or a.atttypid in ('text'::regtype, 'varchar'::regtype, 'uuid'::regtype) and v_n = v_least + 1)) then
      raise exception 'invalid column'
        using errcode = '22023',
              detail  = format('%s has no column %I of a type that the guard takes.', relation::regclass, arguments[v_n]),
              hint    = 'The key column is of type text, varchar, uuid, integer or bigint itself, the cost column of type integer or bigint.';
    end if;
  end loop;
end;
$$;
comment on function ratelimit.check_guard(oid, name, text[]) is
  'Raises 22023 unless a trigger and its arguments are such that ratelimit_guard may read rows.';

create or replace function ratelimit_guard()
  returns trigger
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
  set jit = off             -- as in acquire_batch
as $$
declare
  v_policy policies;
  v_keys   text[];
  v_costs  bigint[];
  v_least  bigint;   -- the least cost of a row; -1 if one is null
  v_denial decision;
  v_batch  packed;
  v_worst  bigint;   -- the element with the longest wait
begin
  perform check_guard(tg_relid, tg_name, tg_argv);
  -- Rows are grouped by the column as it is, and not as text, which would be made for each row.
  execute format('select array_agg(g.key::text) filter (where g.cost > 0 or g.key is null),'
                 '       array_agg(least(g.cost, 9223372036854775807)::bigint) filter (where g.cost > 0 or g.key is null),'
                 '       min(g.least)'
                 '  from (select i.%I%s as key, %s as cost, %s as least from inserted as i group by 1) as g',
                 tg_argv[1],
                 (select ' collate "C"' from pg_attribute as a where a.attrelid = tg_relid and a.attname = tg_argv[1] and a.attcollation <> 0),
                 case tg_nargs when 3 then format('sum(i.%I)', tg_argv[2]) else 'count(*)' end,
                 case tg_nargs when 3 then format('min(coalesce(i.%I, -1))', tg_argv[2]) else '1' end)
    into v_keys, v_costs, v_least;
  if v_least < 0 then
    perform refuse('cost', 'null or below zero in a row', 'Insert costs of 0 or more.');
  end if;
  if v_keys is null then  -- nothing to charge
    return null;
  end if;
  v_policy := policy_named(tg_argv[0]);
  perform check_name('key', u.key) from unnest(v_keys) as u (key) where is_name(u.key) is not true limit 1;

  if cardinality(v_keys) = 1 then
    v_worst  := 1;
    v_denial := acquire(v_policy, v_keys[1], v_costs[1], null);
  else
    v_batch := acquire_batch(array_fill(v_policy.name, array[cardinality(v_keys)]), v_keys, v_costs, null, null);
    if v_batch.refused is not null then  -- the policy was dropped meanwhile
      raise exception using errcode = v_batch.error_codes[1], message = v_batch.error_messages[1],
                            detail  = v_batch.error_details[1], hint = v_batch.error_hints[1];
    end if;
    select false, d.remaining, duration(d.retry_us), duration(d.reset_us), d.capacity, d.element
      into v_denial.allowed, v_denial.remaining, v_denial.retry_after, v_denial.reset_after, v_denial.capacity, v_worst
      from unnest(v_batch.elements, v_batch.remaining, v_batch.retry_after_us, v_batch.reset_after_us, v_batch.capacity)
           as d (element, remaining, retry_us, reset_us, capacity)
     where d.retry_us is distinct from 0
     order by d.retry_us desc nulls first
     limit 1;
  end if;
  if v_denial.allowed is false then
    perform rate_limit_exceeded(v_policy.name, v_costs[v_worst], v_denial, false);
  end if;
  return null;
end;
$$;
comment on function ratelimit_guard() is
'Charges the key of each row that a statement inserts into a table, or raises RL429.
It is a trigger function. An error rolls back the statement, which then inserts nothing and takes nothing.
Attach it by: create trigger limited after insert on orders referencing new table as inserted for each statement
  execute function ratelimit_guard(''policy'', ''key column'', ''cost column'').
The key column is of type text, varchar, uuid, integer or bigint, the cost column of type integer or bigint. Without a
  cost column each row costs 1 token.
Each key is charged once, with the sum of its rows. Rows that an upsert updates are not charged. Of a partitioned
  table only the guard of the table that the statement names charges.
Errors: RL429 for a denial, as in ratelimit_enforce. 22023 for a trigger or a column that does not fit and for a key
  or a cost that is out of range, RL001 for an unknown policy.
Locks: the bucket rows, in the order of key, until the transaction ends.
Writes: the buckets.
Role: administrator, to attach the trigger. A role that inserts rows needs no grant.';

-- ratelimit_peek for functions of this package.
create or replace function ratelimit.peek(policy text, key text, cost bigint)
  returns ratelimit.decision
  language plpgsql
  stable
as $$
declare
  v_policy   ratelimit.policies;
  v_override ratelimit.overrides;
  v_key      text collate "C" := key;
  v_cost     alias for cost;
  v_now      timestamptz := clock();
  v_level    bigint;  -- microtokens in the bucket
  v_retry_us bigint;  -- microseconds until the bucket holds cost; null: never
  v_reset_us bigint;  -- microseconds until the bucket is full; null: never
begin
  if not acceptable(key, cost) then
    perform check_request(policy, key, cost, null);  -- raises 22023
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  if v_policy.overridden then
    select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
    if found then
      v_policy := with_override(v_policy, v_override);
    end if;
    if (v_policy.calendar).lease is not null then
      return peek_slots(v_policy, v_key, v_cost, v_now);
    end if;
  end if;
  if (v_policy.calendar).ends_at is not null then
    select b.level, b.retry_us, b.reset_us into v_level, v_retry_us, v_reset_us from look_past_end(v_policy, v_key, v_now, v_cost) as b;
  elsif v_policy.durable then
    select refilled(b.level, b.refilled_at, v_now, v_policy),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy)
           end,
           wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
      into v_level, v_retry_us, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
  else
    select refilled(b.level, b.refilled_at, v_now, v_policy),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy)
           end,
           wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
      into v_level, v_retry_us, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
  end if;
  if not found then  -- full
    v_level    := microtokens(v_policy.capacity);
    v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
    v_reset_us := 0;
  end if;
  return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit.peek(text, text, bigint) is
  'What ratelimit_peek does, for the guards.';

-- ratelimit_pre_request calls this with its settings; docs/postgrest/install.sql creates that function and the settings.
-- It takes one token for a request that PostgREST is about to serve. In a read-only transaction, which those of GET, HEAD
-- and calls of stable functions are, it can take nothing: there it refuses only if the bucket holds no token.
--
-- The key is the subject of the JWT, hashed, because it may be long or a secret. Without one it is the address in the header
-- X-Forwarded-For that is forwarded_hop from the right: each proxy adds the address of its caller, and addresses further left are
-- the word of the client. Of an IPv6 address the first 64 bits count, because whoever has one has all that begin so. Null turns
-- either off.
--
-- It runs with the search_path and the settings of ratelimit_pre_request, which acquire and peek count on.
-- Locks and writes: as ratelimit_acquire; nothing in a read-only transaction.
create or replace function ratelimit.limit_request(policy text, by_subject boolean, forwarded_hop integer, refuse_without_key boolean)
  returns void
  language plpgsql
  volatile
as $$
declare
  v_subject text;
  v_hops    text[];
  v_hop     text;
  v_address inet;
  v_key     text;
  v_policy  ratelimit.policies;
  v_denial  ratelimit.decision;
begin
  if by_subject then
    v_subject := nullif(nullif(current_setting('request.jwt.claims', true), '')::json ->> 'sub', '');
    v_key     := 'sub:' || encode(sha256(convert_to(v_subject, 'UTF8')), 'hex');
  end if;
  if v_key is null and forwarded_hop is not null then
    v_hops := string_to_array(nullif(current_setting('request.headers', true), '')::json ->> 'x-forwarded-for', ',');
    v_hop  := trim(v_hops[cardinality(v_hops) + 1 - forwarded_hop]);
    v_hop  := regexp_replace(v_hop, '^\[(.*)\](:\d+)?$|^([\d.]+):\d+$', '\1\3');  -- without a port
    v_hop  := regexp_replace(v_hop, '^::ffff:(?=[\d.]+$)', '', 'i');              -- IPv4 in IPv6
    begin
      v_address := v_hop::inet;
    exception when invalid_text_representation then
      v_address := null;  -- no address
    end;
    v_key := 'ip:' || case family(v_address) when 4 then host(v_address) else network(set_masklen(v_address, 64))::text end;
  end if;
  if v_key is null then
    if refuse_without_key then
      perform ratelimit.refuse_http('the request has no key to limit it by', null, 'Send a token that has a subject.', '{}');
    end if;
    return;
  end if;

  v_policy := ratelimit.policy_named(policy);
  if (v_policy.calendar).lease is not null then
    perform ratelimit.refuse_slots(v_policy.name);  -- raises 22023; peek would not
  end if;
  if current_setting('transaction_read_only') = 'off' then
    v_denial := ratelimit.acquire(v_policy, v_key, 1, null);
  else
    if v_policy.shadow or not v_policy.durable and pg_is_in_recovery() then  -- a standby cannot read ephemeral buckets
      return;
    end if;
    v_denial := ratelimit.peek(policy, v_key, 1);
  end if;
  if not v_denial.allowed then
    perform ratelimit.rate_limit_exceeded(policy, 1, v_denial, true);
  end if;
end;
$$;
comment on function ratelimit.limit_request(text, boolean, integer, boolean) is
  'Takes a token for a request of PostgREST, or refuses it.';


-- Upkeep.
-- Clean-up of slots: removes the leases that had ended by now, of at most max_rows keys and at most max_rows leases, and the rows of keys
-- that have no lease then. The row of another key is postponed to the end of its first lease. The answers are how many keys were due, and
-- how many were removed.
--
-- It locks the rows of the keys, and looks at their leases in later statements: a hold may have been committed between the
-- snapshot of the first one and its locks. A hold that waits for a row which is removed here finds none, and creates it anew; one that
-- waits for a row which stays counts again, because by another clock a lease that is removed here may not have ended.
--
-- The names are those of the tables. On Citus they are those of shards, for which the statements are made at run time.
-- Locks and writes: as cleanup_batch.
create or replace function ratelimit.cleanup_slots(
    in slots regclass, in leases regclass, in max_rows integer, in now timestamptz, in due_before timestamptz, out read bigint, out deleted bigint)
  language plpgsql
  volatile
as $$
declare
  v_ids  bigint[];
  v_keys text[];
begin
  execute format('select array_agg(d.policy_id), array_agg(d.key), count(*)'
                 '  from (select s.policy_id, s.key from %s as s where s.due_at <= $1 order by s.due_at limit $2 for update skip locked) as d', slots)
     into v_ids, v_keys, read
    using due_before, max_rows;
  deleted := 0;
  if read = 0 then
    return;
  end if;
  execute format('delete from %1$s as l'
                 ' where l.ctid = any (array(select e.ctid'
                 '                             from unnest($1, $2) as u (policy_id, key)'
                 '                            cross join lateral (select l.ctid'
                 '                                                  from %1$s as l'
                 '                                                 where l.policy_id = u.policy_id and l.key = u.key collate "C" and l.ends_at <= $3'
                 '                                                offset 0) as e'
                 '                            limit $4))', leases)
    using v_ids, v_keys, now, max_rows;
  execute format('delete from %1$s as s'
                 ' where s.ctid = any (array(select e.ctid'
                 '                             from unnest($1, $2) as u (policy_id, key)'
                 '                            cross join lateral (select s.ctid'
                 '                                                  from %1$s as s'
                 '                                                 where s.policy_id = u.policy_id and s.key = u.key collate "C"'
                 '                                                offset 0) as e'
                 '                            where not exists (select from %2$s as l where l.policy_id = u.policy_id and l.key = u.key collate "C" offset 0)))',
                 slots, leases)
    using v_ids, v_keys;
  get diagnostics deleted = row_count;
  execute format('update %1$s as s'
                 '   set changes = changes + 1, counted_until = ''-infinity'', due_at = (select min(l.ends_at) from %2$s as l where l.policy_id = s.policy_id and l.key = s.key)'
                 ' where s.ctid = any (array(select e.ctid'
                 '                             from unnest($1, $2) as u (policy_id, key)'
                 '                            cross join lateral (select s.ctid'
                 '                                                  from %1$s as s'
                 '                                                 where s.policy_id = u.policy_id and s.key = u.key collate "C"'
                 '                                                offset 0) as e))', slots, leases)
    using v_ids, v_keys;
end;
$$;
comment on function ratelimit.cleanup_slots(regclass, regclass, integer, timestamptz, timestamptz) is
  'Removes leases that have ended and keys that nobody holds, and answers how many keys were due and how many were removed.';

-- Clean-up removes rows that change no answer: buckets that are full again, leases that have ended and keys of slots that nobody holds,
-- expired idempotency keys, expired overrides, and rows
-- whose policy was dropped. A bucket with a live override must be full by the numbers of the override and of the policy, because
-- either may apply next. Clean-up finds due rows through an index and skips rows that another session has locked. A call that takes
-- from or gives to a bucket waits while a batch removes or postpones it, until the batch commits. So does a call that overwrites an
-- expired idempotency key, or changes an expired override, that the batch removes.
--
-- Clean-up judges every row as of five minutes ago. If the server's clock runs ahead for a moment, a bucket
-- that only looks full and a key that only looks expired are still there when the clock is set right.
--
-- SKIP LOCKED can still block if the row changes hands while it is examined. lock_timeout then ends the wait
-- after 100 ms, and the batch gives back its rows. PostgreSQL looks for a deadlock only after a wait of
-- deadlock_timeout, 1 second by default. If that is above 100 ms, a batch that is a transaction of its own gives
-- way before it is found in a deadlock. Only an acquire whose own look for a deadlock falls into those 100 ms is ended by one.
-- In a longer transaction, the rows of earlier batches stay locked, and it can deadlock with acquires.
--
-- One batch: of each table the rows that are due by due_before, at most max_rows. The first batch of a series
-- passes null for due_before and deadline. Each later batch passes the values that the batch before it
-- returned. more is true if the batch found a row that is due or of a dropped policy, or gave up for
-- lock_timeout, and the deadline is not reached. The deadline is budget after the first batch began.
--
-- A due bucket that is not full is postponed until it can be full, by 24 hours at most. So a policy that was
-- made faster is noticed within a day.
-- Locks:  the rows that it deletes or postpones, until the caller's transaction ends.
-- Writes: the same rows; nothing if lock_timeout ended the batch.
create or replace function ratelimit.cleanup_batch(
    in    max_rows                 integer,
    in    budget                   interval,
    inout due_before               timestamptz,
    inout deadline                 timestamptz,
    out   buckets_deleted          bigint,
    out   idempotency_keys_deleted bigint,
    out   more                     boolean)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off    -- as in ratelimit_acquire
  set lock_timeout = '100ms'  -- SKIP LOCKED can still block: see above
as $$
declare
  v_now     timestamptz := clock() - interval '5 minutes';  -- rows are judged as of this instant
  v_most_us constant bigint := 86400000000;  -- by which a bucket is postponed: 24 hours
  v_read    bigint;
  v_deleted bigint;
  v_rows    bigint;  -- rows deleted or postponed
begin
  perform check_max_rows(max_rows);
  if (budget > interval '0') is not true then
    perform refuse('budget', budget::text, 'Pass an interval above zero, such as ''50 seconds''.');
  end if;
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  due_before               := least(due_before, v_now);  -- least ignores null; a caller cannot look past v_now
  deadline                 := coalesce(deadline, clock_timestamp() + least(budget, interval '1000 years'));
  buckets_deleted          := 0;
  idempotency_keys_deleted := 0;
  v_rows                   := 0;

  begin
    with due as materialized (
    select b.ctid as row_id,
           p.id is null
           or case
                when (p.calendar).period is not null then
                  unused(p.calendar, b.level, b.refilled_at, v_now)
                  and (o.key is null or unused(with_calendar(p.calendar, o.calendar, o.expires_at), b.level, b.refilled_at, v_now))
                else
                  wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up) = 0
                  and (o.key is null or wait_for(o.full_level, b.level, b.refilled_at, v_now, o.every_us, o.tick_us, o.tick_gain, o.round_up) = 0)
              end as removable
      from buckets as b
      left join policies as p on p.id = b.policy_id
      left join overrides as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key and o.expires_at > v_now
     where b.due_at <= due_before
     order by b.due_at
     limit max_rows
       for update of b skip locked
  ), removed as (
    delete from buckets as b
     where b.ctid = any (array(select d.row_id from due as d where d.removable))
    returning 1
  ), postponed as (
    update buckets as b
       set due_at = (select case
                              when (p.calendar).period is not null then
                                coalesce(greatest((turning_if_known(p.calendar, v_now)).turns_at,
                                                  case when o.key is not null then
                                                    (turning_if_known(with_calendar(p.calendar, o.calendar, o.expires_at), v_now)).turns_at
                                                  end),
                                         v_now + duration(v_most_us))
                              else
                                v_now + duration(least(greatest(coalesce(wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up), v_most_us),
                                                         case when o.key is not null then
                                                           coalesce(wait_for(o.full_level, b.level, b.refilled_at, v_now, o.every_us, o.tick_us, o.tick_gain, o.round_up), v_most_us)
                                                         end),
                                                v_most_us))
                            end
                               from policies as p
                               left join overrides as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key
                                                           and o.expires_at > v_now
                              where p.id = b.policy_id)
     where b.ctid = any (array(select d.row_id from due as d where d.removable is not true))
  )
  select (select count(*) from due), (select count(*) from removed) into v_read, v_deleted;
    v_rows          := v_rows + v_read;
    buckets_deleted := buckets_deleted + v_deleted;
    with due as materialized (
    select b.ctid as row_id,
           p.id is null
           or case
                when (p.calendar).period is not null then
                  unused(p.calendar, b.level, b.refilled_at, v_now)
                  and (o.key is null or unused(with_calendar(p.calendar, o.calendar, o.expires_at), b.level, b.refilled_at, v_now))
                else
                  wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up) = 0
                  and (o.key is null or wait_for(o.full_level, b.level, b.refilled_at, v_now, o.every_us, o.tick_us, o.tick_gain, o.round_up) = 0)
              end as removable
      from ephemeral_buckets as b
      left join policies as p on p.id = b.policy_id
      left join overrides as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key and o.expires_at > v_now
     where b.due_at <= due_before
     order by b.due_at
     limit max_rows
       for update of b skip locked
  ), removed as (
    delete from ephemeral_buckets as b
     where b.ctid = any (array(select d.row_id from due as d where d.removable))
    returning 1
  ), postponed as (
    update ephemeral_buckets as b
       set due_at = (select case
                              when (p.calendar).period is not null then
                                coalesce(greatest((turning_if_known(p.calendar, v_now)).turns_at,
                                                  case when o.key is not null then
                                                    (turning_if_known(with_calendar(p.calendar, o.calendar, o.expires_at), v_now)).turns_at
                                                  end),
                                         v_now + duration(v_most_us))
                              else
                                v_now + duration(least(greatest(coalesce(wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up), v_most_us),
                                                         case when o.key is not null then
                                                           coalesce(wait_for(o.full_level, b.level, b.refilled_at, v_now, o.every_us, o.tick_us, o.tick_gain, o.round_up), v_most_us)
                                                         end),
                                                v_most_us))
                            end
                               from policies as p
                               left join overrides as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key
                                                           and o.expires_at > v_now
                              where p.id = b.policy_id)
     where b.ctid = any (array(select d.row_id from due as d where d.removable is not true))
  )
  select (select count(*) from due), (select count(*) from removed) into v_read, v_deleted;
    v_rows          := v_rows + v_read;
    buckets_deleted := buckets_deleted + v_deleted;
    delete from idempotency_keys as k
   where k.ctid = any (array(select d.ctid
                               from idempotency_keys as d
                              where d.expires_at <= due_before
                              order by d.expires_at
                              limit max_rows
                                for update skip locked));
    get diagnostics v_deleted = row_count;
    v_rows                   := v_rows + v_deleted;
    idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
    delete from ephemeral_idempotency_keys as k
   where k.ctid = any (array(select d.ctid
                               from ephemeral_idempotency_keys as d
                              where d.expires_at <= due_before
                              order by d.expires_at
                              limit max_rows
                                for update skip locked));
    get diagnostics v_deleted = row_count;
    v_rows                   := v_rows + v_deleted;
    idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
    select c.read, c.deleted into v_read, v_deleted from cleanup_slots('slots', 'leases', max_rows, v_now, due_before) as c;
    v_rows          := v_rows + v_read;
    buckets_deleted := buckets_deleted + v_deleted;
    select c.read, c.deleted into v_read, v_deleted from cleanup_slots('ephemeral_slots', 'ephemeral_leases', max_rows, v_now, due_before) as c;
    v_rows          := v_rows + v_read;
    buckets_deleted := buckets_deleted + v_deleted;
    delete from overrides as o
     where o.ctid = any (array(select d.ctid
                                 from overrides as d
                                where d.expires_at <= due_before
                                order by d.expires_at
                                limit max_rows
                                  for update skip locked));
    get diagnostics v_deleted = row_count;
    v_rows := v_rows + v_deleted;
    if v_rows = 0 then  -- these can wait for an idle batch
      select o.buckets_deleted, o.idempotency_keys_deleted
        into buckets_deleted, idempotency_keys_deleted
        from remove_orphans(max_rows) as o;
      v_rows := buckets_deleted + idempotency_keys_deleted;
    end if;
  exception when lock_not_available then
    buckets_deleted          := 0;
    idempotency_keys_deleted := 0;
    v_rows                   := 1;  -- the locked row may be due, so more is true
  end;
  more := v_rows > 0 and clock_timestamp() < deadline;
end;
$$;
comment on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) is
  'One batch of clean-up, and whether another should follow.';

-- Removes rows whose policy was dropped, at most max_rows of each table.
create or replace function ratelimit.remove_orphans(in max_rows integer, out buckets_deleted bigint, out idempotency_keys_deleted bigint)
  language plpgsql
  volatile
as $$
declare
  v_deleted bigint;
begin
  with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from buckets as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from buckets as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from buckets as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from buckets as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics buckets_deleted = row_count;
  with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from ephemeral_buckets as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from ephemeral_buckets as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from ephemeral_buckets as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from ephemeral_buckets as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  buckets_deleted := buckets_deleted + v_deleted;
  with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from slots as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from slots as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from slots as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from slots as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  buckets_deleted := buckets_deleted + v_deleted;
  with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from ephemeral_slots as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from ephemeral_slots as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from ephemeral_slots as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from ephemeral_slots as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  buckets_deleted := buckets_deleted + v_deleted;
  with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from leases as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from leases as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from leases as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from leases as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  buckets_deleted := buckets_deleted + v_deleted;
  with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from ephemeral_leases as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from ephemeral_leases as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from ephemeral_leases as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from ephemeral_leases as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  buckets_deleted := buckets_deleted + v_deleted;
  with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from idempotency_keys as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from idempotency_keys as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from idempotency_keys as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from idempotency_keys as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics idempotency_keys_deleted = row_count;
  with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from ephemeral_idempotency_keys as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from ephemeral_idempotency_keys as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from ephemeral_idempotency_keys as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from ephemeral_idempotency_keys as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
end;
$$;
comment on function ratelimit.remove_orphans(integer) is
  'Removes rows whose policy was dropped, at most max_rows of each table.';

-- One batch. It can delete nothing although rows are due: every due bucket may be in use, or lock_timeout may
-- have ended the batch. The budget of 1 second has no effect here: only deadline and more depend on it, and they are
-- not used.
create or replace function ratelimit_cleanup(
    in  max_rows                 integer default 10000,
    out buckets_deleted          bigint,
    out idempotency_keys_deleted bigint)
  language sql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select b.buckets_deleted, b.idempotency_keys_deleted from cleanup_batch(max_rows, '1 second', null, null) as b
$$;
comment on function ratelimit_cleanup(integer) is
'Removes one batch of rows that change no answer.
These are buckets that are full, idempotency keys and overrides that have expired, leases that have ended, keys of slots that nobody
  holds, which count as buckets, and, if nothing else is due, rows of dropped policies. Rows are judged as of five minutes ago. A row that another session has locked is left for a
  later batch.
max_rows: rows of each table, 1 or more.
Errors: 22023 for a bad argument, 25006 in a read-only transaction.
Locks: the rows that it deletes or postpones, until the transaction ends. It waits at most 100 ms for a lock and then
  gives up the batch.
Writes: deletes these rows. A bucket that was due and is not full is postponed, by 24 hours at most.
Role: clean-up.';

-- A procedure that commits can have neither SECURITY DEFINER nor SET. So it runs with the rights and the search_path of the
-- caller, where another role may have planted functions and operators. So its body names its one function with the schema, and
-- uses no operator.
create or replace procedure ratelimit_cleanup_all(budget interval default '50 seconds')
  language plpgsql
as $$
declare
  v_due_before timestamptz;
  v_deadline   timestamptz;
  v_batch      record;
begin
  loop
    v_batch      := ratelimit.cleanup_batch(10000, ratelimit_cleanup_all.budget, v_due_before, v_deadline);
    v_due_before := v_batch.due_before;
    v_deadline   := v_batch.deadline;
    commit;
    exit when not v_batch.more;
  end loop;
end;
$$;
comment on procedure ratelimit_cleanup_all(interval) is
'Repeats the batches of ratelimit_cleanup until no row is left that was due at the first, or budget is spent, and
  commits after each batch.
A row that another session has locked is left to the next call.
budget: an interval above 0. The batch under way when it ends is finished.
Errors: 22023 for a bad argument, 25006 in a read-only transaction, 2D000 inside a transaction.
Locks: the rows of a batch until the batch commits.
Writes: as ratelimit_cleanup.
Role: clean-up. The role also needs EXECUTE on ratelimit.cleanup_batch and USAGE on schema ratelimit.';

-- The rows of ratelimit_status. That has columns named like its arguments, which PL/pgSQL refuses.
--
-- A standby cannot read ephemeral buckets. Even a statement that names their table fails there, so it has a statement of its
-- own. If an ephemeral policy is asked for, it is 0A000: to list no bucket would say that all are full.
create or replace function ratelimit.emptiest_buckets(in of_policy text, in of_key text, in at_most integer,
    out policy text, out key text, out remaining bigint, out retry_after interval, out reset_after interval, out capacity bigint,
    out overridden boolean, out share numeric)
  returns setof record
  language plpgsql
  stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name text collate "C" := of_policy;
  v_key  text collate "C" := of_key;
  v_now  constant timestamptz := clock();
begin
  if not pg_is_in_recovery() then
    return query
      select s.name, s.key, whole_tokens(s.level_now),
             duration(wait_past_end(1, s.level, s.refilled_at, v_now, s.numbers, s.policy)),
             duration(wait_past_end(null, s.level, s.refilled_at, v_now, s.numbers, s.policy)),
             (s.numbers).capacity, s.overridden, s.share
        from (select u.*, level_now(u.level, u.refilled_at, v_now, u.numbers) as level_now,
                     level_now(u.level, u.refilled_at, v_now, u.numbers) / greatest((u.numbers).full_level, 1) as share
                from (select p.name, b.key, b.level, b.refilled_at, o.key is not null as overridden, row(p.*)::ratelimit.policies as policy,
                             with_turns(case when o.key is null then row(p.*)::ratelimit.policies
                                             else with_override(row(p.*)::ratelimit.policies, row(o.*)::ratelimit.overrides) end, v_now) as numbers
                        from policies as p
                        join (table buckets union all table ephemeral_buckets) as b on b.policy_id = p.id
                        left join overrides as o on p.overridden and o.policy_id = p.id and o.key = b.key and o.expires_at > v_now
                       where (v_name is null or p.name = v_name)
                         and (v_key is null or b.key = v_key)
                      offset 0) as u
               order by share, u.name, u.key
               limit at_most) as s
       order by s.share, s.name, s.key;
  else
    perform refuse_ephemeral(v_name);  -- raises 0A000
    return query
      select s.name, s.key, whole_tokens(s.level_now),
             duration(wait_past_end(1, s.level, s.refilled_at, v_now, s.numbers, s.policy)),
             duration(wait_past_end(null, s.level, s.refilled_at, v_now, s.numbers, s.policy)),
             (s.numbers).capacity, s.overridden, s.share
        from (select u.*, level_now(u.level, u.refilled_at, v_now, u.numbers) as level_now,
                     level_now(u.level, u.refilled_at, v_now, u.numbers) / greatest((u.numbers).full_level, 1) as share
                from (select p.name, b.key, b.level, b.refilled_at, o.key is not null as overridden, row(p.*)::ratelimit.policies as policy,
                             with_turns(case when o.key is null then row(p.*)::ratelimit.policies
                                             else with_override(row(p.*)::ratelimit.policies, row(o.*)::ratelimit.overrides) end, v_now) as numbers
                        from policies as p
                        join buckets as b on b.policy_id = p.id
                        left join overrides as o on p.overridden and o.policy_id = p.id and o.key = b.key and o.expires_at > v_now
                       where (v_name is null or p.name = v_name)
                         and (v_key is null or b.key = v_key)
                      offset 0) as u
               order by share, u.name, u.key
               limit at_most) as s
       order by s.share, s.name, s.key;
  end if;
end;
$$;
comment on function ratelimit.emptiest_buckets(text, text, integer) is
  'The buckets that have rows, the emptiest first, at most at_most of them.';

create or replace function ratelimit.refuse_ephemeral(policy text)
  returns void language plpgsql stable
  set search_path = ratelimit, pg_temp
as $$
begin
  if exists (select from policies as p where p.name = refuse_ephemeral.policy collate "C" and not p.durable) then
    raise exception 'ephemeral buckets cannot be read on a standby'
      using errcode = '0A000',
            detail  = format('Policy %L is ephemeral.', policy),
            hint    = 'Ask the primary.';
  end if;
end;
$$;
comment on function ratelimit.refuse_ephemeral(text) is
  'Raises 0A000 for an ephemeral policy on a standby.';

create or replace function ratelimit_status(policy text default null, max_rows integer default 100, key text default null)
  returns table (policy text, key text, remaining bigint, retry_after interval, reset_after interval, capacity bigint, overridden boolean)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $3, $2);
  select s.policy, s.key, s.remaining, s.retry_after, s.reset_after, s.capacity, s.overridden
    from (select * from emptiest_buckets($1, $3, $2)
          union all
          select * from fullest_slots($1, $3, $2)) as s
   order by s.share, s.policy collate "C", s.key collate "C"
   limit $2
$$;
comment on function ratelimit_status(text, integer, text) is
'Lists the buckets that have rows, the emptiest first by the share of the capacity that a bucket holds, and among them the keys of
  which slots are held.
A bucket without a row is full. The call reads every bucket, or every bucket of the policy or the key. On a standby it
  lists durable policies only.
policy: null lists the buckets of all policies.
max_rows: 1 or more.
key: null lists all keys.
remaining: tokens, or the slots that nobody holds.
retry_after: the time until the bucket holds 1 token, or 1 slot is free; null for never.
overridden: whether the key has an override.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 0A000 for an ephemeral policy on a standby.
Locks: nothing.
Writes: nothing.
Role: monitoring.';

-- The owners are those of schema ratelimit, its functions and tables, the public functions and the extension. A restore by a
-- superuser makes it the owner of an extension, because pg_dump does not name the owner.
--
-- A bucket that is overdue and in use is no finding: clean-up skips a row that is locked.
create or replace function ratelimit_doctor()
  returns table (severity text, finding text, remedy text)
  language plpgsql
  stable
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- the overdue rows are found by the index of the column that makes them due
  set jit = off             -- a sequential scan, where there is no other way, now counts as dear enough to be compiled
as $$
declare
  v_now        timestamptz;
  v_due_before timestamptz;
  v_tables     regclass[];
  v_standby    constant boolean     := pg_is_in_recovery();
  v_where      constant text        := case when v_standby then ' This server is a standby: do it on the primary.' else '' end;
  v_home       constant regnamespace := (select p.pronamespace::regnamespace
                                           from pg_proc as p
                                          where p.proname = 'ratelimit_doctor'
                                            and p.pronargs = 0
                                            and pg_get_userbyid(p.proowner) = current_user
                                          limit 1);
  -- The owner of schema ratelimit or, where that is a superuser and not the owner of this function, the latter.
  v_owner      constant oid         := (select r.oid
                                          from pg_roles as r
                                         where r.rolname = current_user
                                            or r.oid = (select n.nspowner from pg_namespace as n where n.nspname = 'ratelimit')
                                         order by r.rolsuper, r.rolname = current_user
                                         limit 1);
  v_new_owner  constant text        := (select case when r.rolsuper then 'new_owner' else r.oid::regrole::text end from pg_roles as r where r.oid = v_owner);
  v_extend     constant text        := (select format(e'\n'
      '  execute format(''set local role %%s'', new_owner);\n'
      '  create extension pgratelimit schema %s version ''unpackaged'';\n'
      '  alter extension pgratelimit update to %L;', v_home, e.extversion)
                                          from pg_extension as e
                                         where e.extname = 'pgratelimit');
  v_object     record;
  v_remedy     text;
  v_blind      boolean := false;
begin
  -- Objects of superusers can be given away together. What any other role owns may have been planted.
  for v_object in
    select o.owner, r.rolsuper as superuser, bool_or(o.definer) as definer, count(*) as objects,
           bool_or(o.class <> 'pg_extension'::regclass and coalesce(i.schema, 'ratelimit') = 'ratelimit') as private,
           string_agg(format('alter %s %s owner to %s;', replace(i.type, 'composite ', ''), i.identity, v_owner::regrole), e'\n' order by i.identity)
             filter (where o.class <> 'pg_extension'::regclass) as statements
      from (select 'pg_namespace'::regclass, n.oid, n.nspowner, false from pg_namespace as n where n.nspname = 'ratelimit'
            union all
            select 'pg_extension'::regclass, e.oid, e.extowner, false from pg_extension as e where e.extname = 'pgratelimit'
            union all
            select 'pg_class'::regclass, c.oid, c.relowner, false
              from pg_class as c
             where c.relnamespace = 'ratelimit'::regnamespace
               and c.relkind in ('r', 'p', 'v', 'm', 'f', 'c')
            union all
            select 'pg_proc'::regclass, p.oid, p.proowner, p.prosecdef
              from pg_proc as p
             where p.pronamespace = 'ratelimit'::regnamespace
                or p.pronamespace = v_home
               and starts_with(p.proname, 'ratelimit_')) as o (class, oid, owner, definer)
      join pg_roles as r on r.oid = o.owner
     cross join pg_identify_object(o.class, o.oid, 0) as i
     group by o.owner, r.rolsuper
     order by o.owner::regrole::text
  loop
    v_remedy := format('Give them to %s. What may have been planted, drop. As a superuser:%s', v_owner::regrole, v_where) || e'\n' || v_object.statements;
    if v_object.superuser or v_object.statements is null then  -- the extension alone
      -- No statement changes the owner of an extension: so its objects leave it, and the new owner makes it again.
      v_remedy := 'Unless this is a trial, give the package to a role that is no superuser, and has CREATE on the database and on the '
                  'schema of the functions. As a superuser, with the name of that role for ' || v_new_owner || ':' || v_where || format(
$give$
do $give_away$
declare
  new_owner constant regrole := %1$L;
  statement text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  foreach statement in array array(
    select format('alter extension pgratelimit drop %%s %%s', i.type, i.identity)
      from pg_extension as e
      join pg_depend as d on d.refclassid = 'pg_extension'::regclass and d.refobjid = e.oid and d.deptype = 'e'
     cross join pg_identify_object(d.classid, d.objid, 0) as i
     where e.extname = 'pgratelimit'
    union all
    select 'drop extension if exists pgratelimit'
    union all
    select format('alter %%s %%s owner to %%s', replace(i.type, 'composite ', ''), i.identity, new_owner)
      from (select 'pg_namespace'::regclass, oid, nspowner from pg_namespace where nspname = 'ratelimit'
            union all
            select 'pg_class'::regclass, oid, relowner
              from pg_class
             where relnamespace = 'ratelimit'::regnamespace and relkind in ('r', 'p', 'v', 'm', 'f', 'c')
            union all
            select 'pg_proc'::regclass, oid, proowner
              from pg_proc
             where pronamespace = 'ratelimit'::regnamespace
                or pronamespace = %2$L::regnamespace and starts_with(proname, 'ratelimit_')) as o (class, oid, owner)
      join pg_roles as r on r.oid = o.owner and r.rolsuper
     cross join pg_identify_object(o.class, o.oid, 0) as i)
  loop
    execute statement;
  end loop;%3$s
end;
$give_away$;$give$, v_new_owner, v_home, v_extend);
    end if;
    if v_object.superuser and v_object.definer then
      return query
        select 'notice',
               format('The owner of the package, %s, is a superuser: its functions run with all rights, whoever calls them.', v_object.owner::regrole),
               v_remedy;
    end if;
    if v_object.owner <> v_owner then
      return query
        select 'warning',
               format('%s objects of the package belong to %s, and others to %s: calls can fail, and no role can upgrade it.', v_object.objects,
                      v_object.owner::regrole, v_owner::regrole),
               v_remedy;
      v_blind := v_blind or v_object.private and not (select r.rolsuper from pg_roles as r where r.rolname = current_user);
    end if;
  end loop;
  if v_blind then
    return;  -- the rest would fail: the owner of this function lacks rights
  end if;

  v_now := clock();
  v_due_before := v_now - interval '10 minutes';
  v_tables := array['buckets'::regclass, 'ephemeral_buckets'::regclass, 'slots'::regclass, 'ephemeral_slots'::regclass,
                    'leases'::regclass, 'ephemeral_leases'::regclass, 'idempotency_keys'::regclass, 'ephemeral_idempotency_keys'::regclass];
  return query
  select 'warning',
         format('ratelimit.%s has %s overdue for clean-up, the oldest since %s.', o.name,
                case when o.overdue = 10000 then '10000 or more rows' else counted(o.overdue, 'row') end, date_trunc('second', o.since)),
         'Clean-up does not run, or cannot keep up. Run it now: call ratelimit_cleanup_all(); and then every minute: docs/operating.md.' || v_where
    from (select 'buckets' as name, count(*) as overdue, min(d.due) as since
            from (select t.due_at as due from buckets as t where t.due_at < v_due_before and t.refilled_at < v_due_before order by t.due_at limit 10000) as d
          union all
          select 'idempotency_keys' as name, count(*) as overdue, min(d.due) as since
            from (select t.expires_at as due from idempotency_keys as t where t.expires_at < v_due_before order by t.expires_at limit 10000) as d
          union all
          select 'slots' as name, count(*) as overdue, min(d.due) as since
            from (select t.due_at as due from slots as t where t.due_at < v_due_before order by t.due_at limit 10000) as d
          union all
          select 'overrides' as name, count(*) as overdue, min(d.due) as since
            from (select t.expires_at as due from overrides as t where t.expires_at < v_due_before order by t.expires_at limit 10000) as d) as o
   where o.overdue > 0;
  if not v_standby then
    return query
    select 'warning',
           format('ratelimit.%s has %s overdue for clean-up, the oldest since %s.', o.name,
                  case when o.overdue = 10000 then '10000 or more rows' else counted(o.overdue, 'row') end, date_trunc('second', o.since)),
           'Clean-up does not run, or cannot keep up. Run it now: call ratelimit_cleanup_all(); and then every minute: docs/operating.md.' || v_where
      from (select 'ephemeral_buckets' as name, count(*) as overdue, min(d.due) as since
              from (select t.due_at as due from ephemeral_buckets as t where t.due_at < v_due_before and t.refilled_at < v_due_before order by t.due_at limit 10000) as d
            union all
            select 'ephemeral_idempotency_keys' as name, count(*) as overdue, min(d.due) as since
              from (select t.expires_at as due from ephemeral_idempotency_keys as t where t.expires_at < v_due_before order by t.expires_at limit 10000) as d
            union all
            select 'ephemeral_slots' as name, count(*) as overdue, min(d.due) as since
              from (select t.due_at as due from ephemeral_slots as t where t.due_at < v_due_before order by t.due_at limit 10000) as d) as o
     where o.overdue > 0;
  elsif exists (select from policies as p where not p.durable) then
    return query values (
      'notice',
      'This server is a standby, which cannot read the buckets, leases and idempotency keys of ephemeral policies: overdue rows there are not found.',
      'Ask the primary, too: select * from ratelimit_doctor();');
  end if;

  return query
    select 'warning',
           format('ratelimit.%s holds %s dead row versions beside %s.', s.relname, s.n_dead_tup, counted(s.n_live_tup, 'row')),
           'Vacuum does not get to them, or an old snapshot keeps them: see the other findings. Then run: vacuum ratelimit.' || s.relname || ';' || v_where
      from pg_stat_all_tables as s
     where s.relid = any (v_tables)
       and s.n_dead_tup > 100000
       and s.n_dead_tup > s.n_live_tup
     order by s.relname;
  -- What a row takes up with its index entries is at most about twice its columns and 50 bytes.
  return query
    select 'warning',
           format('ratelimit.%s takes up %s for %s; less than %s would do.', b.relname, pg_size_pretty(b.size), counted(b.rows, 'row'), pg_size_pretty(b.needed)),
           'Space that is free in the table is used again. To give it back, in a quiet moment, because acquires wait: vacuum full ratelimit.' || b.relname || ';' || v_where
      from (select s.relname, pg_total_relation_size(s.relid) as size, r.rows, 10 * 1048576 + (r.rows * 2 * (w.width + 50))::bigint as needed
              from pg_stat_all_tables as s
              join pg_class as c on c.oid = s.relid
             cross join lateral (select greatest(s.n_live_tup, c.reltuples::bigint, 0) as rows) as r
             cross join lateral (select coalesce(sum(a.avg_width), 100) as width
                                   from pg_stats as a
                                  where a.schemaname = s.schemaname and a.tablename = s.relname) as w
             where s.relid = any (v_tables)) as b
     where b.size > 5 * b.needed
     order by b.relname;
  return query
    select 'warning',
           format('Of %s updates of ratelimit.%s only %s were heap-only: the others had to write to every index.',
                  s.n_tup_upd, s.relname, round(s.n_tup_hot_upd::numeric / s.n_tup_upd, 3)),
           'Pages have no room for new row versions. Most often an old snapshot or an idle transaction keeps the versions that are there. '
           'Or the table has another index or fillfactor than it was created with: see \d+ ratelimit.' || s.relname
      from pg_stat_all_tables as s
     where s.relid = any (v_tables[1:6])
       and s.n_tup_upd > 10000
       and s.n_tup_hot_upd < 0.7 * s.n_tup_upd
     order by s.relname;

  return query
    select 'warning',
           format('Session %s of role %s (%s) has a transaction open since %s: rows that it locks are waited for, and row versions that it may see stay.',
                  a.pid, a.usename, a.state, date_trunc('second', a.xact_start)),
           format('End the transaction; if it is stuck: select pg_terminate_backend(%s); The setting idle_in_transaction_session_timeout ends idle ones.', a.pid)
      from pg_stat_activity as a
     where a.datname = current_database()
       and a.pid <> pg_backend_pid()
       and a.backend_type <> 'autovacuum worker'
       and (a.backend_xmin is not null or a.backend_xid is not null)
       and a.xact_start < v_now - interval '1 minute'
     order by a.xact_start;
  return query
    select 'warning',
           format('Prepared transaction %L is open since %s: rows that it locks are waited for, and row versions that it may see stay.',
                  x.gid, date_trunc('second', x.prepared)),
           format('End it: commit prepared %1$L; or rollback prepared %1$L;', x.gid)
      from pg_prepared_xacts as x
     where x.database = current_database()
       and x.prepared < v_now - interval '1 minute'
     order by x.prepared;
  return query
    select 'notice',
           format('The owner of the package, %I, cannot see what sessions of other roles do: old snapshots and idle transactions are not found.', current_user),
           format('As a superuser, or with the admin option: grant pg_read_all_stats to %I;', current_user) || v_where
     where not pg_has_role(current_user, 'pg_read_all_stats', 'usage');

  return query
    select 'warning',
           format('The server uses %s transaction ids a second since the last checkpoint: at this rate autovacuum freezes all tables every %s hours.',
                  round(u.used / u.seconds), round(m.most / (u.used / u.seconds) / 3600, 1)),
           'Share calls: a Combiner and ratelimit_acquire_packed use two ids for a call, a plain grant one for itself. To freeze less often, '
           'and then restart: alter system set autovacuum_freeze_max_age = 1000000000;'
      from pg_control_checkpoint() as c
     cross join lateral (select pg_snapshot_xmax(pg_current_snapshot())::text::numeric
                                - split_part(c.next_xid, ':', 1)::numeric * 4294967296 - split_part(c.next_xid, ':', 2)::numeric as used,
                                extract(epoch from v_now - c.checkpoint_time) as seconds) as u
     cross join (select current_setting('autovacuum_freeze_max_age')::numeric as most) as m
     where not v_standby
       and u.seconds >= 30
       and u.used / u.seconds > m.most / 86400;  -- all within a day
  return query
    select 'warning',
           format('The server does not know the time zone %L of %s, so calls about them fail.', z.time_zone, z.users),
           'Install the time zone data that has it (tzdata-legacy on Debian), or name another zone with ratelimit_define_policy or ratelimit_override.' || v_where
      from (select u.time_zone, string_agg(u.name, ', ' order by u.name) as users
              from (select (p.calendar).time_zone, format('policy %L', p.name) as name from policies as p where (p.calendar).period is not null
                    union all
                    select (o.calendar).time_zone, format('%s overrides of policy %L', count(*), p.name)
                      from policies as p
                      join overrides as o on o.policy_id = p.id
                     where (p.calendar).overridden and (p.calendar).period is not null
                     group by (o.calendar).time_zone, p.name) as u
             group by u.time_zone) as z
     where (select count(*) from pg_timezone_names as n where n.name = z.time_zone) = 0  -- a scan for each zone, and none without quotas
     order by z.time_zone;
  return query
    select 'warning',
           format('The setting %s of the server is off, so nothing vacuums the tables.', s.name),
           format('alter system set %s = on; select pg_reload_conf();', s.name)
      from pg_settings as s
     where s.name in ('autovacuum', 'track_counts')
       and s.setting = 'off'
       and not v_standby  -- where nothing is vacuumed
     order by s.name;
  return query
    select 'warning',
           format('Autovacuum is off for ratelimit.%s.', c.relname),
           format('alter table ratelimit.%s reset (autovacuum_enabled);', c.relname) || v_where
      from pg_class as c
     cross join pg_options_to_table(c.reloptions) as o
     where c.oid = any (v_tables)
       and o.option_name = 'autovacuum_enabled'
       and not o.option_value::boolean
     order by c.relname;
end;
$$;
comment on function ratelimit_doctor() is
'Looks for settings and rows that make limits slow or tables large, and for wrong owners.
No row means that all is well. Sessions count after a minute, and statistics from their last reset. On a standby it
  cannot read the buckets of ephemeral policies, and returns a notice about them.
severity: warning or notice.
finding: the problem, with figures.
remedy: where possible a statement.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: monitoring.';

create or replace function ratelimit_version()
  returns text
  language sql
  immutable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select '0.2.0'
$$;
comment on function ratelimit_version() is
'Returns the release of pgratelimit that is installed.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: owner.';


-- Which part of the keys is in this database, where more than one has them.
-- The client finds the shard of a key, and this function lets it make sure that it has found the database. No function
-- that decides looks here. The row is part of a dump and of a copy of the database: wherever the database goes, it is
-- the shard that it was.
create or replace function ratelimit_shard()
  returns table (shard integer, of integer)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select s.shard, s.of from shard as s
$$;
comment on function ratelimit_shard() is
'Returns which of how many shards this database is, and no row if it is none.
shard: the number of the shard, from 0.
of: the number of shards, a power of two.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: application, with client.NewSharded.';

-- A different number is refused: the keys that the database has would belong elsewhere.
create or replace function ratelimit_define_shard(shard integer, of integer)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_is shard;
begin
  if (ratelimit_define_shard.of between 1 and 65536 and ratelimit_define_shard.of & (ratelimit_define_shard.of - 1) = 0) is not true then
    perform refuse('of', ratelimit_define_shard.of::text, 'Pass the number of all shards: a power of two, at most 65536.');
  end if;
  if (ratelimit_define_shard.shard between 0 and ratelimit_define_shard.of - 1) is not true then
    perform refuse('shard', ratelimit_define_shard.shard::text, 'Pass the number of this shard: 0 or more, and less than the number of all shards.');
  end if;
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  lock table shard in share row exclusive mode;
  insert into shard as s (shard, of)
  select ratelimit_define_shard.shard, ratelimit_define_shard.of
   where not exists (select from shard as t);
  select s.* into v_is from shard as s;
  if (v_is.shard, v_is.of) <> (ratelimit_define_shard.shard, ratelimit_define_shard.of) then
    raise exception 'invalid shard'
      using errcode = '22023',
            detail  = format('Database %s is shard %s of %s already.', current_database(), v_is.shard, v_is.of),
            hint    = 'A database is one shard for life. If it was numbered by mistake and is not in use, uninstall the package and install it again.';
  end if;
end;
$$;
comment on function ratelimit_define_shard(integer, integer) is
'Makes this database one of several shards, for as long as the package is installed.
A repeat with the same numbers changes nothing.
shard: the number of this shard, 0 to of - 1.
of: the number of shards, a power of two up to 65536.
Errors: 22023 for a bad argument and for a database that is another shard already, 25006 in a read-only transaction.
Locks: table ratelimit.shard against other calls of this function, until the transaction ends. Readers do not wait.
Writes: ratelimit.shard.
Role: administrator.';


-- Checks that all functions of the package belong to the owner of schema ratelimit. Revokes the grants that
-- default privileges gave on new functions. Functions that existed before keep their grants.
do $epilogue$
declare
  v_owner oid;
  v_path  text := pg_catalog.current_setting('search_path');
  v_home  text := pg_catalog.current_schema();
  v_role  text;
  v_proc  record;
  v_had   oid[] := pg_catalog.string_to_array(pg_catalog.current_setting('ratelimit.preexisting'), ',')::oid[];
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspowner into v_owner from pg_catalog.pg_namespace as n where n.nspname = 'ratelimit';

  for v_proc in
    select p.oid, p.oid::pg_catalog.regprocedure as signature, p.proowner, p.proacl
      from pg_catalog.pg_proc as p
     where p.pronamespace = 'ratelimit'::pg_catalog.regnamespace
        or p.pronamespace = pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace
       and pg_catalog.starts_with(p.proname, 'ratelimit_')
  loop
    if v_proc.proowner <> v_owner then
      raise exception 'a function of the package belongs to another role'
        using errcode = '42501',
              detail  = pg_catalog.format('%s belongs to %s; schema ratelimit belongs to %s.', v_proc.signature,
                                          v_proc.proowner::pg_catalog.regrole, v_owner::pg_catalog.regrole),
              hint    = 'Drop the function if it was planted; install as the owner of schema ratelimit.';
    end if;
    continue when v_proc.oid = any (v_had);
    for v_role in
      select distinct case a.grantee when 0 then 'public' else a.grantee::pg_catalog.regrole::text end
        from pg_catalog.aclexplode(coalesce(v_proc.proacl, pg_catalog.acldefault('f', v_owner))) as a
       where a.grantee <> v_owner
    loop
      execute pg_catalog.format('revoke all on routine %s from %s', v_proc.signature, v_role);
    end loop;
  end loop;
  perform pg_catalog.set_config('search_path', v_path, true);
end;
$epilogue$;


-- Retired: calls that began under schema version 1 may still call these.
create or replace function ratelimit.granted(level bigint, reset_us bigint, capacity bigint)
  returns ratelimit.retired_decision language sql immutable parallel safe
as $$
  select (true, level / 1000000, interval '0', ratelimit.duration(reset_us), capacity, false)::ratelimit.retired_decision
$$;
create or replace function ratelimit.answer(level bigint, retry_us bigint, reset_us bigint, capacity bigint)
  returns ratelimit.retired_decision language sql immutable parallel safe
as $$
  select (coalesce(retry_us = 0, false), ratelimit.whole_tokens(level), ratelimit.duration(retry_us),
          ratelimit.duration(reset_us), capacity, false)::ratelimit.retired_decision
$$;
create or replace function ratelimit.replay(granted ratelimit.idempotency_keys, cost bigint)
  returns ratelimit.retired_decision language plpgsql immutable
as $$
begin
  if granted.cost <> cost then
    perform ratelimit.refuse_repeat(granted, cost);
  end if;
  return (true, granted.remaining, interval '0', granted.reset_after, granted.capacity, true)::ratelimit.retired_decision;
end;
$$;

-- Grants again what was granted on the functions that were dropped, and no more. Who may call
-- ratelimit_acquire_many may call ratelimit_acquire_packed, which is the same in another form.
do $grant$
declare
  v_path  text := pg_catalog.current_setting('search_path');
  v_proc  record;
  v_grant record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_proc in
    select p.oid::regprocedure as signature, p.proname, p.proowner,
           coalesce(p.proacl, acldefault('f', p.proowner)) as acl
      from pg_proc as p
     where p.pronamespace = quote_ident(current_setting('ratelimit.home'))::regnamespace
       and p.proname in ('ratelimit_define_policy', 'ratelimit_policies', 'ratelimit_acquire', 'ratelimit_acquire_many', 'ratelimit_peek',
                         'ratelimit_refund', 'ratelimit_acquire_packed')
  loop
    for v_grant in
      select distinct case a.grantee when 0 then 'public' else a.grantee::regrole::text end as grantee
        from aclexplode(v_proc.acl) as a
       where a.grantee <> v_proc.proowner
    loop
      execute format('revoke all on function %s from %s', v_proc.signature, v_grant.grantee);
    end loop;
    for v_grant in
      select g.grantee, bool_or(g.grantable) as grantable
        from jsonb_to_recordset(current_setting('ratelimit.grants')::jsonb) as g (name text, grantee text, grantable boolean)
       where g.name = case v_proc.proname when 'ratelimit_acquire_packed' then 'ratelimit_acquire_many' else v_proc.proname end
       group by g.grantee
    loop
      execute format('grant execute on function %s to %s%s', v_proc.signature, v_grant.grantee,
                     case when v_grant.grantable then ' with grant option' end);
    end loop;
  end loop;
  perform set_config('search_path', v_path, true);
end;
$grant$;
update ratelimit.schema_version set version = 2;
\endif
\unset pgratelimit_missing
commit;

select coalesce(pg_catalog.string_agg(p.pronamespace::pg_catalog.regnamespace::pg_catalog.text, ', '),
                'none (the functions are missing)') as pgratelimit_home
  from pg_catalog.pg_proc as p
  join pg_catalog.pg_namespace as n on n.nspowner operator(pg_catalog.=) p.proowner
 where n.nspname operator(pg_catalog.=) 'ratelimit'
   and p.proname operator(pg_catalog.=) 'ratelimit_version'
   and p.pronargs operator(pg_catalog.=) 0
\gset
\echo pgratelimit 0.2.0 is installed in schema :pgratelimit_home; its schema version is 2.
\unset pgratelimit_home
\set ON_ERROR_STOP :pgratelimit_stop
\set QUIET :pgratelimit_quiet
\unset pgratelimit_stop
\unset pgratelimit_quiet

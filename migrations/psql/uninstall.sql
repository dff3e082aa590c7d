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
                    and a.atttypid = 'integer'::regtype) then
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
                hint    = format('Connect as %1$s, for example with options=-crole=%1$s; or drop the schema if it was planted.', v_owner::regrole);
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
                         'ratelimit_reserve', 'ratelimit_acquire_up_to', 'ratelimit_enforce', 'ratelimit_guard', 'ratelimit_pre_request',
                         'ratelimit_status', 'ratelimit_doctor', 'ratelimit_shard', 'ratelimit_define_shard', 'ratelimit_reset_all')
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
drop type ratelimit.decision, ratelimit.reservation, ratelimit.partial_decision, ratelimit.packed, ratelimit.charged, ratelimit.part, ratelimit.asked;
alter type ratelimit.retired_decision rename to decision;

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
alter table ratelimit.idempotency_keys drop column ready_at, drop column settled, drop column taken;
alter table ratelimit.ephemeral_idempotency_keys drop column ready_at, drop column settled, drop column taken;
alter table ratelimit.buckets drop column room;
alter table ratelimit.ephemeral_buckets drop column room;
do $names$
begin
  -- From PostgreSQL 18 on NOT NULL has a name, and the twin was created with that of the other table.
  if pg_catalog.current_setting('server_version_num')::pg_catalog.int4 operator(pg_catalog.>=) 180000 then
    alter table ratelimit.ephemeral_idempotency_keys
      rename constraint ephemeral_idempotency_keys_reset_after_not_null to idempotency_keys_reset_after_not_null;
  end if;
end;
$names$;
drop table ratelimit.overrides, ratelimit.shard;
alter table ratelimit.policies
  drop column overridden,
  drop column shadow;
comment on type ratelimit.decision is
  'The answer about one bucket: allowed; whole tokens remaining; retry_after, zero when allowed and null when the cost can never fit; reset_after, until full; capacity; replayed, when it is the first answer under a live idempotency key, given again.';

-- Snapshot 001 finds its place by this function, and replaces it.
do $home$
begin
  execute pg_catalog.format('create function %I.ratelimit_acquire(policy text, key text, cost bigint default 1, idempotency_key text default null) '
                            'returns ratelimit.decision language sql return null::ratelimit.decision', pg_catalog.current_setting('ratelimit.home'));
end;
$home$;
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


-- Grants again what was granted on the functions that were dropped, and no more.
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
                         'ratelimit_refund')
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
       where g.name = v_proc.proname
       group by g.grantee
    loop
      execute format('grant execute on function %s to %s%s', v_proc.signature, v_grant.grantee,
                     case when v_grant.grantable then ' with grant option' end);
    end loop;
  end loop;
  perform set_config('search_path', v_path, true);
end;
$grant$;
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

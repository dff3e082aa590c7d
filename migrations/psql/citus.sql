-- Distributes pgratelimit over the nodes of a Citus cluster; running it again is harmless. For psql, on the coordinator, after
-- install.sql or any other way to install:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f citus.sql
--
-- policies and overrides become reference tables. Buckets and idempotency keys are distributed by key, with the rows that there
-- are. The functions are put on all nodes, and call their twins on the node that has the shard of the key. docs/sharding.md
-- says what holds then, and what does not.
--
-- The role must be the owner of schema ratelimit, and be able to connect from each node to the others. It is one transaction.
-- Run it again after each later version of pgratelimit.
--
-- Generated from sql/: make psql.
begin transaction isolation level read committed;
set local client_min_messages = warning;
do $citus$
declare
  v_path    text := pg_catalog.current_setting('search_path');
  v_version integer;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  if not exists (select from pg_extension as e where e.extname = 'citus') then
    raise exception 'Citus is not in this database'
      using errcode = '55000',
            hint    = 'Run this file in the database of the coordinator. Without Citus there is nothing to distribute.';
  end if;
  if (select g.groupid from pg_dist_local_group as g) <> 0 then
    raise exception 'this node is not the coordinator'
      using errcode = '55000',
            hint    = 'Run this file on the coordinator.';
  end if;
  select v.version into v_version from ratelimit.schema_version as v;
  if v_version <> 2 then
    raise exception 'another schema version is installed'
      using errcode = '55000',
            detail  = format('Schema version %s is installed; this file is for version 2.', v_version),
            hint    = 'Run install.sql of the same release first.';
  end if;
  perform pg_advisory_xact_lock(9628173550095224);  -- as installers do
  perform set_config('citus.multi_shard_modify_mode', 'sequential', true);

  if not exists (select from pg_dist_partition as p where p.logicalrelid = 'ratelimit.buckets'::regclass) then
    perform create_reference_table('ratelimit.policies');
    perform create_reference_table('ratelimit.overrides');
    perform create_reference_table('ratelimit.shard');
    perform create_reference_table('ratelimit.schema_version');
    -- One shard more than other tables have: Citus puts tables of as many shards, and of a key of the same type, with these by
    -- default, and then refuses them, because this key has the collation "C".
    perform create_distributed_table('ratelimit.buckets', 'key', colocate_with => 'none',
                                     shard_count => current_setting('citus.shard_count')::integer + 1);
    perform create_distributed_table('ratelimit.idempotency_keys', 'key', colocate_with => 'ratelimit.buckets');
    perform create_distributed_table('ratelimit.ephemeral_buckets', 'key', colocate_with => 'ratelimit.buckets');
    perform create_distributed_table('ratelimit.ephemeral_idempotency_keys', 'key', colocate_with => 'ratelimit.buckets');
  end if;
  perform set_config('search_path', v_path, true);
end;
$citus$;
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
-- Callers that know this, and that the bucket is below target, skip the checks of wait_for. Null means never: with refill 0,
-- tick_gain is 0.
create or replace function ratelimit.wait_below(
    target numeric, level bigint, elapsed_us numeric,
    every_us numeric, tick_us numeric, tick_gain numeric, round_up numeric)
  returns bigint language sql immutable parallel safe
as $$
  select ratelimit.time_below(target, level, elapsed_us, every_us, tick_us, nullif(tick_gain, 0), round_up)::bigint
$$;
comment on function ratelimit.wait_below(numeric, bigint, numeric, numeric, numeric, numeric, numeric) is
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

-- The same in bigint, which is cheaper, for statements about many buckets of one policy.
-- A policy's numbers are small if no product overflows, and an empty bucket is full within 15 years. One tick gains
-- gain / per microtokens, in lowest terms, and ticks of them fill an empty bucket twice over: a bucket in deeper debt than
-- its capacity needs the other one. date_part rounds to whole microseconds correctly for 35 years; beyond, ticks is less.
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
    perform ratelimit.refuse(argument, length || ' elements long, policies ' || expected,
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
    perform ratelimit.refuse('sizes', format('%s in sum, policies %s elements long', (select sum(s.size) from unnest(sizes) as s (size)), length),
      'Pass the number of elements of each request.');
  elsif idempotency_keys <> cardinality(sizes) then
    perform ratelimit.refuse('idempotency_keys', format('%s elements long, sizes %s', idempotency_keys, cardinality(sizes)),
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
  v_missing constant text := 'A new policy needs capacity, refill and every.';
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

create or replace function ratelimit.no_grant(policy text, idempotency_key text)
  returns void language plpgsql
as $$
begin
  raise exception 'no live grant under this idempotency key' using
    errcode = 'RL003',
    detail  = format('Policy %L does not remember %L for this key. Nothing was charged.', policy, idempotency_key),
    hint    = 'Settle once the grant is committed, and let the policy remember for longer than the longest job: '
              'ratelimit_define_policy(policy, remember => ''7 days'').';
end;
$$;
comment on function ratelimit.no_grant(text, text) is
  'Raises RL003, the error of a settlement without a grant.';

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

-- A reserved grant holds once its wait is over.
create or replace function ratelimit.replay_at(granted ratelimit.idempotency_keys, now timestamptz, shadow boolean)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (shadow or (granted.ready_at > now) is not true, granted.remaining,
          ratelimit.duration(case when shadow then 0 else ratelimit.left_us(granted, now) end),
          granted.reset_after, granted.capacity, true, shadow and (granted.ready_at > now) is true)::ratelimit.decision
$$;
comment on function ratelimit.replay_at(ratelimit.idempotency_keys, timestamptz, boolean) is
  'The replay of a reserved grant: a denial with the rest of its wait, and then the grant.';

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

create or replace function ratelimit.reserved_before(granted ratelimit.idempotency_keys, now timestamptz, shadow boolean)
  returns ratelimit.reservation language sql immutable parallel safe
as $$
  select (true, ratelimit.duration(case when shadow then 0 else ratelimit.left_us(granted, now) end), granted.remaining,
          granted.reset_after, granted.capacity, true, shadow and ratelimit.left_us(granted, now) > 0)::ratelimit.reservation
$$;
comment on function ratelimit.reserved_before(ratelimit.idempotency_keys, timestamptz, boolean) is
  'The replay of a grant to a reservation, with the rest of its wait.';

create or replace function ratelimit.partial_of(decision ratelimit.decision, taken bigint)
  returns ratelimit.partial_decision language sql immutable parallel safe
as $$
  select (decision.allowed, decision.remaining, decision.retry_after, decision.reset_after, decision.capacity, decision.replayed,
          decision.shadowed, case when decision.allowed then taken else 0 end)::ratelimit.partial_decision
$$;
comment on function ratelimit.partial_of(ratelimit.decision, bigint) is
  'A decision about as many tokens as there are, and how many were taken.';

-- decisions_of(...)[n] is the decision about element n; null if it was refused. The arguments are those of acquire_batch.
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

create or replace function ratelimit.another_cost(detail text)
  returns void language plpgsql immutable
as $$
begin
  raise exception 'idempotency key used before with another cost' using
    errcode = 'RL002',
    detail  = another_cost.detail,
    hint    = 'Repeat a request with its first cost, and give a new request a new key.';
end;
$$;
comment on function ratelimit.another_cost(text) is
  'Raises RL002, the error for another cost under a live idempotency key.';

create or replace function ratelimit.check_repeated_cost(granted ratelimit.idempotency_keys, cost bigint)
  returns void language plpgsql
as $$
begin
  if granted.cost <> cost then
    perform ratelimit.another_cost(format('%L was granted with cost %s and comes back with cost %s.',
                                          granted.idempotency_key, granted.cost, cost));
  end if;
end;
$$;
comment on function ratelimit.check_repeated_cost(ratelimit.idempotency_keys, bigint) is
  'Raises RL002 unless a repeat has the cost of the grant under its idempotency key.';

create or replace function ratelimit.check_repeated_range(granted ratelimit.idempotency_keys, at_least bigint, at_most bigint)
  returns void language plpgsql
as $$
begin
  if granted.cost not between at_least and at_most then
    perform ratelimit.another_cost(format('%L was granted with cost %s and comes back for %s to %s.',
                                          granted.idempotency_key, granted.cost, at_least, at_most));
  end if;
end;
$$;
comment on function ratelimit.check_repeated_range(ratelimit.idempotency_keys, bigint, bigint) is
  'Raises RL002 unless the cost of the grant under its idempotency key is what a repeat may take.';

-- ratelimit_charge does not raise it: its repeat is answered again.
create or replace function ratelimit.already_settled(granted ratelimit.idempotency_keys)
  returns void language plpgsql immutable
as $$
begin
  raise exception 'the grant under this idempotency key was settled' using
    errcode = 'RL004',
    detail  = format('%L was granted with cost %s and settled with cost %s.', granted.idempotency_key, granted.cost, granted.settled),
    hint    = 'The operation is over, or was cancelled: do not repeat it. A new one needs a new key.';
end;
$$;
comment on function ratelimit.already_settled(ratelimit.idempotency_keys) is
  'Raises RL004, the error for a request whose grant was settled.';

-- The functions that answer many requests report an error in the row of its request. So this function catches the
-- errors of the checks. granted is the remembered grant whose cost differs, or which was settled; null means that the policy
-- is unknown, unless an argument is bad.
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
    perform ratelimit.check_repeated_cost(granted, cost);
    perform ratelimit.already_settled(granted);
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

-- An override is the numbers of a policy for one key. It is live until it expires. ratelimit.overrides has the derived
-- columns of ratelimit.policies, so the arithmetic takes them from either.
--
-- Nothing looks for an override unless the policy's column overridden says that it has some. So a policy without them
-- pays nothing.
create or replace function ratelimit.overridden(policy ratelimit.policies, override ratelimit.overrides)
  returns ratelimit.policies language sql immutable parallel safe
as $$
  select row(policy.id, policy.name, override.capacity, override.refill, override.every, policy.stepped, policy.durable, policy.remember,
             override.tick, override.every_us, override.tick_us, override.full_level, override.gain, override.tick_gain, override.round_up,
             policy.remember_us, policy.overridden, policy.shadow)::ratelimit.policies
$$;
comment on function ratelimit.overridden(ratelimit.policies, ratelimit.overrides) is
  'A policy with the numbers of an override.';

-- The error of a guard that refuses.

-- The fields of draft-ietf-httpapi-ratelimit-headers for a denial: what is left of which quota. A policy's name is a string
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
  v_token_s    numeric;  -- until there is more, as if the bucket were refilled evenly
begin
  select ceil(wait_below(p.full_level, 0, 0, p.every_us, p.tick_us, p.tick_gain, p.round_up) / 1000000.0)
    into v_window_s
    from policies as p
   where p.name     = http_fields.policy collate "C"
     and p.capacity = denial.capacity;
  v_token_s := case when v_reset_s is not null then
                 least(v_retry_s, greatest(1, ceil(v_reset_s / greatest(1, denial.capacity - denial.remaining))))
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
    when v_retry_s is not null then format('Try again in %s seconds.', v_retry_s)
    when cost > denial.capacity then format('A cost of %s never fits a bucket of %s.', cost, denial.capacity)
    else 'The bucket does not refill by itself.'
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
-- Creates a policy, or changes the policy of that name. A null argument keeps the policy's value. A new
-- policy needs capacity, refill and every; stepped is false, durable true, remember 24 hours and shadow false unless given.
--
-- With capacity 0 every cost above 0 is never. With refill 0 a bucket fills only when it is told to, by ratelimit_reset or ratelimit_refund. A shadow policy watches:
-- its buckets move as if it were enforced, but an acquire that it would deny is allowed, takes nothing and is marked
-- shadowed.
--
-- A change applies to the next acquire of every bucket. Levels stay, clamped to the new capacity. The
-- time since a bucket was last written is credited at the new rate. A bucket that clean-up removed while a policy was
-- lowered was full by the lower capacity, and is full by the higher one once the policy is raised again. An override
-- keeps its numbers.
-- Locks:  the policy row, until the caller's transaction ends. Acquires do not wait for it.
-- Writes: policies; overrides, if stepped changes.
create or replace function ratelimit_define_policy(
    policy   text,
    capacity bigint   default null,
    refill   bigint   default null,
    every    interval default null,
    stepped  boolean  default null,
    durable  boolean  default null,
    remember interval default null,
    shadow   boolean  default null)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name    text collate "C" := ratelimit_define_policy.policy;
  v_policy  policies;
  v_id      bigint;
  v_stepped boolean;
  v_durable boolean;
begin
  perform check_name('policy', v_name);
  select p.* into v_policy from policies as p where p.name = v_name for update;  -- the checks combine new numbers with these
  perform check_policy(coalesce(ratelimit_define_policy.capacity, v_policy.capacity),
                       coalesce(ratelimit_define_policy.refill, v_policy.refill),
                       coalesce(ratelimit_define_policy.every, v_policy.every),
                       ratelimit_define_policy.remember);
  insert into policies as p (id, name, capacity, refill, every, stepped, durable, remember, shadow)
  values (hashtextextended(gen_random_uuid()::text, 0),
          v_name,
          coalesce(ratelimit_define_policy.capacity, v_policy.capacity),
          coalesce(ratelimit_define_policy.refill, v_policy.refill),
          coalesce(ratelimit_define_policy.every, v_policy.every),
          coalesce(ratelimit_define_policy.stepped, false),
          coalesce(ratelimit_define_policy.durable, true),
          coalesce(ratelimit_define_policy.remember, interval '24 hours'),
          coalesce(ratelimit_define_policy.shadow, false))
  on conflict on constraint policies_pkey do update
     set capacity = excluded.capacity,
         refill   = excluded.refill,
         every    = excluded.every,
         stepped  = coalesce(ratelimit_define_policy.stepped, p.stepped),
         remember = coalesce(ratelimit_define_policy.remember, p.remember),
         shadow   = coalesce(ratelimit_define_policy.shadow, p.shadow)
  returning p.id, p.stepped, p.durable into v_id, v_stepped, v_durable;

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
comment on function ratelimit_define_policy(text, bigint, bigint, interval, boolean, boolean, interval, boolean) is
  'Create or change a policy: buckets of capacity tokens that gain refill tokens every interval.';

-- Removes a policy with its overrides, buckets and idempotency keys.
--
-- A row that an open transaction has locked is skipped, and left to clean-up. Such a row changes no answer,
-- because a policy defined anew under the same name has another id. SKIP LOCKED can still block if the row
-- changes hands while it is examined, as cleanup.sql says. Here only the caller's lock_timeout ends that wait. So the rows
-- are locked in the order in which requests lock buckets: that a wait never ends in a deadlock.
-- Locks:  the policy row and the rows it deletes, in the order of key, until the caller's transaction ends.
-- Writes: policies; the overrides, buckets and idempotency keys of the policy.
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
  delete from overrides as o where o.policy_id = v_id;
  if v_durable then
    null;  -- Citus: its rows are left to clean-up
    null;  -- Citus: its rows are left to clean-up
  else
    null;  -- Citus: its rows are left to clean-up
    null;  -- Citus: its rows are left to clean-up
  end if;
end;
$$;
comment on function ratelimit_drop_policy(text) is
  'Remove a policy with its overrides, buckets and idempotency keys.';

-- Lists the policies, as defined.
--
-- Locks:  nothing.
-- Writes: nothing.
create or replace function ratelimit_policies()
  returns table (policy text, capacity bigint, refill bigint, every interval,
                 stepped boolean, durable boolean, remember interval, shadow boolean)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select p.name, p.capacity, p.refill, p.every, p.stepped, p.durable, p.remember, p.shadow
    from policies as p
   order by p.name
$$;
comment on function ratelimit_policies() is
  'List the policies, one row each, as defined.';

-- Sets the numbers of one key: the policy's, but for those given. An override replaces an earlier one of the key. It
-- applies from the commit of the caller's transaction on, to calls that begin then. A bucket with a row keeps its level,
-- clamped to the new capacity; a bucket without one is full at the new capacity. So ratelimit_reset in the same
-- transaction starts a new plan full. ratelimit_refund there does not: a call that waits for the bucket by then still clamps it
-- to the older capacity. capacity 0 blocks the key: a cost above 0 never fits.
--
-- From expires_at on the override is as good as absent. stepped, durable, remember and shadow stay the policy's.
--
-- Locks:  the row of the override, and the policy against those who change or drop it, until the caller's transaction ends.
--         The first override of a policy locks the row of the policy; acquires do not wait for it.
-- Writes: overrides; policies by the first override of a policy.
create or replace function ratelimit_override(
    policy     text,
    key        text,
    capacity   bigint      default null,
    refill     bigint      default null,
    every      interval    default null,
    expires_at timestamptz default null)
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
  -- It waits for a session that changes or drops the policy, and keeps others from doing so.
  select p.* into v_policy from policies as p where p.name = ratelimit_override.policy collate "C" for key share;
  if not found then
    perform unknown_policy(policy);
  end if;
  v_capacity := coalesce(ratelimit_override.capacity, v_policy.capacity);
  v_refill   := coalesce(ratelimit_override.refill, v_policy.refill);
  v_every    := coalesce(ratelimit_override.every, v_policy.every);
  perform check_numbers(v_capacity, v_refill, v_every);

  update policies as p set overridden = true where p.id = v_policy.id and not p.overridden;
  insert into overrides as o (policy_id, key, capacity, refill, every, stepped, expires_at)
  values (v_policy.id, v_key, v_capacity, v_refill, v_every, v_policy.stepped, v_expires_at)
  on conflict on constraint overrides_pkey do update
     set capacity   = excluded.capacity,
         refill     = excluded.refill,
         every      = excluded.every,
         stepped    = excluded.stepped,
         expires_at = excluded.expires_at;
end;
$$;
comment on function ratelimit_override(text, text, bigint, bigint, interval, timestamptz) is
  'Give one key of a policy numbers of its own; those not given are the policy''s as of now.';

-- Removes the override of one key, and reports whether there was a live one. The policy's numbers apply from the commit
-- of the caller's transaction on.
--
-- Locks:  the row of the override, until the caller's transaction ends.
-- Writes: overrides.
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
  delete from overrides as o
   where o.policy_id = v_policy.id
     and o.key       = v_key
  returning o.expires_at into v_expires_at;
  return coalesce(v_expires_at > clock(), false);
end;
$$;
comment on function ratelimit_remove_override(text, text) is
  'Remove the override of one key; true if there was one.';

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

-- Lists live overrides, by policy and key: of one policy, or of one key, if given.
--
-- Locks:  nothing.
-- Writes: nothing.
create or replace function ratelimit_overrides(policy text default null, key text default null, max_rows integer default 1000)
  returns table (policy text, key text, capacity bigint, refill bigint, every interval, expires_at timestamptz)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $2, $3);
  select p.name, o.key, o.capacity, o.refill, o.every, nullif(o.expires_at, 'infinity')
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
  'List the live overrides, at most max_rows of them.';


-- Buckets.
-- Takes cost tokens from one bucket if it has them, and answers; a denial is an answer, not an error.
--
-- A repeat under the same idempotency key is the same request answered again, and takes nothing. So the program
-- chooses the idempotency key, one for each operation. If its own clients chose it, a client that repeats one
-- would pass every time.
--
-- The steps, in include/decide.sql. Steps 1 and 4 are for an acquire with an idempotency key. An idempotency key
-- that has not expired is live.
--   1. A live idempotency key is replayed, even when the bucket is empty. If its grant was settled, that is RL004.
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
  v_answer ratelimit.decision;
begin
  if ratelimit_acquire.key is null then
    perform ratelimit.check_name('policy', ratelimit_acquire.policy);
    perform ratelimit.check_name('key', ratelimit_acquire.key);
  end if;
  select d.* into v_answer
    from ratelimit.acquire_here(ratelimit_acquire.policy, ratelimit_acquire.key collate "C", ratelimit_acquire.cost, ratelimit_acquire.idempotency_key) as d;
  return v_answer;
end;
$$;
create or replace function ratelimit.acquire_here(
    policy          text,
    key             text,
    cost            bigint,
    idempotency_key text)
  returns ratelimit.decision
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- a plan made while the table was empty would read all of it once it has grown
as $$
declare
  v_policy          ratelimit.policies;  -- in: the policy, with the numbers that apply to the key
  v_override        ratelimit.overrides;  -- inner: the override of the key
  v_key             text collate "C" := acquire_here.key;  -- in: the bucket's key
  v_cost            alias for acquire_here.cost;  -- in: tokens that the request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; what may wait reads the clock again
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_reset_us        bigint;       -- out: microseconds until the bucket is full; null: never
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
  v_idempotency_key text collate "C" := acquire_here.idempotency_key;  -- in: null for none
  v_first           ratelimit.idempotency_keys;  -- out: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- inner: the instant at which the row says that the bucket held v_level
  v_again           ratelimit.policies;  -- inner: the policy, read again
  v_wanted          bigint;       -- in/out: v_cost in microtokens, or 0 if nothing can be taken
  v_due_at          timestamptz;  -- inner: when clean-up looks at a new bucket
  v_expires_at      timestamptz;  -- inner: when the idempotency key is forgotten
  v_round           integer;      -- inner: the rounds that took nothing and denied nothing; null is none
begin
  if not acceptable(v_key, v_cost) or v_idempotency_key is not null then  -- inlined; the call of check_request raises the error
    if (acceptable(v_key, v_cost) and is_name(v_idempotency_key)) is not true then
      perform check_request(policy, v_key, v_cost, v_idempotency_key);
    end if;
    if v_cost = 0 then
      v_idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  select p.* into v_policy from policies as p where p.name = acquire_here.policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;

  v_now := clock();
  if v_policy.overridden then
    select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
  end if;
  v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
  if v_policy.durable then
    if v_idempotency_key is not null then
      select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          if v_first.ready_at > v_now then
            return replay_at(v_first, v_now, v_policy.shadow);
          end if;
          return replay_of(v_first);
        end if;
    end if;

    loop
      if v_wanted > 0 then
        update buckets as b
           set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      v_now := clock();  -- the update may have waited
      if v_policy.overridden then
        select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      end if;
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
      select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
      v_reset_us := 0;
    end if;

      if v_wanted = 0 or v_retry_us is distinct from 0 then
        if v_idempotency_key is not null or v_policy.shadow then
          select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          if v_first.ready_at > v_now then
            return replay_at(v_first, v_now, v_policy.shadow);
          end if;
          return replay_of(v_first);
        end if;
          if v_policy.shadow and v_retry_us is distinct from 0 then
            return shadow_of(v_level, v_reset_us, v_policy.capacity);
          end if;
        end if;
        return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
      end if;

      -- The bucket has no row, or it is no longer as it was at the update or the look. Without a row, this round makes one,
      -- less the tokens. Otherwise a second round takes them, unless another session changes the bucket in between. Each
      -- further round is due to another session.
      v_round := coalesce(v_round, 0) + 1;
      if v_round = 1000 then
        raise exception 'the bucket changed at every look'
          using errcode = '40001',
                detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                hint    = 'Try again.';
      end if;
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

    v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

    if v_idempotency_key is not null then
      v_expires_at := v_now + duration(v_policy.remember_us);
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
      on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
      if not found then  -- a live idempotency key: its tokens were taken already
        update buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          if v_first.ready_at > v_now then
            return replay_at(v_first, v_now, v_policy.shadow);
          end if;
          return replay_of(v_first);
        end if;
      end if;
    end if;
    return grant_of(v_level, v_reset_us, v_policy.capacity);
  else
    if v_idempotency_key is not null then
      select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          if v_first.ready_at > v_now then
            return replay_at(v_first, v_now, v_policy.shadow);
          end if;
          return replay_of(v_first);
        end if;
    end if;

    loop
      if v_wanted > 0 then
        update ephemeral_buckets as b
           set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      v_now := clock();  -- the update may have waited
      if v_policy.overridden then
        select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      end if;
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
      select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
      v_reset_us := 0;
    end if;

      if v_wanted = 0 or v_retry_us is distinct from 0 then
        if v_idempotency_key is not null or v_policy.shadow then
          select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          if v_first.ready_at > v_now then
            return replay_at(v_first, v_now, v_policy.shadow);
          end if;
          return replay_of(v_first);
        end if;
          if v_policy.shadow and v_retry_us is distinct from 0 then
            return shadow_of(v_level, v_reset_us, v_policy.capacity);
          end if;
        end if;
        return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
      end if;

      -- The bucket has no row, or it is no longer as it was at the update or the look. Without a row, this round makes one,
      -- less the tokens. Otherwise a second round takes them, unless another session changes the bucket in between. Each
      -- further round is due to another session.
      v_round := coalesce(v_round, 0) + 1;
      if v_round = 1000 then
        raise exception 'the bucket changed at every look'
          using errcode = '40001',
                detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                hint    = 'Try again.';
      end if;
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

    v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

    if v_idempotency_key is not null then
      v_expires_at := v_now + duration(v_policy.remember_us);
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
      if not found then  -- a live idempotency key: its tokens were taken already
        update ephemeral_buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          if v_first.ready_at > v_now then
            return replay_at(v_first, v_now, v_policy.shadow);
          end if;
          return replay_of(v_first);
        end if;
      end if;
    end if;
    return grant_of(v_level, v_reset_us, v_policy.capacity);
  end if;
end;
$$;
comment on function ratelimit.acquire_here is
  'What ratelimit_acquire does, on the node that has the shard of the key.';
comment on function ratelimit_acquire(text, text, bigint, text) is
  'Take cost tokens from a bucket if it has them; a repeat under the same idempotency key is the same request answered again, and takes nothing.';

-- Reports the tokens that a bucket holds, and whether an acquire of this cost would be allowed now. Takes nothing.
-- For a shadow policy it answers as if the policy were enforced.
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
  v_answer ratelimit.decision;
begin
  if ratelimit_peek.key is null then
    perform ratelimit.check_name('policy', ratelimit_peek.policy);
    perform ratelimit.check_name('key', ratelimit_peek.key);
  end if;
  select d.* into v_answer
    from ratelimit.peek_here(ratelimit_peek.policy, ratelimit_peek.key collate "C", ratelimit_peek.cost) as d;
  return v_answer;
end;
$$;
create or replace function ratelimit.peek_here(policy text, key text, cost bigint)
  returns ratelimit.decision
  language plpgsql
  stable
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy          ratelimit.policies;  -- in: the policy, with the numbers that apply to the key
  v_override        ratelimit.overrides;  -- inner: the override of the key
  v_key             text collate "C" := peek_here.key;  -- in: the bucket's key
  v_cost            alias for peek_here.cost;  -- in: tokens that the request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; what may wait reads the clock again
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_reset_us        bigint;       -- out: microseconds until the bucket is full; null: never
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
begin
  if not acceptable(v_key, v_cost) then
    perform check_request(policy, v_key, v_cost, null);
  end if;
  v_policy := policy_named(policy);
  v_now    := clock();
  if v_policy.overridden then
    select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
  end if;
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
      v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
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
      v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
      v_reset_us := 0;
    end if;

  end if;
  return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit.peek_here is
  'What ratelimit_peek does, on the node that has the shard of the key.';
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
  v_answer ratelimit.decision;
begin
  if ratelimit_refund.key is null then
    perform ratelimit.check_name('policy', ratelimit_refund.policy);
    perform ratelimit.check_name('key', ratelimit_refund.key);
  end if;
  select d.* into v_answer
    from ratelimit.refund_here(ratelimit_refund.policy, ratelimit_refund.key collate "C", ratelimit_refund.amount) as d;
  return v_answer;
end;
$$;
create or replace function ratelimit.refund_here(policy text, key text, amount bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_key         text collate "C" := refund_here.key;
  v_policy      policies;
  v_override    overrides;
  v_amount      bigint;
  v_now         timestamptz;
  v_level       bigint;
  v_refilled_at timestamptz;
  v_reset_us    bigint;
  v_has_row     boolean;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  perform check_tokens('amount', refund_here.amount);
  v_policy := policy_named(policy);
  v_now    := clock();
  if v_policy.overridden then
    select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
  end if;
  v_amount := least(refund_here.amount, v_policy.capacity);
  if v_policy.durable then
    update buckets as b
       set level       = least(refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
                               microtokens(v_policy.capacity - v_amount)) + microtokens(v_amount),
           refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
           room        = null,
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
           room        = null,
           due_at      = least(b.due_at, v_now)  -- the bucket may be full now: clean-up looks at it in five minutes or later
     where b.policy_id = v_policy.id
       and b.key       = v_key
    returning b.level, b.refilled_at into v_level, v_refilled_at;
    v_has_row := found;
  end if;
  if not v_has_row then
    return answer_of(microtokens(v_policy.capacity), 0, 0, v_policy.capacity);
  end if;
  v_reset_us := wait_for(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
  return answer_of(v_level, 0, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit.refund_here is
  'What ratelimit_refund does, on the node that has the shard of the key.';
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
begin
  if ratelimit_reset.key is null then
    perform ratelimit.check_name('policy', ratelimit_reset.policy);
    perform ratelimit.check_name('key', ratelimit_reset.key);
  end if;
  perform d.* from ratelimit.reset_here(ratelimit_reset.policy, ratelimit_reset.key collate "C") as d;
end;
$$;
create or replace function ratelimit.reset_here(policy text, key text)
  returns void
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_key    text collate "C" := reset_here.key;
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
comment on function ratelimit.reset_here is
  'What ratelimit_reset does, on the node that has the shard of the key.';
comment on function ratelimit_reset(text, text) is
  'Make one bucket full again.';

-- One batch of ratelimit_reset_all: the buckets of the next 1000 keys after the one of the batch before it; the first passes
-- null. more is true if there may be others.
-- Locks:  the bucket rows, in the order of key, until the caller's transaction ends.
-- Writes: the buckets.
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
  if v_policy.durable then
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

-- Makes all buckets of a policy full again, in batches, and commits after each. Idempotency keys and overrides stay. A bucket
-- that is held by another transaction is waited for, as by ratelimit_reset.
--
-- It runs with the caller's rights and search_path, as ratelimit_cleanup_all does: a caller other than the owner needs EXECUTE
-- on this procedure and on ratelimit.reset_batch, and USAGE on schema ratelimit.
create or replace procedure ratelimit_reset_all(policy text)
  language plpgsql
as $$
declare
  v_after text;
  v_more  boolean;
begin
  loop
    select b.after, b.more
      into v_after, v_more
      from ratelimit.reset_batch(ratelimit_reset_all.policy, v_after) as b;
    commit;
    exit when not v_more;
  end loop;
end;
$$;
comment on procedure ratelimit_reset_all(text) is
  'Make all buckets of a policy full again, in short batches, committing between them.';


-- Spend now, know later; wait in line.
-- Takes cost tokens from one bucket, whatever it holds; allowed is always true. What the bucket does not hold is debt:
-- its level goes below zero, down to a floor, and refill pays the debt first. It is for what is known only after it was used.
--
-- The steps are those of ratelimit_settle. A live idempotency key is replayed. Otherwise the bucket is locked, a full one
-- is created first if it has no row, the idempotency key is stored, and only then the level moves. So nothing that was
-- moved is ever moved back. A charge that is cut at the floor remembers what it took, and is settled against that.
--
-- A cost of 0 takes nothing, and neither looks at nor stores an idempotency key.
--
-- Locks:  the bucket row, and then the row of the idempotency key, until the caller's transaction ends. A replay that did
--         not wait locks nothing.
-- Writes: the bucket and its idempotency key. A replay and a cost of 0 write nothing.
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
  v_answer ratelimit.decision;
begin
  if ratelimit_charge.key is null then
    perform ratelimit.check_name('policy', ratelimit_charge.policy);
    perform ratelimit.check_name('key', ratelimit_charge.key);
  end if;
  select d.* into v_answer
    from ratelimit.charge_here(ratelimit_charge.policy, ratelimit_charge.key collate "C", ratelimit_charge.cost, ratelimit_charge.idempotency_key) as d;
  return v_answer;
end;
$$;
create or replace function ratelimit.charge_here(
    policy          text,
    key             text,
    cost            bigint,
    idempotency_key text)
  returns ratelimit.decision
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy          ratelimit.policies;  -- in: the policy, with the numbers that apply to the key
  v_override        ratelimit.overrides;  -- inner: the override of the key
  v_key             text collate "C" := charge_here.key;  -- in: the bucket's key
  v_cost            alias for charge_here.cost;  -- in: tokens that the request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; what may wait reads the clock again
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_reset_us        bigint;       -- out: microseconds until the bucket is full; null: never
  v_idempotency_key text collate "C" := charge_here.idempotency_key;  -- in: null for none
  v_first           ratelimit.idempotency_keys;  -- out: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- inner: the instant at which the row says that the bucket held v_level
  v_again           ratelimit.policies;  -- inner: the policy, read again
  v_held            bigint;       -- out: what the bucket held before the change
  v_expires_at      timestamptz;  -- when the idempotency key is forgotten
begin
  if (acceptable(v_key, v_cost) and v_cost <= 9000000000000 and is_name(v_idempotency_key) is not false) is not true then
    perform check_charge(policy, v_key, v_cost, v_idempotency_key);
  end if;
  select p.* into v_policy from policies as p where p.name = charge_here.policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;

  v_now := clock();
  if v_policy.overridden then
    select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
  end if;
  if v_policy.durable then
    if v_cost = 0 then
      select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_reset_us := 0;
    end if;

      return spent_of(v_level, v_reset_us, v_policy.capacity, false);
    end if;
    loop
      if v_idempotency_key is not null then
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          perform check_repeated_cost(v_first, v_cost);
          return replay_of(v_first);
        end if;
      end if;
      loop
      select b.level, b.refilled_at into v_level, v_refilled_at
        from buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key
         for update;
      v_has_row := found;
      v_now     := clock();
      if v_policy.overridden or not v_has_row then
        select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
      end if;
      end if;
      exit when v_has_row;
      v_level       := microtokens(v_policy.capacity);
      v_refilled_at := v_now;
      insert into buckets (policy_id, key, level, refilled_at, due_at)
      values (v_policy.id, v_key, v_level, v_refilled_at, v_now)
      on conflict on constraint buckets_pkey do nothing;
      v_has_row := found;
      exit when v_has_row;
    end loop;
      v_held        := refilled_level(v_level, v_refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick);
      v_level       := moved_level(v_held, -microtokens(v_cost), v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
      v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
      v_reset_us    := wait_for(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
      exit when v_idempotency_key is null;
      v_expires_at := v_now + duration(v_policy.remember_us);
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, taken, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost, nullif(v_held - v_level, microtokens(v_cost)),
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
      on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
      exit when found;
      -- A live idempotency key: the session that held the bucket has stored it.
    end loop;
    update buckets as b
         set level = v_level, refilled_at = v_refilled_at, room = null
       where b.policy_id = v_policy.id
         and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  else
    if v_cost = 0 then
      select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_reset_us := 0;
    end if;

      return spent_of(v_level, v_reset_us, v_policy.capacity, false);
    end if;
    loop
      if v_idempotency_key is not null then
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          perform check_repeated_cost(v_first, v_cost);
          return replay_of(v_first);
        end if;
      end if;
      loop
      select b.level, b.refilled_at into v_level, v_refilled_at
        from ephemeral_buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key
         for update;
      v_has_row := found;
      v_now     := clock();
      if v_policy.overridden or not v_has_row then
        select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
      end if;
      end if;
      exit when v_has_row;
      v_level       := microtokens(v_policy.capacity);
      v_refilled_at := v_now;
      insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
      values (v_policy.id, v_key, v_level, v_refilled_at, v_now)
      on conflict on constraint ephemeral_buckets_pkey do nothing;
      v_has_row := found;
      exit when v_has_row;
    end loop;
      v_held        := refilled_level(v_level, v_refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick);
      v_level       := moved_level(v_held, -microtokens(v_cost), v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
      v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
      v_reset_us    := wait_for(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
      exit when v_idempotency_key is null;
      v_expires_at := v_now + duration(v_policy.remember_us);
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, taken, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost, nullif(v_held - v_level, microtokens(v_cost)),
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
      exit when found;
      -- A live idempotency key: the session that held the bucket has stored it.
    end loop;
    update ephemeral_buckets as b
         set level = v_level, refilled_at = v_refilled_at, room = null
       where b.policy_id = v_policy.id
         and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  end if;
end;
$$;
comment on function ratelimit.charge_here is
  'What ratelimit_charge does, on the node that has the shard of the key.';
comment on function ratelimit_charge(text, text, bigint, text) is
  'Take cost tokens from a bucket whatever it holds, into debt if need be.';

-- Replaces the cost of a grant by the real one, exactly once. The grant was made under idempotency_key, by any function that
-- takes one: its cost was an estimate. The level moves by estimate - cost: up to full at most, and below zero without
-- refusal, down to the floor of debt. The answer is the bucket as it is after that.
--
-- The first settlement wins. A repeat with the same cost is answered with replayed, and changes nothing; with another cost
-- it is RL002. Without a live grant under the key it is RL003, also while the grant is not committed. A shadow policy that
-- does not know the key charges nothing, and answers with shadowed. A request that is repeated under its key after
-- that is RL004, because its operation is over; a charge is replayed.
--
-- The steps:
--   1. The grant is read.
--   2. The bucket is locked. One without a row is full, and is created first, unless the settlement only gives back: it
--      stays full, so the grant alone is written.
--   3. The grant is marked as settled. If it is no longer as it was read, step 1 follows.
--   4. The level moves. So no move is ever taken back; one that was cut at full could not be.
--
-- Locks:  the bucket row, and then the row of the idempotency key, until the caller's transaction ends. A replay that did
--         not wait locks nothing.
-- Writes: the bucket and its idempotency key. A replay writes nothing.
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
  v_answer ratelimit.decision;
begin
  if ratelimit_settle.key is null then
    perform ratelimit.check_name('policy', ratelimit_settle.policy);
    perform ratelimit.check_name('key', ratelimit_settle.key);
  end if;
  select d.* into v_answer
    from ratelimit.settle_here(ratelimit_settle.policy, ratelimit_settle.key collate "C", ratelimit_settle.idempotency_key, ratelimit_settle.cost) as d;
  return v_answer;
end;
$$;
create or replace function ratelimit.settle_here(
    policy          text,
    key             text,
    idempotency_key text,
    cost            bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy          ratelimit.policies;  -- in: the policy, with the numbers that apply to the key
  v_override        ratelimit.overrides;  -- inner: the override of the key
  v_key             text collate "C" := settle_here.key;  -- in: the bucket's key
  v_cost            alias for settle_here.cost;  -- in: tokens that the request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; what may wait reads the clock again
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_reset_us        bigint;       -- out: microseconds until the bucket is full; null: never
  v_idempotency_key text collate "C" := settle_here.idempotency_key;  -- in: null for none
  v_first           ratelimit.idempotency_keys;  -- out: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- inner: the instant at which the row says that the bucket held v_level
  v_again           ratelimit.policies;  -- inner: the policy, read again
  v_held            bigint;       -- out: what the bucket held before the change
begin
  if (acceptable(v_key, v_cost) and v_cost <= 9000000000000 and is_name(v_idempotency_key)) is not true then
    perform check_charge(policy, v_key, v_cost, v_idempotency_key);
    perform check_name('idempotency_key', v_idempotency_key);
  end if;
  select p.* into v_policy from policies as p where p.name = settle_here.policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;

  v_now := clock();
  if v_policy.overridden then
    select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
  end if;
  if v_policy.durable then
    loop
      select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
      if (v_first.expires_at > v_now) is not true then
        if not v_policy.shadow then
          perform no_grant(v_policy.name, v_idempotency_key);
        end if;
        -- The bucket may have been read after a grant that was not there yet.
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_reset_us := 0;
    end if;

        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if (v_first.expires_at > v_now) is not true then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
      end if;
      if v_first.settled is not null then
        if v_first.settled <> v_cost then
          perform another_cost(format('%L was settled with cost %s and comes back with cost %s.', v_idempotency_key, v_first.settled, v_cost));
        end if;
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_reset_us := 0;
    end if;

        return spent_of(v_level, v_reset_us, v_policy.capacity, true);
      end if;

      loop
      select b.level, b.refilled_at into v_level, v_refilled_at
        from buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key
         for update;
      v_has_row := found;
      v_now     := clock();
      if v_policy.overridden or not v_has_row then
        select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
      end if;
      end if;
      exit when v_has_row or microtokens(v_cost) <= coalesce(v_first.taken, microtokens(v_first.cost));
      v_level       := microtokens(v_policy.capacity);
      v_refilled_at := v_now;
      insert into buckets (policy_id, key, level, refilled_at, due_at)
      values (v_policy.id, v_key, v_level, v_refilled_at, v_now)
      on conflict on constraint buckets_pkey do nothing;
      v_has_row := found;
      exit when v_has_row;
    end loop;
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
    if not v_has_row then
      return spent_of(microtokens(v_policy.capacity), 0, v_policy.capacity, false);
    end if;
    v_held        := refilled_level(v_level, v_refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick);
      v_level       := moved_level(v_held, coalesce(v_first.taken, microtokens(v_first.cost)) - microtokens(v_cost), v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
      v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
      v_reset_us    := wait_for(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
    update buckets as b
         set level = v_level, refilled_at = v_refilled_at, room = null
       where b.policy_id = v_policy.id
         and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  else
    loop
      select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
      if (v_first.expires_at > v_now) is not true then
        if not v_policy.shadow then
          perform no_grant(v_policy.name, v_idempotency_key);
        end if;
        -- The bucket may have been read after a grant that was not there yet.
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_reset_us := 0;
    end if;

        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if (v_first.expires_at > v_now) is not true then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
      end if;
      if v_first.settled is not null then
        if v_first.settled <> v_cost then
          perform another_cost(format('%L was settled with cost %s and comes back with cost %s.', v_idempotency_key, v_first.settled, v_cost));
        end if;
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_reset_us := 0;
    end if;

        return spent_of(v_level, v_reset_us, v_policy.capacity, true);
      end if;

      loop
      select b.level, b.refilled_at into v_level, v_refilled_at
        from ephemeral_buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key
         for update;
      v_has_row := found;
      v_now     := clock();
      if v_policy.overridden or not v_has_row then
        select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
      end if;
      end if;
      exit when v_has_row or microtokens(v_cost) <= coalesce(v_first.taken, microtokens(v_first.cost));
      v_level       := microtokens(v_policy.capacity);
      v_refilled_at := v_now;
      insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
      values (v_policy.id, v_key, v_level, v_refilled_at, v_now)
      on conflict on constraint ephemeral_buckets_pkey do nothing;
      v_has_row := found;
      exit when v_has_row;
    end loop;
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
    if not v_has_row then
      return spent_of(microtokens(v_policy.capacity), 0, v_policy.capacity, false);
    end if;
    v_held        := refilled_level(v_level, v_refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick);
      v_level       := moved_level(v_held, coalesce(v_first.taken, microtokens(v_first.cost)) - microtokens(v_cost), v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
      v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
      v_reset_us    := wait_for(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
    update ephemeral_buckets as b
         set level = v_level, refilled_at = v_refilled_at, room = null
       where b.policy_id = v_policy.id
         and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  end if;
end;
$$;
comment on function ratelimit.settle_here is
  'What ratelimit_settle does, on the node that has the shard of the key.';
comment on function ratelimit_settle(text, text, text, bigint) is
  'Replace the cost of a grant made under an idempotency key by the real one, exactly once.';

-- Takes cost tokens from one bucket now, if it will have them within max_wait, and says how long to wait before acting.
-- What is not there yet is debt, which refill pays. So callers are served in order: each waits for its own tokens and for
-- those before it, and ratelimit_acquire is denied while there is debt. With max_wait 0 it is ratelimit_acquire.
--
-- The wait is until the debt is paid that the reservation leaves: then the level is 0 or more, and a microsecond earlier it
-- is not. If the wait is longer than max_wait, or the debt would go below its floor, nothing is taken, allowed is false, and wait
-- says how long it would have been; null means never. A shadow policy answers wait 0, and shadowed where enforcing it would
-- wait or refuse.
--
-- The grant is remembered until the policy's remember after its wait is over. A repeat has the rest of the wait. Until then
-- ratelimit_acquire under its key answers a denial. Tokens that are given back, by ratelimit_settle or ratelimit_refund, do
-- not shorten the wait of those who were promised theirs.
--
-- The steps are those of ratelimit_acquire, in include/decide.sql, but for two. The update takes the tokens if the bucket will
-- have them within max_wait; it leaves that open if it is a matter of the last microtoken. So if the bucket was read, and the
-- cost fits, the tokens are taken from the bucket as it was read. If another session has changed it since, the next round
-- follows.
--
-- The wait counts from the clock after the update, which may have waited for another session. Other times count as those of
-- ratelimit_acquire.
--
-- A cost of 0 takes nothing, and neither looks at nor stores an idempotency key.
--
-- Locks:  a grant holds the bucket row, and then the row of the idempotency key, until the caller's transaction ends. A
--         refusal and a replay hold the bucket row only if they had to wait for it.
-- Writes: a grant writes the bucket and its idempotency key. A refusal, a replay and a cost of 0 write nothing.
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
  v_answer ratelimit.reservation;
begin
  if ratelimit_reserve.key is null then
    perform ratelimit.check_name('policy', ratelimit_reserve.policy);
    perform ratelimit.check_name('key', ratelimit_reserve.key);
  end if;
  if ratelimit.is_max_wait(max_wait) is not true then
    perform ratelimit.check_request(policy, key, cost, idempotency_key);
    perform ratelimit.check_max_wait(max_wait);
  end if;
  select d.* into v_answer
    from ratelimit.reserve_here(ratelimit_reserve.policy, ratelimit_reserve.key collate "C", ratelimit_reserve.max_wait, ratelimit_reserve.cost, ratelimit_reserve.idempotency_key) as d;
  return v_answer;
end;
$$;
create or replace function ratelimit.reserve_here(
    policy          text,
    key             text,
    max_wait        interval,
    cost            bigint,
    idempotency_key text)
  returns ratelimit.reservation
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy          ratelimit.policies;  -- in: the policy, with the numbers that apply to the key
  v_override        ratelimit.overrides;  -- inner: the override of the key
  v_key             text collate "C" := reserve_here.key;  -- in: the bucket's key
  v_cost            alias for reserve_here.cost;  -- in: tokens that the request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; what may wait reads the clock again
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_reset_us        bigint;       -- out: microseconds until the bucket is full; null: never
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
  v_idempotency_key text collate "C" := reserve_here.idempotency_key;  -- in: null for none
  v_first           ratelimit.idempotency_keys;  -- out: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- inner: the instant at which the row says that the bucket held v_level
  v_again           ratelimit.policies;  -- inner: the policy, read again
  v_wanted          bigint;       -- in/out: v_cost in microtokens, or 0 if nothing can be taken
  v_due_at          timestamptz;  -- inner: when clean-up looks at a new bucket
  v_expires_at      timestamptz;  -- inner: when the idempotency key is forgotten
  v_round           integer;      -- inner: the rounds that took nothing and denied nothing; null is none
  v_seen_level      bigint;       -- inner: the row as it was read
  v_seen_at         timestamptz;  -- inner: likewise
  v_until           timestamptz;  -- when the wait must be over
  v_ready_at        timestamptz;  -- when it holds; null: at once
begin
  if not acceptable(v_key, v_cost) or is_max_wait(max_wait) is not true or v_idempotency_key is not null then
    if (acceptable(v_key, v_cost) and is_max_wait(max_wait) and is_name(v_idempotency_key) is not false) is not true then
      perform check_request(policy, v_key, v_cost, v_idempotency_key);
      perform check_max_wait(max_wait);
    end if;
    if v_cost = 0 then
      v_idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  select p.* into v_policy from policies as p where p.name = reserve_here.policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;

  v_now := clock();
  if v_policy.overridden then
    select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
  end if;
  v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
  if v_policy.durable then
    if v_idempotency_key is not null then
      select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          return reserved_before(v_first, v_now, v_policy.shadow);
        end if;
    end if;

    loop
      if v_wanted > 0 then
        v_until := v_now + date_part('epoch', max_wait) * interval '1 second';
        update buckets as b
           set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled_level(b.level - 1, b.refilled_at, v_until, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
           and b.level    >= v_wanted - deepest_debt()
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      v_now := clock();  -- the update may have waited
      if v_policy.overridden then
        select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      end if;
      select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up),
           b.level, b.refilled_at
      into v_level, v_reset_us, v_seen_level, v_seen_at
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      v_level    := microtokens(v_policy.capacity);
      v_reset_us := 0;
    end if;

      v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
      v_retry_us    := case
                         when v_cost = 0 then 0::bigint
                         when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), v_level, v_refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
                       end;
      if v_wanted = 0 or (v_retry_us <= microseconds(max_wait)
                          and (v_retry_us = 0 or v_level::numeric - v_wanted >= floor_level(v_policy.gain, v_policy.every_us))) is not true then
        if v_idempotency_key is not null or v_policy.shadow then
          select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          return reserved_before(v_first, v_now, v_policy.shadow);
        end if;
        end if;
        return reservation_of(v_cost = 0, v_level, v_retry_us, v_reset_us, v_policy.capacity, v_policy.shadow);
      end if;

      -- The tokens are taken from the bucket as it was read, and only if it is still as it was.
      if v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
        update buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- The bucket has no row, or it is no longer as it was at the update or the look. Without a row, this round makes one,
      -- less the tokens. Otherwise a second round takes them, unless another session changes the bucket in between. Each
      -- further round is due to another session.
      v_round := coalesce(v_round, 0) + 1;
      if v_round = 1000 then
        raise exception 'the bucket changed at every look'
          using errcode = '40001',
                detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                hint    = 'Try again.';
      end if;
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

    v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

    if v_idempotency_key is not null then
      v_expires_at := v_now + duration(v_policy.remember_us);
      if v_level < 0 then
        v_ready_at   := v_refilled_at + duration(time_below(0, v_level, 0, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)::bigint);
        v_expires_at := v_ready_at + duration(v_policy.remember_us);
      end if;
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, ready_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at, v_ready_at)
      on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
      if not found then  -- a live idempotency key: its tokens were taken already
        update buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          return reserved_before(v_first, v_now, v_policy.shadow);
        end if;
      end if;
    end if;
    if v_level < 0 then
      return waiting_of(v_level,
                        greatest(0, time_below(0, v_level, microseconds(clock() - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up))::double precision,
                        v_reset_us, v_policy.capacity, v_policy.shadow);
    end if;
    return reserved_of(v_level, v_reset_us, v_policy.capacity);
  else
    if v_idempotency_key is not null then
      select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          return reserved_before(v_first, v_now, v_policy.shadow);
        end if;
    end if;

    loop
      if v_wanted > 0 then
        v_until := v_now + date_part('epoch', max_wait) * interval '1 second';
        update ephemeral_buckets as b
           set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled_level(b.level - 1, b.refilled_at, v_until, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
           and b.level    >= v_wanted - deepest_debt()
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      v_now := clock();  -- the update may have waited
      if v_policy.overridden then
        select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      end if;
      select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up),
           b.level, b.refilled_at
      into v_level, v_reset_us, v_seen_level, v_seen_at
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      v_level    := microtokens(v_policy.capacity);
      v_reset_us := 0;
    end if;

      v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
      v_retry_us    := case
                         when v_cost = 0 then 0::bigint
                         when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), v_level, v_refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
                       end;
      if v_wanted = 0 or (v_retry_us <= microseconds(max_wait)
                          and (v_retry_us = 0 or v_level::numeric - v_wanted >= floor_level(v_policy.gain, v_policy.every_us))) is not true then
        if v_idempotency_key is not null or v_policy.shadow then
          select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          return reserved_before(v_first, v_now, v_policy.shadow);
        end if;
        end if;
        return reservation_of(v_cost = 0, v_level, v_retry_us, v_reset_us, v_policy.capacity, v_policy.shadow);
      end if;

      -- The tokens are taken from the bucket as it was read, and only if it is still as it was.
      if v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
        update ephemeral_buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- The bucket has no row, or it is no longer as it was at the update or the look. Without a row, this round makes one,
      -- less the tokens. Otherwise a second round takes them, unless another session changes the bucket in between. Each
      -- further round is due to another session.
      v_round := coalesce(v_round, 0) + 1;
      if v_round = 1000 then
        raise exception 'the bucket changed at every look'
          using errcode = '40001',
                detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                hint    = 'Try again.';
      end if;
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

    v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

    if v_idempotency_key is not null then
      v_expires_at := v_now + duration(v_policy.remember_us);
      if v_level < 0 then
        v_ready_at   := v_refilled_at + duration(time_below(0, v_level, 0, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)::bigint);
        v_expires_at := v_ready_at + duration(v_policy.remember_us);
      end if;
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, ready_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at, v_ready_at)
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
      if not found then  -- a live idempotency key: its tokens were taken already
        update ephemeral_buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost <> v_cost or (v_first).settled is not null then
            perform check_repeated_cost(v_first, v_cost);
            perform already_settled(v_first);
          end if;
          return reserved_before(v_first, v_now, v_policy.shadow);
        end if;
      end if;
    end if;
    if v_level < 0 then
      return waiting_of(v_level,
                        greatest(0, time_below(0, v_level, microseconds(clock() - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up))::double precision,
                        v_reset_us, v_policy.capacity, v_policy.shadow);
    end if;
    return reserved_of(v_level, v_reset_us, v_policy.capacity);
  end if;
end;
$$;
comment on function ratelimit.reserve_here is
  'What ratelimit_reserve does, on the node that has the shard of the key.';
comment on function ratelimit_reserve(text, text, interval, bigint, text) is
  'Take cost tokens from a bucket that will have them within max_wait, and say how long to wait for them.';

-- Takes as many whole tokens as one bucket has, at_most, and says how many it took. If it has fewer than at_least, it takes
-- none: that is a denial, whose retry_after is the time until at_least are there.
--
-- The grant is remembered under the idempotency key with what was taken, and ratelimit_acquire knows it as a grant of that
-- cost. A repeat takes nothing, and answers the same taken; if that is not between its own at_least and at_most, it is RL002.
-- A shadow policy answers at_most for every grant, though it takes what enforcing it would.
--
-- The steps are those of ratelimit_acquire for at_most tokens, in include/decide.sql, but for one: if the update took nothing and
-- the bucket was read, and it has at_least, all its whole tokens are taken, from the bucket as it was read. If another session
-- has changed it since, the next round reads it again. So taken is what the locked row had.
--
-- Locks:  a grant holds the bucket row, and then the row of the idempotency key, until the caller's transaction ends. A denial
--         and a replay hold the bucket row only if they had to wait for it.
-- Writes: a grant writes the bucket and its idempotency key. A denial and a replay write nothing.
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
  v_answer ratelimit.partial_decision;
begin
  if ratelimit_acquire_up_to.key is null then
    perform ratelimit.check_name('policy', ratelimit_acquire_up_to.policy);
    perform ratelimit.check_name('key', ratelimit_acquire_up_to.key);
  end if;
  select d.* into v_answer
    from ratelimit.acquire_up_to_here(ratelimit_acquire_up_to.policy, ratelimit_acquire_up_to.key collate "C", ratelimit_acquire_up_to.at_most, ratelimit_acquire_up_to.at_least, ratelimit_acquire_up_to.idempotency_key) as d;
  return v_answer;
end;
$$;
create or replace function ratelimit.acquire_up_to_here(
    policy          text,
    key             text,
    at_most         bigint,
    at_least        bigint,
    idempotency_key text)
  returns ratelimit.partial_decision
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy          ratelimit.policies;  -- in: the policy, with the numbers that apply to the key
  v_override        ratelimit.overrides;  -- inner: the override of the key
  v_key             text collate "C" := acquire_up_to_here.key;  -- in: the bucket's key
  v_cost            alias for acquire_up_to_here.at_least;  -- in: tokens that the request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; what may wait reads the clock again
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_reset_us        bigint;       -- out: microseconds until the bucket is full; null: never
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
  v_idempotency_key text collate "C" := acquire_up_to_here.idempotency_key;  -- in: null for none
  v_first           ratelimit.idempotency_keys;  -- out: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- inner: the instant at which the row says that the bucket held v_level
  v_again           ratelimit.policies;  -- inner: the policy, read again
  v_wanted          bigint;       -- in/out: v_cost in microtokens, or 0 if nothing can be taken
  v_due_at          timestamptz;  -- inner: when clean-up looks at a new bucket
  v_expires_at      timestamptz;  -- inner: when the idempotency key is forgotten
  v_round           integer;      -- inner: the rounds that took nothing and denied nothing; null is none
  v_seen_level      bigint;       -- inner: the row as it was read
  v_seen_at         timestamptz;  -- inner: likewise
  v_at_most         alias for acquire_up_to_here.at_most;
  v_granted         bigint := v_at_most;  -- the tokens to take
  v_answer          ratelimit.decision;   -- the answer without them
begin
  if (is_name(v_key) and v_cost between 1 and v_at_most and is_name(v_idempotency_key) is not false) is not true then
    perform check_request(policy, v_key, 0, v_idempotency_key);
    perform check_bounds(v_at_most, v_cost);
  end if;
  select p.* into v_policy from policies as p where p.name = acquire_up_to_here.policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;

  v_now := clock();
  if v_policy.overridden then
    select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
  end if;
  v_wanted := case when v_at_most <= v_policy.capacity then microtokens(v_at_most) else 0 end;
  if v_policy.durable then
    if v_idempotency_key is not null then
      select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost not between v_cost and v_at_most or (v_first).settled is not null then
            perform check_repeated_range(v_first, v_cost, v_at_most);
            perform already_settled(v_first);
          end if;
          v_answer := replay_at(v_first, v_now, v_policy.shadow);
          return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_first.cost end);
        end if;
    end if;

    loop
      if v_wanted > 0 and v_round is null then
        update buckets as b
           set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      v_now := clock();  -- the update may have waited
      if v_policy.overridden then
        select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      end if;
      select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up),
           b.level, b.refilled_at
      into v_level, v_retry_us, v_reset_us, v_seen_level, v_seen_at
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
      v_reset_us := 0;
    end if;

      if v_retry_us is distinct from 0 then
        if v_idempotency_key is not null or v_policy.shadow then
          select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost not between v_cost and v_at_most or (v_first).settled is not null then
            perform check_repeated_range(v_first, v_cost, v_at_most);
            perform already_settled(v_first);
          end if;
          v_answer := replay_at(v_first, v_now, v_policy.shadow);
          return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_first.cost end);
        end if;
          if v_policy.shadow then
            v_answer := shadow_of(v_level, v_reset_us, v_policy.capacity);
            return partial_of(v_answer, v_at_most);
          end if;
        end if;
        v_answer := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        return partial_of(v_answer, 0);
      end if;

      -- The tokens are taken from the bucket as it was read, and only if it is still as it was.
      v_granted := least(v_at_most, whole_tokens(v_level));
      v_wanted  := microtokens(v_granted);
      if v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
        update buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- The bucket has no row, or it is no longer as it was at the update or the look. Without a row, this round makes one,
      -- less the tokens. Otherwise a second round takes them, unless another session changes the bucket in between. Each
      -- further round is due to another session.
      v_round := coalesce(v_round, 0) + 1;
      if v_round = 1000 then
        raise exception 'the bucket changed at every look'
          using errcode = '40001',
                detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                hint    = 'Try again.';
      end if;
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

    v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

    if v_idempotency_key is not null then
      v_expires_at := v_now + duration(v_policy.remember_us);
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_granted,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
      on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
      if not found then  -- a live idempotency key: its tokens were taken already
        update buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost not between v_cost and v_at_most or (v_first).settled is not null then
            perform check_repeated_range(v_first, v_cost, v_at_most);
            perform already_settled(v_first);
          end if;
          v_answer := replay_at(v_first, v_now, v_policy.shadow);
          return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_first.cost end);
        end if;
      end if;
    end if;
    v_answer := grant_of(v_level, v_reset_us, v_policy.capacity);
    return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_granted end);
  else
    if v_idempotency_key is not null then
      select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost not between v_cost and v_at_most or (v_first).settled is not null then
            perform check_repeated_range(v_first, v_cost, v_at_most);
            perform already_settled(v_first);
          end if;
          v_answer := replay_at(v_first, v_now, v_policy.shadow);
          return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_first.cost end);
        end if;
    end if;

    loop
      if v_wanted > 0 and v_round is null then
        update ephemeral_buckets as b
           set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      v_now := clock();  -- the update may have waited
      if v_policy.overridden then
        select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      end if;
      select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up),
           b.level, b.refilled_at
      into v_level, v_retry_us, v_reset_us, v_seen_level, v_seen_at
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
      v_reset_us := 0;
    end if;

      if v_retry_us is distinct from 0 then
        if v_idempotency_key is not null or v_policy.shadow then
          select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost not between v_cost and v_at_most or (v_first).settled is not null then
            perform check_repeated_range(v_first, v_cost, v_at_most);
            perform already_settled(v_first);
          end if;
          v_answer := replay_at(v_first, v_now, v_policy.shadow);
          return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_first.cost end);
        end if;
          if v_policy.shadow then
            v_answer := shadow_of(v_level, v_reset_us, v_policy.capacity);
            return partial_of(v_answer, v_at_most);
          end if;
        end if;
        v_answer := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        return partial_of(v_answer, 0);
      end if;

      -- The tokens are taken from the bucket as it was read, and only if it is still as it was.
      v_granted := least(v_at_most, whole_tokens(v_level));
      v_wanted  := microtokens(v_granted);
      if v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
        update ephemeral_buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- The bucket has no row, or it is no longer as it was at the update or the look. Without a row, this round makes one,
      -- less the tokens. Otherwise a second round takes them, unless another session changes the bucket in between. Each
      -- further round is due to another session.
      v_round := coalesce(v_round, 0) + 1;
      if v_round = 1000 then
        raise exception 'the bucket changed at every look'
          using errcode = '40001',
                detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                hint    = 'Try again.';
      end if;
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

    v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

    if v_idempotency_key is not null then
      v_expires_at := v_now + duration(v_policy.remember_us);
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_granted,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
      if not found then  -- a live idempotency key: its tokens were taken already
        update ephemeral_buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if (v_first).cost not between v_cost and v_at_most or (v_first).settled is not null then
            perform check_repeated_range(v_first, v_cost, v_at_most);
            perform already_settled(v_first);
          end if;
          v_answer := replay_at(v_first, v_now, v_policy.shadow);
          return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_first.cost end);
        end if;
      end if;
    end if;
    v_answer := grant_of(v_level, v_reset_us, v_policy.capacity);
    return partial_of(v_answer, case when v_policy.shadow then v_at_most else v_granted end);
  end if;
end;
$$;
comment on function ratelimit.acquire_up_to_here is
  'What ratelimit_acquire_up_to does, on the node that has the shard of the key.';
comment on function ratelimit_acquire_up_to(text, text, bigint, bigint, text) is
  'Take as many tokens as a bucket has, at_most, or none if it has fewer than at_least.';


-- Many requests, or many buckets, in one call.
-- Stores the idempotency keys of a batch, of durable or of ephemeral policies.
--
-- The caller holds the bucket rows of these elements, so no other session is at the same keys. Element n of keys,
-- idempotency_keys and costs is element n of the batch; places are the elements that were granted, and the arrays after it
-- are parallel to it. policy_ids and remember_us are those by which they were decided. ephemeral tells the kind of all.
--
-- new is the guess that no row has any of these keys. If one does, live or expired, unique_violation is raised. ON CONFLICT
-- costs more, because it looks before it inserts, and confirms after it.
--
-- Locks:  the rows that it writes.
-- Writes: the idempotency keys, an expired one over the old row.
create or replace function ratelimit.remember(
    keys text[], idempotency_keys text[], costs bigint[], now timestamptz, ephemeral boolean, new boolean,
    places bigint[], policy_ids bigint[], remember_us bigint[], remaining bigint[], capacities bigint[], reset_us bigint[])
  returns boolean
  language plpgsql
  volatile
as $$
declare
  v_now    alias for remember.now;
  v_stored bigint;
begin
  if new and ephemeral then
    declare
      v_here        text collate "C";
      v_named       text collate "C";
      v_cost        bigint;
      v_remaining   bigint;
      v_capacity    bigint;
      v_policy_id   bigint;
      v_reset_after interval;
      v_expires_at  timestamptz;
    begin
      v_stored := 0;
      for v_n in 1..cardinality(places) loop
        v_named := idempotency_keys[places[v_n]];
        continue when is_name(v_named) is not true;
        v_here        := keys[places[v_n]];
        v_cost        := costs[places[v_n]];
        v_policy_id   := policy_ids[v_n];
        v_remaining   := remember.remaining[v_n];
        v_capacity    := capacities[v_n];
        v_reset_after := duration(reset_us[v_n]);
        v_expires_at  := v_now + duration(remember.remember_us[v_n]);
        insert into ephemeral_idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy_id, v_here, v_named, v_cost, v_remaining, v_reset_after, v_capacity, v_expires_at)
        on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
        v_stored := v_stored + found::integer;
      end loop;
      perform from generate_series(1, v_stored);  -- row_count is read next
    end;
  elsif new then
    declare
      v_here        text collate "C";
      v_named       text collate "C";
      v_cost        bigint;
      v_remaining   bigint;
      v_capacity    bigint;
      v_policy_id   bigint;
      v_reset_after interval;
      v_expires_at  timestamptz;
    begin
      v_stored := 0;
      for v_n in 1..cardinality(places) loop
        v_named := idempotency_keys[places[v_n]];
        continue when is_name(v_named) is not true;
        v_here        := keys[places[v_n]];
        v_cost        := costs[places[v_n]];
        v_policy_id   := policy_ids[v_n];
        v_remaining   := remember.remaining[v_n];
        v_capacity    := capacities[v_n];
        v_reset_after := duration(reset_us[v_n]);
        v_expires_at  := v_now + duration(remember.remember_us[v_n]);
        insert into idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy_id, v_here, v_named, v_cost, v_remaining, v_reset_after, v_capacity, v_expires_at)
        on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
        v_stored := v_stored + found::integer;
      end loop;
      perform from generate_series(1, v_stored);  -- row_count is read next
    end;
  elsif ephemeral then
    declare
      v_here        text collate "C";
      v_named       text collate "C";
      v_cost        bigint;
      v_remaining   bigint;
      v_capacity    bigint;
      v_policy_id   bigint;
      v_reset_after interval;
      v_expires_at  timestamptz;
    begin
      v_stored := 0;
      for v_n in 1..cardinality(places) loop
        v_named := idempotency_keys[places[v_n]];
        continue when is_name(v_named) is not true;
        v_here        := keys[places[v_n]];
        v_cost        := costs[places[v_n]];
        v_policy_id   := policy_ids[v_n];
        v_remaining   := remember.remaining[v_n];
        v_capacity    := capacities[v_n];
        v_reset_after := duration(reset_us[v_n]);
        v_expires_at  := v_now + duration(remember.remember_us[v_n]);
        insert into ephemeral_idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy_id, v_here, v_named, v_cost, v_remaining, v_reset_after, v_capacity, v_expires_at)
        on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
        v_stored := v_stored + found::integer;
      end loop;
      perform from generate_series(1, v_stored);  -- row_count is read next
    end;
  else
    declare
      v_here        text collate "C";
      v_named       text collate "C";
      v_cost        bigint;
      v_remaining   bigint;
      v_capacity    bigint;
      v_policy_id   bigint;
      v_reset_after interval;
      v_expires_at  timestamptz;
    begin
      v_stored := 0;
      for v_n in 1..cardinality(places) loop
        v_named := idempotency_keys[places[v_n]];
        continue when is_name(v_named) is not true;
        v_here        := keys[places[v_n]];
        v_cost        := costs[places[v_n]];
        v_policy_id   := policy_ids[v_n];
        v_remaining   := remember.remaining[v_n];
        v_capacity    := capacities[v_n];
        v_reset_after := duration(reset_us[v_n]);
        v_expires_at  := v_now + duration(remember.remember_us[v_n]);
        insert into idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy_id, v_here, v_named, v_cost, v_remaining, v_reset_after, v_capacity, v_expires_at)
        on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken
         where k.expires_at <= v_now;
        v_stored := v_stored + found::integer;
      end loop;
      perform from generate_series(1, v_stored);  -- row_count is read next
    end;
  end if;
  get diagnostics v_stored = row_count;
  return v_stored = (select count(remember.idempotency_keys[u.place]) from unnest(places) as u (place));
end;
$$;
comment on function ratelimit.remember(text[], text[], bigint[], timestamptz, boolean, boolean, bigint[], bigint[], bigint[], bigint[], bigint[], bigint[]) is
  'Stores the idempotency keys of granted elements; false if one of them is live already, or is no valid key.';

-- Citus: nothing of take.sql.
-- Reads everything that the requests of a batch are decided by: policies, overrides, buckets and idempotency keys.
--
-- The function is STABLE, so all of it is as of one snapshot. If a second statement read the idempotency keys, it could find
-- one whose tokens the bucket had not lost yet.
--
-- names are the names of the policies. keys are those of the buckets, in the order of policy; the buckets of policy n are
-- from first[n] to before first[n + 1]. created are the buckets whose rows the caller has just created, which stand for none.
-- buckets, charges and idempotency_keys are parallel to the elements of the batch: the number of the bucket, what is
-- charged to it, and the idempotency key; idempotency_keys is null for none.
--
-- policies is parallel to names, and known to the elements: the grant that a live idempotency key remembers. The others are
-- parallel to the buckets: the policy with the numbers that apply to the key; the level as stored, and when; the level
-- now; whether there is a row.
--
-- Locks and writes nothing.
create or replace function ratelimit.look_at_buckets(
    in  names text[], in first integer[], in keys text[], in created boolean[],
    in  buckets integer[], in charges bigint[], in idempotency_keys text[], in now timestamptz,
    out policies ratelimit.policies[], out known ratelimit.idempotency_keys[],
    out numbers ratelimit.policies[], out levels bigint[], out refilled_at timestamptz[], out levels_now bigint[], out has_row boolean[])
  language plpgsql
  stable
as $$
declare
  v_now     alias for look_at_buckets.now;
  v_policy  ratelimit.policies;
  v_from    integer;
  v_to      integer;
  v_found   record;
begin
  known := array_fill(null::ratelimit.idempotency_keys, array[cardinality(buckets)]);
  for v_n in 1..cardinality(names) loop
    select p.* into v_policy from policies as p where p.name = names[v_n] collate "C";
    policies[v_n] := v_policy;
    v_from        := first[v_n];
    v_to          := first[v_n + 1] - 1;
    if v_policy.durable is not false then  -- an unknown policy has no buckets
      declare
        v_here         text collate "C"    := keys[v_from];
        v_numbers_here ratelimit.policies  := v_policy;
        v_override     ratelimit.overrides;
        v_level        bigint;
        v_refilled_at  timestamptz;
      begin
        if v_policy.overridden then
          select o.* into v_override
            from overrides as o
           where o.policy_id = v_policy.id and o.key = v_here and o.expires_at > v_now;
          if found then
            v_numbers_here := overridden(v_policy, v_override);
          end if;
        end if;
        if created[v_from] is not true then
          select b.level, b.refilled_at into v_level, v_refilled_at
            from buckets as b
           where b.policy_id = v_policy.id and b.key = v_here;
        end if;
        levels      := levels || coalesce(v_level, microtokens(v_numbers_here.capacity));
        levels_now  := levels_now || case when v_level is null then microtokens(v_numbers_here.capacity)
                                          else refilled_level(v_level, v_refilled_at, v_now, v_numbers_here.full_level, v_numbers_here.gain, v_numbers_here.every_us, v_numbers_here.tick) end;
        refilled_at := refilled_at || coalesce(v_refilled_at, v_now);
        has_row     := has_row || (v_level is not null);
        numbers     := numbers || v_numbers_here;
      end;
    else
      declare
        v_here         text collate "C"    := keys[v_from];
        v_numbers_here ratelimit.policies  := v_policy;
        v_override     ratelimit.overrides;
        v_level        bigint;
        v_refilled_at  timestamptz;
      begin
        if v_policy.overridden then
          select o.* into v_override
            from overrides as o
           where o.policy_id = v_policy.id and o.key = v_here and o.expires_at > v_now;
          if found then
            v_numbers_here := overridden(v_policy, v_override);
          end if;
        end if;
        if created[v_from] is not true then
          select b.level, b.refilled_at into v_level, v_refilled_at
            from ephemeral_buckets as b
           where b.policy_id = v_policy.id and b.key = v_here;
        end if;
        levels      := levels || coalesce(v_level, microtokens(v_numbers_here.capacity));
        levels_now  := levels_now || case when v_level is null then microtokens(v_numbers_here.capacity)
                                          else refilled_level(v_level, v_refilled_at, v_now, v_numbers_here.full_level, v_numbers_here.gain, v_numbers_here.every_us, v_numbers_here.tick) end;
        refilled_at := refilled_at || coalesce(v_refilled_at, v_now);
        has_row     := has_row || (v_level is not null);
        numbers     := numbers || v_numbers_here;
      end;
    end if;
    if idempotency_keys is null then
      continue;
    elsif v_policy.durable is not false then
      declare
        v_here  text collate "C" := keys[v_from];
        v_named text collate "C";
        v_first ratelimit.idempotency_keys;
      begin
        for v_place in 1..cardinality(buckets) loop
          continue when (buckets[v_place] = v_from and charges[v_place] > 0 and idempotency_keys[v_place] is not null) is not true;
          v_named := idempotency_keys[v_place];
          select k.* into v_first
            from idempotency_keys as k
           where k.policy_id       = v_policy.id
             and k.key             = v_here
             and k.idempotency_key = v_named;
          if v_first.expires_at > v_now then
            known[v_place] := v_first;
          end if;
        end loop;
      end;
    else
      declare
        v_here  text collate "C" := keys[v_from];
        v_named text collate "C";
        v_first ratelimit.idempotency_keys;
      begin
        for v_place in 1..cardinality(buckets) loop
          continue when (buckets[v_place] = v_from and charges[v_place] > 0 and idempotency_keys[v_place] is not null) is not true;
          v_named := idempotency_keys[v_place];
          select k.* into v_first
            from ephemeral_idempotency_keys as k
           where k.policy_id       = v_policy.id
             and k.key             = v_here
             and k.idempotency_key = v_named;
          if v_first.expires_at > v_now then
            known[v_place] := v_first;
          end if;
        end loop;
      end;
    end if;
  end loop;
end;
$$;
comment on function ratelimit.look_at_buckets(text[], integer[], text[], boolean[], integer[], bigint[], text[], timestamptz) is
  'The policies, buckets and idempotency keys of many requests, as of one snapshot.';

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
--   4. Write each bucket once, and remove the rows of step 1 that nothing was taken from. The first round writes only new
--      rows. A second round locks the buckets that are wanted if one of them has a row, or if an idempotency key is denied
--      where a row would be created: it may have been granted since, and the row that says so removed. A later round locks
--      all buckets if it wants one that is not locked, or if another session stored an idempotency key first. Each further
--      round is due to another session.
-- If a round that locked rows takes nothing, its locks and rows are rolled back, and the answers stay.
--
-- All that take from more than one bucket lock them in one order: durable policies first, then by policy and key. To
-- create a row is part of the order, because an INSERT waits for whoever has the row already. So calls that are
-- transactions of their own never deadlock. If the caller has charged buckets already (taken), a grant here would break
-- the order: RL00T tells the caller to undo and to ask again.
--
-- Locks:  the buckets of the requests that are granted; all buckets, if other sessions interfered.
-- Writes: buckets and idempotency keys of granted requests.
create or replace function ratelimit.decide_in_order(
    policies text[], keys text[], costs bigint[], requests bigint[], idempotency_keys text[], elements bigint[], joint boolean, taken boolean)
  returns ratelimit.packed
  language plpgsql
  volatile
as $$



declare
  v_count       integer := cardinality(keys);
  -- Parallel to the elements.
  charges       bigint[];       -- what the request charges to the bucket
  remaining     bigint[];       -- the answers
  retry_us      bigint[];
  reset_us      bigint[];
  capacities    bigint[];
  replayed      boolean[];
  shadowed      boolean[];
  watching      boolean[];      -- the policy is a shadow
  granted       boolean[];      -- the request is granted; null: refused
  charged       boolean[];      -- the request charges a bucket
  v_bucket      integer[];      -- the number of its bucket
  v_same        integer[];      -- the first element of the request on the same bucket
  v_twin        integer[];      -- the last element of an earlier request on the same bucket, under the same idempotency key
  v_bad         boolean[];      -- an argument is out of range
  v_known       ratelimit.idempotency_keys[];  -- the grant that a live idempotency key remembers
  v_kept        boolean[];      -- its grant is to be remembered
  v_fits        boolean[];
  v_then_level  bigint[];       -- the bucket after the request: what it held, ...
  v_then_at     timestamptz[];  -- ... and when
  -- Parallel to each other: the requests that are refused, and their errors.
  refused        bigint[];
  error_codes    text[];
  error_messages text[];
  error_details  text[];
  error_hints    text[];
  -- Parallel to the buckets, which are in the order of policy and key.
  v_key         text[] collate "C";
  v_level       bigint[];       -- as stored, until a request is granted
  v_refilled_at timestamptz[];
  v_level_now   bigint[];
  v_has_row     boolean[];
  v_numbers     ratelimit.policies[];
  v_wanted      boolean[];      -- a request takes from it
  v_lock        boolean[];      -- the next round locks it
  v_created     boolean[];      -- this round has created its row, which stands for none until it is written
  -- Parallel to the policies, in the order of name.
  v_names       text[] collate "C";
  v_first       integer[];      -- the number of its first bucket
  v_policies    ratelimit.policies[];
  v_ids         bigint[];
  v_locked      bigint[];       -- the ids by which this round has locked the buckets
  v_durable     integer[];      -- the numbers of durable policies
  v_in_order    integer[];      -- the numbers of all known policies, durable ones first

  v_next        integer;        -- the number of a policy
  v_policy      ratelimit.policies;
  v_from        integer;
  v_to          integer;
  v_now         timestamptz;
  v_round       integer := 0;
  v_start       integer;        -- the first element of a request
  v_end         integer;        -- the last
  v_i           integer;
  v_earlier     integer;
  v_b           integer;
  v_refusal     integer[];      -- by kind of error: the first element that has it
  v_error       record;
  v_granted     boolean;
  v_charged     boolean;
  v_changes     boolean;        -- a row that exists is to change
  v_misses      boolean;        -- an idempotency key is denied by a bucket that is wanted
  v_places      bigint[];
  v_written     bigint;
  v_packed      ratelimit.packed;
  v_over        boolean := false;  -- answered, and the locks are to be rolled back
begin
  select array_agg(s.bucket::integer order by s.place), array_agg(s.charge order by s.place), array_agg(s.same::integer order by s.place),
         array_agg(s.twin::integer order by s.place), array_agg(s.bad order by s.place)
    into v_bucket, charges, v_same, v_twin, v_bad
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
  select array_agg(b.key order by b.policy, b.key) into v_key
    from (select distinct u.policy collate "C" as policy, u.key collate "C" as key from unnest(policies, keys) as u (policy, key)) as b;
  select array_agg(p.name order by p.first), array_agg(p.first order by p.first) into v_names, v_first
    from (select u.policy collate "C" as name, min(u.bucket) as first
            from unnest(policies, v_bucket) as u (policy, bucket)
           group by 1) as p;
  v_first := v_first || cardinality(v_key) + 1;

  -- A round that is rolled back gives back this lock with all others, and the next one begins with buckets. A migration
  -- locks in the other order: policies first.
  -- Citus: a reference table is not locked here.

  <<rounds>>
  loop
    v_round := v_round + 1;
    if v_round = 1000 then
      raise exception 'the buckets changed at every look'
        using errcode = '40001',
              hint    = 'Try again.';
    end if;
    begin
      v_created := array_fill(false, array[cardinality(v_key)]);
      if v_round > 1 then
        v_now := clock();
        foreach v_next in array v_in_order loop
          v_policy := v_policies[v_next];
          v_from   := v_first[v_next];
          v_to     := v_first[v_next + 1] - 1;
          if v_policy.durable then
            if v_lock[v_from] then
              declare
                v_here text collate "C" := v_key[v_from];
                v_full bigint := microtokens(v_numbers[v_from].capacity);
              begin
                loop
                  perform b.level from buckets as b where b.policy_id = v_policy.id and b.key = v_here for update;
                  exit when found;
                  insert into buckets (policy_id, key, level, refilled_at, due_at)
                  values (v_policy.id, v_here, v_full, v_now, v_now)
                  on conflict on constraint buckets_pkey do nothing;
                  v_created[v_from] := found;
                  exit when found;
                end loop;
              end;
            end if;
          else
            if v_lock[v_from] then
              declare
                v_here text collate "C" := v_key[v_from];
                v_full bigint := microtokens(v_numbers[v_from].capacity);
              begin
                loop
                  perform b.level from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = v_here for update;
                  exit when found;
                  insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
                  values (v_policy.id, v_here, v_full, v_now, v_now)
                  on conflict on constraint ephemeral_buckets_pkey do nothing;
                  v_created[v_from] := found;
                  exit when found;
                end loop;
              end;
            end if;
          end if;
        end loop;
      end if;

      v_now         := clock();  -- the locks may have waited
      v_locked      := v_ids;
      v_ids         := '{}';
      v_in_order    := '{}';
      v_durable     := '{}';
      select l.policies, l.known, l.numbers, l.levels, l.refilled_at, l.levels_now, l.has_row
        into v_policies, v_known, v_numbers, v_level, v_refilled_at, v_level_now, v_has_row
        from look_at_buckets(v_names, v_first, v_key, v_created, v_bucket, charges, idempotency_keys, v_now) as l;
      for v_part in 1..cardinality(v_names) loop
        v_policy      := v_policies[v_part];
        v_ids[v_part] := v_policy.id;
        if v_policy.durable then  -- durable policies first
          v_in_order := v_durable || v_part || v_in_order[cardinality(v_durable) + 1:];
          v_durable  := v_durable || v_part;
        elsif v_policy.durable is not null then
          v_in_order := v_in_order || v_part;
        end if;
      end loop;

      refused        := null;
      error_codes    := null;
      error_messages := null;
      error_details  := null;
      error_hints    := null;
      if v_round > 1 and v_ids is distinct from v_locked then  -- a policy was defined anew since the locks
        v_lock := array_fill(true, array[cardinality(v_key)]);
        raise exception sqlstate 'RL00A';
      end if;
      v_fits         := array_fill(null::boolean, array[v_count]);
      replayed       := v_fits;
      shadowed       := v_fits;
      watching       := v_fits;
      granted        := v_fits;
      charged        := v_fits;
      v_kept         := array_fill(false, array[v_count]);
      v_then_level   := array_fill(null::bigint, array[v_count]);
      v_then_at      := array_fill(null::timestamptz, array[v_count]);
      v_wanted       := array_fill(false, array[cardinality(v_key)]);
      v_changes      := false;
      v_end          := 0;
      while v_end < v_count loop
        v_start   := v_end + 1;
        v_end     := v_start;
        v_granted := true;
        v_charged := false;
        v_refusal := '{}';
        while requests[v_end + 1] = requests[v_start] loop
          v_end := v_end + 1;
        end loop;

        -- Each element: refused, replayed, or does it fit?
        for v_i in v_start..v_end loop
          v_b := v_bucket[v_i];
          if v_bad[v_i] then
            v_refusal[1] := coalesce(v_refusal[1], v_i);
            continue;
          elsif v_numbers[v_b].id is null then
            v_refusal[2] := coalesce(v_refusal[2], v_i);
            continue;
          end if;
          if charges[v_i] > 0 and v_twin[v_i] is not null and v_known[v_i] is null then
            -- Granted and remembered by an earlier request of this call? Its own twins come before it.
            v_earlier := v_twin[v_i];
            while v_earlier is not null and not v_kept[v_earlier] loop
              v_earlier := v_twin[v_earlier];
            end loop;
            if v_earlier is not null and charges[v_earlier] <> charges[v_i] then
              v_known[v_i] := row(null, charges[v_earlier], null, null, null, null, null, idempotency_keys[v_i], null, null, null)::ratelimit.idempotency_keys;
            elsif v_earlier is not null then
              replayed[v_i]     := true;
              v_then_level[v_i] := v_then_level[v_earlier];
              v_then_at[v_i]    := v_then_at[v_earlier];
              v_fits[v_i]       := true;
              watching[v_i]     := v_numbers[v_b].shadow;
              continue;
            end if;
          end if;
          if v_known[v_i].cost <> charges[v_i] then
            v_refusal[3] := coalesce(v_refusal[3], v_i);
            continue;
          elsif v_known[v_i].settled is not null then
            v_refusal[4] := coalesce(v_refusal[4], v_i);
            continue;
          end if;
          replayed[v_i] := v_known[v_i].cost is not null;
          watching[v_i] := v_numbers[v_b].shadow;
          if replayed[v_i] then
            v_fits[v_i] := left_us(v_known[v_i], v_now) = 0;  -- a reserved grant may have to wait
          else
            v_fits[v_i] := charges[v_i] = 0 or charges[v_i] <= v_numbers[v_b].capacity and microtokens(charges[v_i]) <= v_level_now[v_b];
          end if;
          v_granted     := v_granted and (v_fits[v_i] or watching[v_i]);
        end loop;

        v_i := coalesce(v_refusal[1], v_refusal[2], v_refusal[3], v_refusal[4]);
        if v_i is not null then
          select r.* into v_error
            from refusal(policies[v_i], keys[v_i], case when v_bad[v_i] then costs[v_i] else charges[v_i] end,
                         decide_in_order.idempotency_keys[v_i], v_known[v_i]) as r;
          refused        := refused || requests[v_i];
          error_codes    := error_codes || v_error.error_code;
          error_messages := error_messages || v_error.error_message;
          error_details  := error_details || v_error.error_detail;
          error_hints    := error_hints || v_error.error_hint;
          for v_i in v_start..v_end loop
            granted[v_i] := null;
            v_fits[v_i]  := null;
          end loop;
          continue;
        end if;

        for v_i in v_start..v_end loop
          v_b := v_bucket[v_i];
          if v_granted and v_fits[v_i] and not replayed[v_i] and charges[v_i] > 0 then
            v_charged := true;
            if v_same[v_i] = v_i then
              if not v_wanted[v_b] then
                v_wanted[v_b] := true;
                v_changes     := v_changes or v_has_row[v_b];
                v_refilled_at[v_b] := refilled_until(v_refilled_at[v_b], v_now, v_numbers[v_b].tick);
              end if;
              v_level_now[v_b] := v_level_now[v_b] - microtokens(charges[v_i]);
              v_level[v_b]     := v_level_now[v_b];
            end if;
            v_kept[v_i] := decide_in_order.idempotency_keys[v_i] is not null;
          end if;
          shadowed[v_i] := not v_fits[v_i] and watching[v_i];
          if v_then_level[v_i] is null then
            v_then_level[v_i] := v_level[v_b];
            v_then_at[v_i]    := v_refilled_at[v_b];
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
                       else whole_tokens(refilled_level(e.level, e.refilled_at, v_now, (e.p).full_level, (e.p).gain, (e.p).every_us, (e.p).tick))
                     end as remaining,
                     case
                       when e.fits or (e.p).shadow then 0
                       when (e.known).cost is not null then left_us(e.known, v_now)
                       when e.charge <= (e.p).capacity then wait_for(microtokens(e.charge), e.level, e.refilled_at, v_now, (e.p).every_us, (e.p).tick_us, (e.p).tick_gain, (e.p).round_up)
                     end as retry_us,
                     case
                       when (e.known).cost is not null then microseconds((e.known).reset_after)::bigint
                       else wait_for((e.p).full_level, e.level, e.refilled_at, v_now, (e.p).every_us, (e.p).tick_us, (e.p).tick_gain, (e.p).round_up)
                     end as reset_us,
                     coalesce((e.known).capacity, (e.p).capacity) as capacity
                from (select u.*, v_numbers[u.bucket] as p, v_known[u.place] as known
                        from unnest(v_bucket, charges, v_fits, v_then_level, v_then_at)
                             with ordinality as u (bucket, charge, fits, level, refilled_at, place)
                      offset 0) as e) as a;

      if not true = any (v_wanted) then  -- nothing to take
        exit rounds when v_round = 1;
        v_over := true;
        raise exception sqlstate 'RL00A';  -- rolls back to the begin above; caught below, so no caller sees it
      end if;
      v_misses := idempotency_keys is not null
                  and exists (select from unnest(v_bucket, v_fits, idempotency_keys) as u (bucket, fits, idempotency_key)
                               where not u.fits and u.idempotency_key is not null and v_wanted[u.bucket]);
      if taken then
        raise exception sqlstate 'RL00T';
      elsif v_round = 1 and (v_changes or v_misses) then
        v_lock := v_wanted;
        raise exception sqlstate 'RL00A';
      elsif v_round > 1 and exists (select from unnest(v_wanted, v_lock) as u (wanted, locked) where u.wanted and not u.locked) then
        v_lock := array_fill(true, array[cardinality(v_key)]);
        raise exception sqlstate 'RL00A';
      end if;

      foreach v_next in array v_in_order loop
        v_policy := v_policies[v_next];
        v_from   := v_first[v_next];
        v_to     := v_first[v_next + 1] - 1;
        for v_b in v_from..v_to loop
          continue when not v_created[v_b] or v_wanted[v_b];
          if v_policy.durable then
            declare
              v_here text collate "C" := v_key[v_b];
            begin
              delete from buckets as b where b.policy_id = v_policy.id and b.key = v_here;
            end;
          else
            declare
              v_here text collate "C" := v_key[v_b];
            begin
              delete from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = v_here;
            end;
          end if;
        end loop;
        if v_round > 1 and v_policy.durable then
          if v_wanted[v_from] then
            declare
              v_here          text collate "C" := v_key[v_from];
              v_level_here    bigint           := v_level[v_from];
              v_refilled_here timestamptz      := v_refilled_at[v_from];
            begin
              update buckets as b
                 set level = v_level_here, refilled_at = v_refilled_here
               where b.policy_id = v_policy.id
                 and b.key       = v_here;
            end;
          else
            perform from generate_series(1, 0);  -- row_count is read next
          end if;
        elsif v_round > 1 then
          if v_wanted[v_from] then
            declare
              v_here          text collate "C" := v_key[v_from];
              v_level_here    bigint           := v_level[v_from];
              v_refilled_here timestamptz      := v_refilled_at[v_from];
            begin
              update ephemeral_buckets as b
                 set level = v_level_here, refilled_at = v_refilled_here
               where b.policy_id = v_policy.id
                 and b.key       = v_here;
            end;
          else
            perform from generate_series(1, 0);  -- row_count is read next
          end if;
        elsif v_policy.durable then
          if v_wanted[v_from] and not v_has_row[v_from] then
            declare
              v_here          text collate "C"   := v_key[v_from];
              v_numbers_here  ratelimit.policies := v_numbers[v_from];
              v_level_here    bigint             := v_level[v_from];
              v_refilled_here timestamptz        := v_refilled_at[v_from];
              v_due_here      timestamptz;
            begin
              v_due_here := v_refilled_here
                            + least(duration(wait_below(v_numbers_here.full_level, v_level_here, 0, v_numbers_here.every_us, v_numbers_here.tick_us, v_numbers_here.tick_gain, v_numbers_here.round_up)),
                                    interval '24 hours');
              insert into buckets (policy_id, key, level, refilled_at, due_at)
              values (v_policy.id, v_here, v_level_here, v_refilled_here, v_due_here)
              on conflict on constraint buckets_pkey do nothing;
            end;
          else
            perform from generate_series(1, 0);  -- row_count is read next
          end if;
        else
          if v_wanted[v_from] and not v_has_row[v_from] then
            declare
              v_here          text collate "C"   := v_key[v_from];
              v_numbers_here  ratelimit.policies := v_numbers[v_from];
              v_level_here    bigint             := v_level[v_from];
              v_refilled_here timestamptz        := v_refilled_at[v_from];
              v_due_here      timestamptz;
            begin
              v_due_here := v_refilled_here
                            + least(duration(wait_below(v_numbers_here.full_level, v_level_here, 0, v_numbers_here.every_us, v_numbers_here.tick_us, v_numbers_here.tick_gain, v_numbers_here.round_up)),
                                    interval '24 hours');
              insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
              values (v_policy.id, v_here, v_level_here, v_refilled_here, v_due_here)
              on conflict on constraint ephemeral_buckets_pkey do nothing;
            end;
          else
            perform from generate_series(1, 0);  -- row_count is read next
          end if;
        end if;
        get diagnostics v_written = row_count;
        if v_written < (select count(*) from unnest(v_wanted[v_from:v_to]) as u (wanted) where u.wanted) then
          v_lock := array_fill(true, array[cardinality(v_key)]);  -- another session created a row, or the policy anew
          raise exception sqlstate 'RL00A';
        end if;
      end loop;
      if true = any (v_kept) then
        for v_part in 1..cardinality(v_names) loop
          v_from   := v_first[v_part];
          v_to     := v_first[v_part + 1] - 1;
          v_places := array(select u.place
                              from unnest(v_bucket, v_kept, v_same) with ordinality as u (bucket, kept, same, place)
                             where u.kept and u.same = u.place and u.bucket between v_from and v_to
                             order by u.bucket, u.place);
          continue when v_places = '{}';
          v_policy := v_policies[v_part];
          if remember(keys, decide_in_order.idempotency_keys, charges, v_now, not v_policy.durable, false, v_places,
                      array_fill(v_policy.id, array[cardinality(v_places)]), array_fill(v_policy.remember_us, array[cardinality(v_places)]),
                      array(select remaining[p.place] from unnest(v_places) as p (place)),
                      array(select capacities[p.place] from unnest(v_places) as p (place)),
                      array(select reset_us[p.place] from unnest(v_places) as p (place))) is not true then
            v_lock := array_fill(true, array[cardinality(v_key)]);
            raise exception sqlstate 'RL00A';
          end if;
        end loop;
      end if;
      exit rounds;
    exception when sqlstate 'RL00A' then
      exit rounds when v_over;
    end;
  end loop;

  select array_agg(elements[a.place]), array_agg(a.remaining), array_agg(a.retry_us), array_agg(a.reset_us), array_agg(a.capacity),
         case when bool_or(a.replayed) then array_agg(a.replayed) end, case when bool_or(a.shadowed) then array_agg(a.shadowed) end
    into v_packed.elements, v_packed.remaining, v_packed.retry_after_us, v_packed.reset_after_us, v_packed.capacity,
         v_packed.replayed, v_packed.shadowed
    from unnest(remaining, retry_us, reset_us, capacities, replayed, shadowed, granted)
         with ordinality as a (remaining, retry_us, reset_us, capacity, replayed, shadowed, granted, place)
   where a.granted is not null;
  if joint then
    -- The binding element: a shadow only if there is no other, then one of cost 0 only if there is no other, then the
    -- fewest repeats of its charge, or the longest wait.
    select array_agg(r.request), array_agg(r.granted),
           array_agg(case when r.granted then r.replayed and not r.charged else r.waits end),
           array_agg(r.granted and r.shadowed), array_agg(r.binding::integer)
      into v_packed.requests, v_packed.requests_allowed, v_packed.requests_replayed, v_packed.requests_shadowed, v_packed.bindings
      from (select a.request, bool_and(a.granted) as granted, bool_or(a.charged) as charged, bool_or(a.replayed) as replayed,
                   bool_or(a.shadowed) as shadowed,
                   bool_and((a.replayed or a.retry_us = 0) is true) as waits,
                   (min(array[a.watching::integer, (a.cost = 0)::integer,
                              case when a.granted then repeats(a.remaining, nullif(a.charge, 0)) else -coalesce(a.retry_us, 9223372036854775807) end,
                              a.place]))[4] - min(a.place) + 1 as binding
              from unnest(requests, costs, charges, remaining, retry_us, replayed, shadowed, watching, granted, charged)
                   with ordinality as a (request, cost, charge, remaining, retry_us, replayed, shadowed, watching, granted, charged, place)
             where a.granted is not null
             group by a.request) as r;
  end if;
  v_packed.refused        := refused;
  v_packed.error_codes    := error_codes;
  v_packed.error_messages := error_messages;
  v_packed.error_details  := error_details;
  v_packed.error_hints    := error_hints;
  return v_packed;
end;
$$;
comment on function ratelimit.decide_in_order(text[], text[], bigint[], bigint[], text[], bigint[], boolean, boolean) is
  'Decides requests one after another at one instant, whatever they ask for.';

-- Decides the requests of a batch about one key, one after another, on the node that has its shard. The arguments are those of
-- decide_in_order, of which all elements have this key; joint asks for the answers of whole requests.
--
-- Locks and writes: as ratelimit_acquire for a single request, else as decide_in_order.
create or replace function ratelimit.decide_here(
    key text, policies text[], costs bigint[], requests bigint[], idempotency_keys text[], elements bigint[], joint boolean)
  returns ratelimit.packed
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
  set jit = off             -- the statements take less time than compiling them
as $$
declare
  v_key      text collate "C" := decide_here.key;
  v_decision decision;
  v_packed   packed;
  v_code     text;
  v_message  text;
  v_detail   text;
  v_hint     text;
begin
  if joint or cardinality(policies) > 1 then
    return decide_in_order(policies, array_fill(v_key, array[cardinality(policies)]), costs, requests, idempotency_keys, elements, joint, false);
  end if;
  begin
    v_decision := acquire_here(policies[1], v_key, costs[1], idempotency_keys[1]);
    v_packed.elements       := elements;
    v_packed.remaining      := array[v_decision.remaining];
    v_packed.retry_after_us := array[microseconds(v_decision.retry_after)::bigint];
    v_packed.reset_after_us := array[microseconds(v_decision.reset_after)::bigint];
    v_packed.capacity       := array[v_decision.capacity];
    if v_decision.replayed then
      v_packed.replayed := array[true];
    end if;
    if v_decision.shadowed then
      v_packed.shadowed := array[true];
    end if;
  exception when sqlstate '22023' or sqlstate 'RL001' or sqlstate 'RL002' or sqlstate 'RL004' then
    get stacked diagnostics v_code = returned_sqlstate, v_message = message_text, v_detail = pg_exception_detail, v_hint = pg_exception_hint;
    v_packed := null;
    v_packed.refused        := requests;
    v_packed.error_codes    := array[v_code];
    v_packed.error_messages := array[v_message];
    v_packed.error_details  := array[v_detail];
    v_packed.error_hints    := array[v_hint];
  end;
  return v_packed;
end;
$$;
comment on function ratelimit.decide_here(text, text[], bigint[], bigint[], text[], bigint[], boolean) is
  'Decides the requests of a batch about one key, on the node that has its shard.';

-- Decides many requests, as if each were asked on its own, one after another: those about one key in one call of decide_here, one
-- key after another. A request whose elements have several keys is refused with 0A000, because its buckets may be on several
-- nodes. acquire_packed.sql explains the arguments and the results.
--
-- All that take from more than one bucket lock them in the order of key, and those of one key in the order that
-- decide_in_order describes.
create or replace function ratelimit.acquire_batch(
    policies text[], keys text[], costs bigint[], sizes integer[], idempotency_keys text[])
  returns ratelimit.packed
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
as $$
declare
  v_count    integer := cardinality(policies);
  v_requests bigint[];  -- for each element, the number of its request; null without sizes: its own number
  v_misfits  bigint[];  -- requests of a size that is refused
  v_part     record;
  v_error    record;
  v_one      packed;
  v_answers  packed;
  v_replays  boolean := false;
  v_shadows  boolean := false;
  v_i        integer;
begin
  if (array_dims(policies) = '[1:' || v_count || ']' and array_dims(keys) = array_dims(policies)
      and (costs is null or array_dims(costs) = array_dims(policies)) and sizes is null
      and (idempotency_keys is null or array_dims(idempotency_keys) = array_dims(policies))) is not true then
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
      -- Subscripts are to count from 1.
      policies         := array(select unnest(policies));
      keys             := array(select unnest(keys));
      costs            := case when costs is not null then array(select unnest(acquire_batch.costs)) end;
      sizes            := case when sizes is not null then array(select unnest(acquire_batch.sizes)) end;
      idempotency_keys := case when idempotency_keys is not null then array(select unnest(acquire_batch.idempotency_keys)) end;
    end if;
  end if;
  if costs is null then
    costs := array_fill(1::bigint, array[v_count]);
  end if;
  if sizes is not null then
    select array_agg(u.request),
           case when acquire_batch.idempotency_keys is not null then array_agg(acquire_batch.idempotency_keys[u.request]) end
      into v_requests, idempotency_keys
      from (select u.request, generate_series(1, u.size) from unnest(acquire_batch.sizes) with ordinality as u (size, request)) as u;
    if 1 > any (sizes) or 1000 < any (sizes) then  -- without a cost, the elements are refused
      v_misfits := array(select u.request
                           from unnest(acquire_batch.sizes) with ordinality as u (size, request)
                          where u.size not between 1 and 1000);
      costs     := array(select case when v_requests[u.element] <> all (v_misfits) then u.cost end
                           from unnest(costs) with ordinality as u (cost, element));
    end if;
  end if;
  v_requests := coalesce(v_requests, array(select generate_series(1, v_count)));

  -- Requests without a key, or with several: the first bad element is their error.
  for v_part in
    select r.request, e.policy, e.key, e.cost, e.idempotency_key, e.bad
      from (select u.request, bool_or(u.key is null) or count(distinct u.key collate "C") > 1 as strays,
                   coalesce(min(u.place) filter (where u.bad), min(u.place)) as place
              from (select q.*, (acceptable(q.key, q.cost) and is_name(q.policy) and is_name(q.idempotency_key) is not false) is not true as bad
                      from unnest(acquire_batch.policies, acquire_batch.keys, acquire_batch.costs, v_requests, acquire_batch.idempotency_keys)
                           with ordinality as q (policy, key, cost, request, idempotency_key, place)) as u
             group by u.request) as r
     cross join lateral (select acquire_batch.policies[r.place] as policy, acquire_batch.keys[r.place] as key, acquire_batch.costs[r.place] as cost,
                                acquire_batch.idempotency_keys[r.place] as idempotency_key,
                                (acceptable(acquire_batch.keys[r.place], acquire_batch.costs[r.place]) and is_name(acquire_batch.policies[r.place])
                                 and is_name(acquire_batch.idempotency_keys[r.place]) is not false) is not true as bad) as e
     where r.strays
     order by r.request
  loop
    if v_part.bad then
      select f.* into v_error from refusal(v_part.policy, v_part.key, v_part.cost, v_part.idempotency_key, null) as f;
    else
      select '0A000' as error_code, 'the buckets of a request must have one key' as error_message,
             format('The keys of request %s may be on several nodes.', v_part.request) as error_detail,
             'Ask for several limits under one key and several policies, or ask for each alone.' as error_hint
        into v_error;
    end if;
    v_answers.refused        := v_answers.refused || v_part.request;
    v_answers.error_codes    := v_answers.error_codes || v_error.error_code;
    v_answers.error_messages := v_answers.error_messages || v_error.error_message;
    v_answers.error_details  := v_answers.error_details || v_error.error_detail;
    v_answers.error_hints    := v_answers.error_hints || v_error.error_hint;
  end loop;

  for v_part in
    select min(u.key) as key, array_agg(u.policy order by u.place) as policies, array_agg(u.cost order by u.place) as costs,
           array_agg(u.request order by u.place) as requests,
           case when acquire_batch.idempotency_keys is not null then array_agg(u.idempotency_key order by u.place) end as idempotency_keys,
           array_agg(u.place order by u.place) as places
      from unnest(acquire_batch.policies, acquire_batch.keys, acquire_batch.costs, v_requests, acquire_batch.idempotency_keys)
           with ordinality as u (policy, key, cost, request, idempotency_key, place)
     where (u.request = any (v_answers.refused)) is not true
     group by u.key collate "C"
     order by u.key collate "C"
  loop
    select d.* into v_one
      from decide_here(v_part.key collate "C", v_part.policies, v_part.costs, v_part.requests, v_part.idempotency_keys, v_part.places, sizes is not null) as d;
    v_answers.elements       := v_answers.elements || v_one.elements;
    v_answers.remaining      := v_answers.remaining || v_one.remaining;
    v_answers.retry_after_us := v_answers.retry_after_us || v_one.retry_after_us;
    v_answers.reset_after_us := v_answers.reset_after_us || v_one.reset_after_us;
    v_answers.capacity       := v_answers.capacity || v_one.capacity;
    v_replays                := v_replays or v_one.replayed is not null;
    v_shadows                := v_shadows or v_one.shadowed is not null;
    if v_one.elements is not null then
      v_answers.replayed := v_answers.replayed || coalesce(v_one.replayed, array_fill(false, array[cardinality(v_one.elements)]));
      v_answers.shadowed := v_answers.shadowed || coalesce(v_one.shadowed, array_fill(false, array[cardinality(v_one.elements)]));
    end if;
    v_answers.requests          := v_answers.requests || v_one.requests;
    v_answers.requests_allowed  := v_answers.requests_allowed || v_one.requests_allowed;
    v_answers.requests_replayed := v_answers.requests_replayed || v_one.requests_replayed;
    v_answers.requests_shadowed := v_answers.requests_shadowed || v_one.requests_shadowed;
    v_answers.bindings          := v_answers.bindings || v_one.bindings;
    v_answers.refused           := v_answers.refused || v_one.refused;
    v_answers.error_codes       := v_answers.error_codes || v_one.error_codes;
    v_answers.error_messages    := v_answers.error_messages || v_one.error_messages;
    v_answers.error_details     := v_answers.error_details || v_one.error_details;
    v_answers.error_hints       := v_answers.error_hints || v_one.error_hints;
  end loop;
  if not v_replays then
    v_answers.replayed := null;
  end if;
  if not v_shadows then
    v_answers.shadowed := null;
  end if;
  for v_misfit in 1..coalesce(cardinality(v_misfits), 0) loop
    v_i := coalesce(array_position(v_answers.refused, v_misfits[v_misfit]), coalesce(cardinality(v_answers.refused), 0) + 1);
    v_answers.refused[v_i]        := v_misfits[v_misfit];
    v_answers.error_codes[v_i]    := '22023';
    v_answers.error_messages[v_i] := 'invalid sizes';
    v_answers.error_details[v_i]  := format('Request %s has %s elements.', v_misfits[v_misfit], sizes[v_misfits[v_misfit]]);
    v_answers.error_hints[v_i]    := 'Pass 1 to 1000 elements for each request.';
  end loop;
  return v_answers;
end;
$$;
comment on function ratelimit.acquire_batch(text[], text[], bigint[], integer[], text[]) is
  'Decides many requests, as if each were asked on its own, one after another.';

-- Takes from several buckets if every one covers what is charged to it, and otherwise from none.
--
-- decisions[n] is the answer about the bucket of element n, for all that this request charges to it: allowed and
-- retry_after as if that bucket were asked alone, remaining and reset_after as they are after the whole request.
-- retry_after is the longest of them. binding is the element that decides: of a denial the one with the longest wait, of a
-- grant the one that covers the fewest repeats of its charge. remaining, reset_after and capacity are those of binding.
-- Buckets of shadow policies count for retry_after and binding only if there are no others.
--
-- A bucket that remembers the idempotency key answers as it did, and is not charged again; the others are asked. replayed
-- is true if the request is granted, a bucket remembers the key, and nothing was charged; and if it is denied only because a
-- grant of ratelimit_reserve has still to wait.
--
-- policies, keys and costs have one element for each bucket, 1000 at most. A bucket may be named twice. Without costs
-- every cost is 1. An element of cost 0 looks at its bucket.
--
-- The steps, for a request whose buckets have rows and do not know its idempotency key:
--   1. One statement reads all buckets. If they cover by their stored levels, which is most often so, step 3 follows.
--   2. Each bucket is read again with all that an answer needs. If one does not cover, the answer is the denial. The
--      idempotency key is looked up after the bucket, because the request that emptied it may have had the same one.
--   3. Each bucket is charged by a conditional update, in the order of policy and key, durable ones first, and remembers the
--      idempotency key before the next one is charged. If another session took the tokens in between, or if a bucket has the
--      idempotency key already, live or expired, the charges are rolled back.
-- acquire_batch decides what these steps do not: there it is a batch of one request. So it does in a read-only transaction, as
-- those of a standby are, which cannot read ephemeral buckets.
--
-- Locks:  a grant holds its bucket rows and its idempotency keys until the caller's transaction ends. A denial holds none.
-- Writes: the same rows. A denial writes nothing.
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
as $$declare
  v_count       integer := cardinality(policies);
  v_simple      boolean := false;  -- the steps above decide the request
  v_order       integer[];   -- the elements in the order of policy and key, durable policies first
  v_sorted      policies[];  -- their policies, in this order
  v_keys        text[];      -- likewise
  v_costs       bigint[];    -- likewise; 0 for what is not charged
  v_enough      boolean;     -- the buckets cover by their stored levels
  v_rows        boolean;     -- the buckets that cover have rows
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
  v_has_row     boolean;
  v_rank        bigint;
  v_least       bigint;
  v_idempotency_key text collate "C";
  v_first       record;
  v_batch       packed;
begin
  if (v_count between 1 and 1000) is not true then
    perform check_length('policies', v_count, v_count);
    perform refuse('policies', v_count || ' elements long', 'Pass 1 to 1000 elements.');
  end if;
  -- Citus: acquire_batch decides.

  if not v_simple then
    v_batch := acquire_batch(policies, keys, costs, array[v_count], case when idempotency_key is not null then array[idempotency_key] end);
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
  end if;
  remaining   := decisions[binding].remaining;
  retry_after := case when allowed then interval '0' else decisions[binding].retry_after end;
  reset_after := decisions[binding].reset_after;
  capacity    := decisions[binding].capacity;
end;
$$;
comment on function ratelimit_acquire_all(text[], text[], bigint[], text) is
  'Take from several buckets if every one covers its cost, and otherwise from none.';

-- Decides many requests in one call, as if each were acquired on its own, one after another; row n answers
-- request n. Within a bucket, requests are decided in the order given. Requests on different buckets do not
-- affect each other.
--
-- A request that ratelimit_acquire would refuse (unknown policy, bad argument, another cost under its idempotency
-- key, or a grant that was settled) has the error in its row and no decision. The other requests are decided all the same.
--
-- policies and keys are equally long, and so are costs and idempotency_keys unless null. Without costs
-- every cost is 1. Without idempotency_keys no request has one.
--
-- Locks and writes: as ratelimit_acquire_packed.
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
  'Decide many requests in one call, in the order given, each with its own decision or error.';

-- Decides many requests of several elements in one call, as if ratelimit_acquire_all were called for each, one after
-- another; row n answers request n. The first sizes[1] elements of policies, keys and costs are request 1, and so on.
-- idempotency_keys has one element for each request, or is null.
--
-- A request that ratelimit_acquire_all would refuse has the error in its row and no decision. The other requests are decided
-- all the same.
--
-- Locks and writes: as ratelimit_acquire_packed.
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
  'Decide many requests of several elements in one call, in the order given, each with its own decision or error.';

-- Decides many requests in one call, as if each were asked on its own, one after another. This is the compact form, for
-- clients that combine requests; ratelimit_acquire_many and ratelimit_acquire_all_many give rows to people. The answer is
-- one row of arrays, and times are microseconds.
--
-- Without sizes every element is a request. With sizes the first sizes[1] elements are request 1, and so on: a request is
-- granted when every bucket covers what is charged to it, and otherwise nothing is taken anywhere. Without costs every
-- cost is 1. idempotency_keys has one element for each request.
--
-- elements has the numbers of the elements that have a decision, in no particular order. remaining, retry_after_us (0 when
-- the decision allows, null for never), reset_after_us (null for never) and capacity are parallel to it, and so are replayed
-- and shadowed, which are null if no decision is. With sizes, requests has the numbers of the requests that have a decision;
-- requests_allowed, requests_replayed, requests_shadowed and bindings are parallel to it. bindings counts within the request.
-- refused has the numbers of the requests that have an error instead, or is null; the arrays of errors are parallel to it.
--
-- Locks and writes: as ratelimit_acquire, in the order that decide_in_order describes. So calls that are transactions of
-- their own never deadlock with each other. Several calls in one transaction can.
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
  'Decide many requests in one call, for clients that combine them: one row of arrays.';


-- Guards, which raise where the functions above answer with a denial.
-- ratelimit_acquire for functions of this package, which do not depend on the schema of the public ones.
create or replace function ratelimit.acquire(policy text, key text, cost bigint, idempotency_key text)
  returns ratelimit.decision
  language plpgsql
  volatile
as $$
declare
  v_answer ratelimit.decision;
begin
  if acquire.key is null then
    perform ratelimit.check_name('policy', acquire.policy);
    perform ratelimit.check_name('key', acquire.key);
  end if;
  select d.* into v_answer
    from ratelimit.acquire_here(acquire.policy, acquire.key collate "C", acquire.cost, acquire.idempotency_key) as d;
  return v_answer;
end;
$$;
comment on function ratelimit.acquire(text, text, bigint, text) is
  'What ratelimit_acquire does, for the guards.';

-- Takes cost tokens from one bucket as ratelimit_acquire does, and raises RL429 where that would answer with a denial.
-- So it can stand in a function, a trigger or a policy of row level security, where nobody looks at an answer.
--
-- The error rolls back the statement, or what the caller rolls back with it, and with it what the statement took before.
--
-- Locks and writes: as ratelimit_acquire.
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
  v_decision decision := acquire(policy, key, cost, ratelimit_enforce.idempotency_key);
begin
  if not v_decision.allowed then
    perform rate_limit_exceeded(policy, cost, v_decision, false);
  end if;
  return v_decision;
end;
$$;
comment on function ratelimit_enforce(text, text, bigint, text) is
  'Take cost tokens from a bucket as ratelimit_acquire does, or raise RL429.';

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
            detail  = format('The trigger has %s arguments.', coalesce(cardinality(arguments), 0)),
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

-- A trigger function that limits what is inserted into a table. Its arguments are the policy, the column that has the key
-- and, if rows differ in cost, the column that has it. It charges each key of the statement once: the number of its rows,
-- or the sum of their costs. If a bucket denies, it raises RL429, and the statement inserts nothing and takes nothing.
--
-- Rows that an upsert updates are not inserted, so they are not charged. Of a partitioned table, the guard of the table
-- that the statement names charges; those of its partitions do not.
--
-- Locks:  the bucket rows, in the order of key, until the transaction ends.
-- Writes: the same rows.
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
    v_denial := acquire(v_policy.name, v_keys[1], v_costs[1], null);
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
  'Trigger function: charge each key of the inserted rows once, or raise RL429.';

-- ratelimit_peek for functions of this package.
create or replace function ratelimit.peek(policy text, key text, cost bigint)
  returns ratelimit.decision
  language plpgsql
  stable
as $$
declare
  v_answer ratelimit.decision;
begin
  if peek.key is null then
    perform ratelimit.check_name('policy', peek.policy);
    perform ratelimit.check_name('key', peek.key);
  end if;
  select d.* into v_answer
    from ratelimit.peek_here(peek.policy, peek.key collate "C", peek.cost) as d;
  return v_answer;
end;
$$;
comment on function ratelimit.peek(text, text, bigint) is
  'What ratelimit_peek does, for the guards.';

-- What ratelimit_pre_request does with its settings; docs/postgrest/install.sql creates that function and the settings.
-- It takes one token for a request that PostgREST is about to serve. In a read-only transaction, which those of GET, HEAD
-- and calls of stable functions are, it can take nothing: there it refuses only if the bucket holds no token.
--
-- The key is the subject of the JWT, hashed, because it may be long or a secret. Without one it is the address in the
-- header X-Forwarded-For that is forwarded_hop from the right: each proxy adds the address of whoever asked it, and what
-- stands further left is the word of the client. Of an IPv6 address the first 64 bits count, because whoever has one has
-- all that begin so. Null turns either off.
--
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

  if current_setting('transaction_read_only') = 'off' then
    v_denial := ratelimit.acquire(policy, v_key, 1, null);
  else
    v_policy := ratelimit.policy_named(policy);
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
-- Clean-up removes rows that change no answer: buckets that are full again, expired idempotency keys, expired
-- overrides, and rows whose policy was dropped. A bucket with a live override must be full by the override's numbers and
-- by the policy's, because it must not be full by either when the other applies again. It finds due rows through an index and skips rows that another session has
-- locked. An acquire on a bucket that a batch removes or postpones waits until the batch commits.
--
-- Clean-up judges every row as of five minutes ago. If the server's clock runs ahead for a moment, a bucket
-- that only looks full and a key that only looks expired are still there when the clock is set right.
--
-- SKIP LOCKED can still block if the row changes hands while it is examined. lock_timeout then ends the wait
-- after 100 ms, and the batch gives back its rows. PostgreSQL looks for a deadlock only after a wait of
-- deadlock_timeout, 1 second by default. If that is above 100 ms, a batch that is a transaction of its own gives
-- way before it is found in a deadlock. Only an acquire whose own look falls in those 100 ms can find one. In a
-- longer transaction, the rows of earlier batches stay locked, and it can deadlock with acquires.-- One batch of clean-up of the shards that this node has: of each table at most max_rows rows. The answer is how many buckets
-- and idempotency keys were deleted, and how many rows were deleted or postponed.
--
-- It is called on every node by cleanup_batch, in a transaction of its own.
-- Locks:  the rows that it deletes or postpones, until the end of that transaction.
-- Writes: the same rows; nothing if lock_timeout ended the batch.
create or replace function ratelimit.cleanup_here(max_rows integer, now timestamptz, due_before timestamptz)
  returns bigint[]
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off    -- as in ratelimit_acquire
  set lock_timeout = '100ms'  -- SKIP LOCKED can still block: see above
  set citus.enable_manual_changes_to_shards = on  -- a shard is changed as the plain table that it is on its node
as $$
declare
  v_most_us   constant bigint := 86400000000;  -- by which a bucket is postponed: 24 hours
  v_policies  text;  -- the names of the copies
  v_overrides text;
  v_shard     record;
  v_left      integer;
  v_read      bigint;
  v_deleted   bigint;
  v_rows      bigint := 0;
  v_buckets   bigint := 0;
  v_keys      bigint := 0;
begin
  select shard_name(s.logicalrelid, s.shardid) into v_policies from pg_dist_shard as s where s.logicalrelid = 'policies'::regclass;
  select shard_name(s.logicalrelid, s.shardid) into v_overrides from pg_dist_shard as s where s.logicalrelid = 'overrides'::regclass;
  for v_pass in 1..2 loop
    exit when v_pass = 2 and v_rows > 0;  -- rows of dropped policies can wait for an idle batch
    for v_shard in
      select s.logicalrelid, shard_name(s.logicalrelid, s.shardid) as name, s.logicalrelid in ('buckets'::regclass, 'ephemeral_buckets'::regclass) as buckets
        from pg_dist_shard as s
        join pg_dist_placement as p on p.shardid = s.shardid
        join pg_dist_local_group as g on g.groupid = p.groupid
       where s.logicalrelid in ('buckets'::regclass, 'ephemeral_buckets'::regclass, 'idempotency_keys'::regclass, 'ephemeral_idempotency_keys'::regclass)
         and p.shardstate = 1
       order by s.logicalrelid, random()
    loop
      v_left := max_rows;
      if v_pass = 2 then
        execute format($orphans$ with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from %1$s as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from %1$s as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from %2$s as p where p.id = i.id)
  )
  delete from %1$s as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from %1$s as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit $1)) $orphans$, v_shard.name, v_policies)
          using v_left;
        get diagnostics v_deleted = row_count;
        v_read := v_deleted;
      elsif v_shard.buckets then
        execute format($due$ with due as materialized (
    select b.ctid as row_id,
           p.id is null
           or wait_for(p.full_level, b.level, b.refilled_at, $2, p.every_us, p.tick_us, p.tick_gain, p.round_up) = 0
              and (o.key is null or wait_for(o.full_level, b.level, b.refilled_at, $2, o.every_us, o.tick_us, o.tick_gain, o.round_up) = 0) as removable
      from %1$s as b
      left join %2$s as p on p.id = b.policy_id
      left join %3$s as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key and o.expires_at > $2
     where b.due_at <= $3
     order by b.due_at
     limit $1
       for update of b skip locked
  ), removed as (
    delete from %1$s as b
     where b.ctid = any (array(select d.row_id from due as d where d.removable))
    returning 1
  ), postponed as (
    update %1$s as b
       set due_at = $2 + (select duration(least(greatest(coalesce(wait_for(p.full_level, b.level, b.refilled_at, $2, p.every_us, p.tick_us, p.tick_gain, p.round_up), $4),
                                                            case when o.key is not null then
                                                              coalesce(wait_for(o.full_level, b.level, b.refilled_at, $2, o.every_us, o.tick_us, o.tick_gain, o.round_up), $4)
                                                            end),
                                                   $4))
                               from %2$s as p
                               left join %3$s as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key
                                                           and o.expires_at > $2
                              where p.id = b.policy_id)
     where b.ctid = any (array(select d.row_id from due as d where d.removable is not true))
  )
  select (select count(*) from due), (select count(*) from removed) $due$,
                       v_shard.name, v_policies, v_overrides)
           into v_read, v_deleted using v_left, now, due_before, v_most_us;
      else
        execute format($expired$ delete from %1$s as k
   where k.ctid = any (array(select d.ctid
                               from %1$s as d
                              where d.expires_at <= $2
                              order by d.expires_at
                              limit $1
                                for update skip locked)) $expired$, v_shard.name)
          using v_left, due_before;
        get diagnostics v_deleted = row_count;
        v_read := v_deleted;
      end if;
      v_rows := v_rows + v_read;
      if v_shard.buckets then
        v_buckets := v_buckets + v_deleted;
      else
        v_keys := v_keys + v_deleted;
      end if;
    end loop;
  end loop;
  return array[v_buckets, v_keys, v_rows];
exception when lock_not_available then
  return array[0, 0, 1];  -- the locked row may be due
end;
$$;
comment on function ratelimit.cleanup_here(integer, timestamptz, timestamptz) is
  'One batch of clean-up of the shards of this node.';

-- One batch of each node, and of the overrides; the arguments and results are those that sql/cleanup.sql explains. The batch
-- of a node is a transaction of its own, and is at most max_rows rows of each shard. A node that cannot be reached is left out,
-- with a warning.
-- Locks and writes: as cleanup_here on all nodes; expired overrides.
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
  set datestyle = 'ISO'
as $$
declare
  v_now    timestamptz := clock() - interval '5 minutes';  -- rows are judged as of this instant
  v_node   record;
  v_counts bigint[];
  v_rows   bigint := 0;
  v_deleted bigint;
begin
  perform check_max_rows(max_rows);
  if (budget > interval '0') is not true then
    perform refuse('budget', budget::text, 'Pass an interval above zero, such as ''50 seconds''.');
  end if;
  due_before               := least(due_before, v_now);  -- least ignores null; a caller cannot look past v_now
  deadline                 := coalesce(deadline, clock_timestamp() + least(budget, interval '1000 years'));
  buckets_deleted          := 0;
  idempotency_keys_deleted := 0;
  for v_node in
    select * from run_command_on_all_nodes(format('select ratelimit.cleanup_here(%s, %L, %L)', max_rows, v_now, due_before),
                                           parallel => true, give_warning_for_connection_errors => true)
  loop
    if not v_node.success then
      raise warning 'a node was not cleaned up' using detail = format('Node %s: %s', v_node.nodeid, v_node.result);
      continue;
    end if;
    v_counts                 := v_node.result::bigint[];
    buckets_deleted          := buckets_deleted + v_counts[1];
    idempotency_keys_deleted := idempotency_keys_deleted + v_counts[2];
    v_rows                   := v_rows + v_counts[3];
  end loop;
  if exists (select from overrides as o where o.expires_at <= due_before) then
    delete from overrides as o where o.expires_at <= due_before;
    get diagnostics v_deleted = row_count;
    v_rows := v_rows + v_deleted;
  end if;
  more := v_rows > 0 and clock_timestamp() < deadline;
end;
$$;
comment on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) is
  'One batch of clean-up on all nodes, and whether another should follow.';

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

-- The rows of ratelimit_status. That has columns named like its arguments, which PL/pgSQL refuses.
--
-- A standby cannot read ephemeral buckets. Even a statement that names their table fails there, so it has a statement of its
-- own. If an ephemeral policy is asked for, it is 0A000: to list no bucket would say that all are full.
create or replace function ratelimit.emptiest_buckets(in of_policy text, in of_key text, in at_most integer,
    out policy text, out key text, out remaining bigint, out retry_after interval, out reset_after interval, out capacity bigint, out overridden boolean)
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
             duration(case when s.capacity > 0 then wait_for(microtokens(1), s.level, s.refilled_at, v_now, s.every_us, s.tick_us, s.tick_gain, s.round_up) end),
             duration(wait_for(s.full_level, s.level, s.refilled_at, v_now, s.every_us, s.tick_us, s.tick_gain, s.round_up)),
             s.capacity, s.overridden
        from (select u.*, refilled_level(u.level, u.refilled_at, v_now, u.full_level, u.gain, u.every_us, u.tick) as level_now
                from (select p.name, b.key, b.level, b.refilled_at, o.key is not null as overridden,
                             case when o.key is null then p.capacity else o.capacity end as capacity,
                             case when o.key is null then p.tick else o.tick end as tick,
                             case when o.key is null then p.every_us else o.every_us end as every_us,
                             case when o.key is null then p.tick_us else o.tick_us end as tick_us,
                             case when o.key is null then p.full_level else o.full_level end as full_level,
                             case when o.key is null then p.gain else o.gain end as gain,
                             case when o.key is null then p.tick_gain else o.tick_gain end as tick_gain,
                             case when o.key is null then p.round_up else o.round_up end as round_up
                        from policies as p
                        join (table buckets union all table ephemeral_buckets) as b on b.policy_id = p.id
                        left join overrides as o on p.overridden and o.policy_id = p.id and o.key = b.key and o.expires_at > v_now
                       where (v_name is null or p.name = v_name)
                         and (v_key is null or b.key = v_key)
                      offset 0) as u
               order by refilled_level(u.level, u.refilled_at, v_now, u.full_level, u.gain, u.every_us, u.tick) / greatest(u.full_level, 1), u.name, u.key
               limit at_most) as s
       order by s.level_now / greatest(s.full_level, 1), s.name, s.key;
  elsif exists (select from policies as p where p.name = v_name and not p.durable) then
    raise exception 'ephemeral buckets cannot be read on a standby'
      using errcode = '0A000',
            detail  = format('Policy %L is ephemeral.', v_name),
            hint    = 'Ask the primary.';
  else
    return query
      select s.name, s.key, whole_tokens(s.level_now),
             duration(case when s.capacity > 0 then wait_for(microtokens(1), s.level, s.refilled_at, v_now, s.every_us, s.tick_us, s.tick_gain, s.round_up) end),
             duration(wait_for(s.full_level, s.level, s.refilled_at, v_now, s.every_us, s.tick_us, s.tick_gain, s.round_up)),
             s.capacity, s.overridden
        from (select u.*, refilled_level(u.level, u.refilled_at, v_now, u.full_level, u.gain, u.every_us, u.tick) as level_now
                from (select p.name, b.key, b.level, b.refilled_at, o.key is not null as overridden,
                             case when o.key is null then p.capacity else o.capacity end as capacity,
                             case when o.key is null then p.tick else o.tick end as tick,
                             case when o.key is null then p.every_us else o.every_us end as every_us,
                             case when o.key is null then p.tick_us else o.tick_us end as tick_us,
                             case when o.key is null then p.full_level else o.full_level end as full_level,
                             case when o.key is null then p.gain else o.gain end as gain,
                             case when o.key is null then p.tick_gain else o.tick_gain end as tick_gain,
                             case when o.key is null then p.round_up else o.round_up end as round_up
                        from policies as p
                        join buckets as b on b.policy_id = p.id
                        left join overrides as o on p.overridden and o.policy_id = p.id and o.key = b.key and o.expires_at > v_now
                       where (v_name is null or p.name = v_name)
                         and (v_key is null or b.key = v_key)
                      offset 0) as u
               order by refilled_level(u.level, u.refilled_at, v_now, u.full_level, u.gain, u.every_us, u.tick) / greatest(u.full_level, 1), u.name, u.key
               limit at_most) as s
       order by s.level_now / greatest(s.full_level, 1), s.name, s.key;
  end if;
end;
$$;
comment on function ratelimit.emptiest_buckets(text, text, integer) is
  'The buckets that have rows, the emptiest first, at most at_most of them.';

-- Lists the buckets that have rows, the emptiest first: by the share of their capacity that they hold. retry_after is the
-- time until the bucket holds a token. overridden tells that the key has numbers of its own. Buckets without a row are full.
--
-- It reads every bucket: of one policy, or of one key, if given. On a standby, it lists those of durable policies; one that is ephemeral
-- is 0A000 there.
-- Locks:  nothing.
-- Writes: nothing.
create or replace function ratelimit_status(policy text default null, max_rows integer default 100, key text default null)
  returns table (policy text, key text, remaining bigint, retry_after interval, reset_after interval, capacity bigint, overridden boolean)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $3, $2);
  select * from emptiest_buckets($1, $3, $2)
$$;
comment on function ratelimit_status(text, integer, text) is
  'List the buckets that have rows, the emptiest first, at most max_rows of them; reads every bucket, or those of one key; on a standby, those of durable policies.';

-- Looks for what makes limits slow or tables large, and says what helps. Without findings all is well.
--
-- A bucket that is overdue and in use is none: clean-up skips a row that is locked. Statistics are those since they were
-- last reset. Sessions count after a minute.
--
-- On a standby it looks at what a standby can read, and at the sessions there. That it cannot look at ephemeral buckets is
-- a finding, if a policy has such.
--
-- Locks:  nothing.
-- Writes: nothing.
create or replace function ratelimit_doctor()
  returns table (severity text, finding text, remedy text)
  language plpgsql
  stable
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- the overdue rows are found by the index of the column that makes them due
as $$
declare
  v_now        constant timestamptz := clock();
  v_due_before constant timestamptz := v_now - interval '10 minutes';
  v_tables     constant regclass[]  := array['buckets'::regclass, 'ephemeral_buckets'::regclass, 'idempotency_keys'::regclass,
                                             'ephemeral_idempotency_keys'::regclass];
  v_standby    constant boolean     := pg_is_in_recovery();
  v_where      constant text        := case when v_standby then ' This server is a standby: do it on the primary.' else '' end;
begin
  return query
    select 'warning',
           format('ratelimit.buckets has %s rows overdue for clean-up, the oldest since %s.',
                  case when o.overdue = 10000 then '10000 or more' else o.overdue::text end, date_trunc('second', o.since)),
           'Clean-up does not run, or cannot keep up. Run it now: call ratelimit_cleanup_all(); and then every minute: docs/operating.md.' || v_where
      from (select count(*) as overdue, min(d.due) as since
              from (select t.due_at as due
                      from buckets as t
                     where t.due_at < v_due_before and t.refilled_at < v_due_before
                     order by t.due_at
                     limit 10000) as d) as o
     where o.overdue > 0;
  return query
    select 'warning',
           format('ratelimit.idempotency_keys has %s rows overdue for clean-up, the oldest since %s.',
                  case when o.overdue = 10000 then '10000 or more' else o.overdue::text end, date_trunc('second', o.since)),
           'Clean-up does not run, or cannot keep up. Run it now: call ratelimit_cleanup_all(); and then every minute: docs/operating.md.' || v_where
      from (select count(*) as overdue, min(d.due) as since
              from (select t.expires_at as due
                      from idempotency_keys as t
                     where t.expires_at < v_due_before
                     order by t.expires_at
                     limit 10000) as d) as o
     where o.overdue > 0;
  return query
    select 'warning',
           format('ratelimit.overrides has %s rows overdue for clean-up, the oldest since %s.',
                  case when o.overdue = 10000 then '10000 or more' else o.overdue::text end, date_trunc('second', o.since)),
           'Clean-up does not run, or cannot keep up. Run it now: call ratelimit_cleanup_all(); and then every minute: docs/operating.md.' || v_where
      from (select count(*) as overdue, min(d.due) as since
              from (select t.expires_at as due
                      from overrides as t
                     where t.expires_at < v_due_before
                     order by t.expires_at
                     limit 10000) as d) as o
     where o.overdue > 0;
  if not v_standby then
    return query
    select 'warning',
           format('ratelimit.ephemeral_buckets has %s rows overdue for clean-up, the oldest since %s.',
                  case when o.overdue = 10000 then '10000 or more' else o.overdue::text end, date_trunc('second', o.since)),
           'Clean-up does not run, or cannot keep up. Run it now: call ratelimit_cleanup_all(); and then every minute: docs/operating.md.' || v_where
      from (select count(*) as overdue, min(d.due) as since
              from (select t.due_at as due
                      from ephemeral_buckets as t
                     where t.due_at < v_due_before and t.refilled_at < v_due_before
                     order by t.due_at
                     limit 10000) as d) as o
     where o.overdue > 0;
    return query
    select 'warning',
           format('ratelimit.ephemeral_idempotency_keys has %s rows overdue for clean-up, the oldest since %s.',
                  case when o.overdue = 10000 then '10000 or more' else o.overdue::text end, date_trunc('second', o.since)),
           'Clean-up does not run, or cannot keep up. Run it now: call ratelimit_cleanup_all(); and then every minute: docs/operating.md.' || v_where
      from (select count(*) as overdue, min(d.due) as since
              from (select t.expires_at as due
                      from ephemeral_idempotency_keys as t
                     where t.expires_at < v_due_before
                     order by t.expires_at
                     limit 10000) as d) as o
     where o.overdue > 0;
  elsif exists (select from policies as p where not p.durable) then
    return query values (
      'notice',
      'This server is a standby, which cannot read the buckets and idempotency keys of ephemeral policies: overdue rows there are not found.',
      'Ask the primary, too: select * from ratelimit_doctor();');
  end if;

  return query
    select 'warning',
           format('ratelimit.%s holds %s dead row versions beside %s rows.', s.relname, s.n_dead_tup, s.n_live_tup),
           'Vacuum does not get to them, or an old snapshot keeps them: see the other findings. Then run: vacuum ratelimit.' || s.relname || ';' || v_where
      from pg_stat_all_tables as s
     where s.relid = any (v_tables)
       and s.n_dead_tup > 100000
       and s.n_dead_tup > s.n_live_tup
     order by s.relname;
  -- What a row takes up with its index entries is at most about twice its columns and 50 bytes.
  return query
    select 'warning',
           format('ratelimit.%s takes up %s, and its %s rows need less than %s.', b.relname, pg_size_pretty(b.size), b.rows, pg_size_pretty(b.needed)),
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
     where s.relid = any (v_tables[1:2])
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
  'List what makes limits slow or tables large, and what helps; no row when all is well.';

-- The release of the installed functions.
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
  'The release of pgratelimit that is installed.';


-- Which part of the keys is in this database, where more than one has them.
-- Says which of how many shards this database is. A database that is no shard has no row.
--
-- The client finds the shard of a key, and this function lets it make sure that it has found the database. No function
-- that decides looks here. The row is part of a dump and of a copy of the database: wherever the database goes, it is
-- the shard that it was.
--
-- Locks:  nothing.
-- Writes: nothing.
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
  'Say which of how many shards this database is; no row if it is none.';

-- Makes this database a shard: number shard, counted from 0, of so many, a power of two. Said again, it changes nothing.
-- Another number is refused: the keys that the database has would belong elsewhere.
--
-- Locks:  the table shard against others who define, until the caller's transaction ends. Readers do not wait.
-- Writes: shard.
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
  'Make this database one of so many shards, for life.';


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

do $twins$
declare
  v_twin text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  foreach v_twin in array array['acquire_here', 'peek_here', 'refund_here', 'reset_here', 'charge_here', 'settle_here', 'reserve_here', 'acquire_up_to_here', 'decide_here'] loop
    perform create_distributed_function(p.oid::regprocedure, 'key', colocate_with => 'ratelimit.buckets', force_delegation => true)
       from pg_proc as p
      where p.pronamespace = 'ratelimit'::regnamespace
        and p.proname = v_twin
        and not exists (select
                          from pg_dist_object as o
                         where o.classid = 'pg_proc'::regclass
                           and o.objid = p.oid
                           and o.force_delegation);
  end loop;
end;
$twins$;

-- Citus gives a node that is added all functions and their grants, but not that PUBLIC has none.
do $public$
declare
  v_function record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_function in
    select p.oid::regprocedure as signature
      from pg_proc as p
      join pg_namespace as n on n.nspname = 'ratelimit' and n.nspowner = p.proowner
     where (p.pronamespace = n.oid or starts_with(p.proname, 'ratelimit_'))
       and not exists (select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a where a.grantee = 0)
  loop
    execute format('revoke all on routine %s from public', v_function.signature);
  end loop;
end;
$public$;
commit;

-- The arithmetic of a bucket. Levels are whole microtokens and times whole microseconds, so every
-- answer is a function of integers; products go through numeric, which cannot overflow or round.
--
-- A bucket is (level, refilled_at): what it held, and when. It gains evenly, gain microtokens in every_us
-- seconds, which are a million intervals, but is credited at its ticks only, counted from refilled_at, and
-- never more than fills it. A tick is a microsecond when refill is continuous, and a whole interval when it
-- is stepped: tick_us long, worth tick_gain / every_us microtokens.
--
-- All of these are IMMUTABLE single expressions, so that the planner inlines them. An argument used
-- twice must be a column or a variable, or inlining stops.

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

-- Hours and seconds, no days: adding a day to a timestamptz may add 23 or 25 hours.
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
  'The last tick of a bucket by now, which refilled_level is good for: whole ticks after refilled_at, never before it.';

create or replace function ratelimit.refilled_level(
    level bigint, refilled_at timestamptz, now timestamptz, full_level numeric, gain numeric, every_us numeric, tick interval)
  returns bigint language sql immutable parallel safe
as $$
  select least(
    full_level,
    level + div(extract(epoch from ratelimit.refilled_until(refilled_at, now, tick) - refilled_at) * gain, every_us))::bigint
$$;
comment on function ratelimit.refilled_level(bigint, timestamptz, timestamptz, numeric, numeric, numeric, interval) is
  'The level, in microtokens, that a bucket has reached by now.';

-- Exact both ways: at this distance the bucket holds target, one microsecond earlier it does not. Only for
-- one that holds less by now: what takes or denies knows that, and spares itself the rest of wait_for.
create or replace function ratelimit.wait_below(
    target numeric, level bigint, elapsed_us numeric,
    every_us numeric, tick_us numeric, tick_gain numeric, round_up numeric)
  returns bigint language sql immutable parallel safe
as $$
  select (div((target - level) * every_us + round_up, tick_gain) * tick_us - elapsed_us)::bigint
$$;
comment on function ratelimit.wait_below(numeric, bigint, numeric, numeric, numeric, numeric, numeric) is
  'Microseconds until a bucket holds target microtokens, which it lacked elapsed_us after it was level.';

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

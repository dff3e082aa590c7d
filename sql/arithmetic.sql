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

-- For a bucket whose debt is no deeper than the floor of its policy, and whose row is not of a later clock: it is full within 21,000 years,
-- so nothing saturates. Callers that know this, and that the bucket is below target, skip the checks of wait_until. Null means never: with
-- refill 0, tick_gain is 0.
create or replace function ratelimit.short_wait(target numeric, level bigint, elapsed_us numeric, policy ratelimit.policies)
  returns bigint language sql immutable parallel safe
as $$
  select ratelimit.time_below(target, level, elapsed_us, policy.every_us, policy.tick_us, nullif(policy.tick_gain, 0), policy.round_up)::bigint
$$;
comment on function ratelimit.short_wait(numeric, bigint, numeric, ratelimit.policies) is
  'Microseconds as of time_below for a bucket whose debt is no deeper than the floor, null for never.';

-- Times saturate here, at 100,000 years of 365.25 days: an old debt may be of a policy that refilled faster.
create or replace function ratelimit.longest_wait()
  returns bigint language sql immutable parallel safe
as $$
  select 3155760000000000000
$$;
comment on function ratelimit.longest_wait() is
  'Microseconds, where waits saturate.';

-- The numbers of an override and those of its policy may be far apart, and so may the clocks of two calls.
create or replace function ratelimit.long_wait(target numeric, level bigint, elapsed_us numeric, policy ratelimit.policies)
  returns bigint language sql immutable parallel safe
as $$
  select least(ratelimit.time_below(target, level, elapsed_us, policy.every_us, policy.tick_us, nullif(policy.tick_gain, 0), policy.round_up),
               case when policy.tick_gain > 0 then ratelimit.longest_wait() end)::bigint
$$;
comment on function ratelimit.long_wait(numeric, bigint, numeric, ratelimit.policies) is
  'Microseconds as of short_wait, saturated.';

create or replace function ratelimit.time_until(at timestamptz, now timestamptz)
  returns bigint language sql immutable parallel safe
as $$
  select case when at is not null then least(ratelimit.microseconds(at - now), ratelimit.longest_wait())::bigint end
$$;
comment on function ratelimit.time_until(timestamptz, timestamptz) is
  'Microseconds from now until an instant, saturated; null for null.';

create or replace function ratelimit.wait_for(
    target numeric, level bigint, refilled_at timestamptz, now timestamptz,
    every_us numeric, tick_us numeric, tick_gain numeric, round_up numeric)
  returns bigint language sql immutable parallel safe
as $$
  select case
    when level >= target then 0
    when tick_gain > 0 then greatest(0, least(ratelimit.time_below(target, level, ratelimit.microseconds(now - refilled_at),
                                                                   every_us, tick_us, tick_gain, round_up),
                                              ratelimit.longest_wait()))::bigint
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

-- Down to wait_by_ticks, refilled and wait_until in bigint, cheaper: for policies with fill_ticks, and buckets above rate_floor. In deeper
-- debt the true level is higher. Such policies fill a bucket within 15 years, and date_part is exact for 35.
create or replace function ratelimit.credit_by_rate(elapsed_us double precision, gain bigint, per bigint, fill_ticks bigint)
  returns bigint language sql immutable parallel safe
as $$
  select least(elapsed_us::bigint, fill_ticks) * gain / per
$$;
comment on function ratelimit.credit_by_rate(double precision, bigint, bigint, bigint) is
  'The microtokens that a bucket gained since it was written, not later than now, if its tick is a microsecond.';

create or replace function ratelimit.level_by_ticks(
    level bigint, refilled_at timestamptz, now timestamptz, full_level bigint, gain bigint, per bigint, fill_ticks bigint, tick_us bigint)
  returns bigint language sql immutable parallel safe
as $$
  select least(
    full_level, level + least((date_part('epoch', greatest(now, refilled_at) - refilled_at) * 1000000)::bigint / tick_us, fill_ticks) * gain / per)
$$;
comment on function ratelimit.level_by_ticks(bigint, timestamptz, timestamptz, bigint, bigint, bigint, bigint, bigint) is
  'The level of a bucket now.';

create or replace function ratelimit.ticks_below(target bigint, level bigint, gain bigint, per bigint, up bigint)
  returns bigint language sql immutable parallel safe
as $$
  select ((target - level) * per + up) / gain
$$;
comment on function ratelimit.ticks_below(bigint, bigint, bigint, bigint, bigint) is
  'The ticks until a bucket below target holds it; null for never.';

create or replace function ratelimit.wait_by_ticks(
    target bigint, level bigint, elapsed_us bigint, gain bigint, per bigint, up bigint, tick_us bigint)
  returns bigint language sql immutable parallel safe
as $$
  select least(ratelimit.ticks_below(target, level, gain, per, up) * tick_us - elapsed_us, case when gain > 0 then ratelimit.longest_wait() end)
$$;
comment on function ratelimit.wait_by_ticks(bigint, bigint, bigint, bigint, bigint, bigint, bigint) is
  'Microseconds until a bucket below target holds it, if it held level elapsed_us ago, saturated; null for never.';

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

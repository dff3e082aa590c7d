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
  returns ratelimit.calendar language plpgsql immutable
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
  returns ratelimit.policies language plpgsql immutable
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
  returns ratelimit.policies language plpgsql immutable
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
  returns bigint language plpgsql immutable
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
  returns ratelimit.calendar language plpgsql immutable
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
  returns ratelimit.policies language plpgsql stable
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

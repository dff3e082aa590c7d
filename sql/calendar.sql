-- Quotas: buckets that are full at each turn of a calendar, and gain nothing in between.
--
-- Turn n is the anchor and n periods, a local time of the time zone, for every whole n. Each is counted from the anchor: a month after
-- 31 January is 28 February, and two months are 31 March. So nothing runs at a turn: a call finds out which turns are around it.
--
-- The row of a quota's bucket has a level of 0 microtokens or less: what was used, and not what is there. refilled_at is the last write. Nothing
-- is used if a turn lies after that. So another capacity keeps what was used, and another calendar fills nothing by itself.
--
-- Names are qualified: Citus calls the functions on other nodes.
create or replace function ratelimit.turning(period interval, months integer, time_zone text, anchor timestamp, at timestamptz)
  returns ratelimit.turns language plpgsql immutable
as $$
declare
  v_local timestamp := at at time zone time_zone;
  v_turn  integer;
  v_turns ratelimit.turns;
begin
  -- The last turn by local time. It may be one off; the instants decide.
  v_turn := case
              when months > 0 then
                floor((12 * (date_part('year', v_local) - date_part('year', anchor))
                       + date_part('month', v_local) - date_part('month', anchor)) / months)
              else floor(date_part('epoch', v_local - anchor) / date_part('epoch', period))
            end::integer;
  loop
    v_turns.turned_at := (anchor + v_turn * period) at time zone time_zone;
    v_turns.turns_at  := (anchor + (v_turn + 1) * period) at time zone time_zone;
    exit when at >= v_turns.turned_at and at < v_turns.turns_at;
    v_turn := v_turn + case when at < v_turns.turned_at then -1 else 1 end;
  end loop;
  return v_turns;
end;
$$;
comment on function ratelimit.turning(interval, integer, text, timestamp, timestamptz) is
  'The turns of a calendar around an instant; months is the period in months, or 0.';

create or replace function ratelimit.turns_of(policy ratelimit.policies, at timestamptz)
  returns ratelimit.turns language sql immutable parallel safe
as $$
  select case when policy.kind = 'quota' then ratelimit.turning(policy.period, policy.months, policy.time_zone, policy.anchor, at) end
$$;
comment on function ratelimit.turns_of(ratelimit.policies, timestamptz) is
  'The turns of a quota around an instant; null for another policy.';

create or replace function ratelimit.used_level(level bigint, refilled_at timestamptz, turned_at timestamptz)
  returns bigint language sql immutable parallel safe
as $$
  select case when refilled_at < turned_at then 0 else level end
$$;
comment on function ratelimit.used_level(bigint, timestamptz, timestamptz) is
  'The stored level of a quota''s bucket now: what is used of the period that runs, in microtokens, as 0 or less.';

create or replace function ratelimit.level_now(level bigint, refilled_at timestamptz, now timestamptz, policy ratelimit.policies, turns ratelimit.turns)
  returns bigint language sql immutable parallel safe
as $$
  select case
    when policy.kind <> 'quota' then ratelimit.refilled(level, refilled_at, now, policy)
    else policy.full_level::bigint + ratelimit.used_level(level, refilled_at, turns.turned_at)
  end
$$;
comment on function ratelimit.level_now(bigint, timestamptz, timestamptz, ratelimit.policies, ratelimit.turns) is
  'The level of a bucket now, in microtokens, from its row.';

create or replace function ratelimit.stored_level(level bigint, policy ratelimit.policies)
  returns bigint language sql immutable parallel safe
as $$
  select level - case when policy.kind = 'quota' then policy.full_level else 0 end::bigint
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
create or replace function ratelimit.filling(quota ratelimit.policies, turns ratelimit.turns, refilled_at timestamptz)
  returns ratelimit.policies language plpgsql immutable
as $$
begin
  if refilled_at < turns.turned_at then
    quota.gain     := 20000000000000000000000000;  -- 2 * 10^19 microtokens each microsecond: more than any bucket lacks
    quota.every_us := 1;
  end if;
  return quota;
end;
$$;
comment on function ratelimit.filling(ratelimit.policies, ratelimit.turns, timestamptz) is
  'The numbers by which refilled tells the level of a quota''s bucket.';

create or replace function ratelimit.wait_for_turn(
    tokens bigint, level bigint, refilled_at timestamptz, now timestamptz, quota ratelimit.policies, turns ratelimit.turns)
  returns bigint language plpgsql immutable
as $$
begin
  if quota.full_level + ratelimit.used_level(level, refilled_at, turns.turned_at) >= coalesce(ratelimit.microtokens(tokens), quota.full_level) then
    return bigint '0';
  elsif refilled_at > now then  -- by a clock that was ahead
    turns := ratelimit.turns_of(quota, refilled_at);
  end if;
  return ratelimit.time_until(turns.turns_at, now);
end;
$$;
comment on function ratelimit.wait_for_turn(bigint, bigint, timestamptz, timestamptz, ratelimit.policies, ratelimit.turns) is
  'Microseconds until the bucket of a quota holds tokens; null tokens are a full bucket.';

-- A zone that an older tzdata had must not stop clean-up, which looks again in a day.
create or replace function ratelimit.quota_unused_after(quota ratelimit.policies, level bigint, refilled_at timestamptz, now timestamptz)
  returns bigint language plpgsql immutable
as $$
declare
  v_turns ratelimit.turns;
begin
  v_turns := ratelimit.turns_of(quota, now);
  return case when ratelimit.used_level(level, refilled_at, v_turns.turned_at) = 0 then 0 else ratelimit.time_until(v_turns.turns_at, now) end;
exception when invalid_parameter_value then
  return case when level = 0 then 0 else 86400000000 end;
end;
$$;
comment on function ratelimit.quota_unused_after(ratelimit.policies, bigint, timestamptz, timestamptz) is
  'Microseconds until clean-up looks at the bucket of a quota; 0 if nothing of it is used.';

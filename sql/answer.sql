-- A short form of answer_of: after a grant, retry_after is 0 and the level is not below 0.
create or replace function ratelimit.grant_of(level bigint, reset_us bigint, capacity bigint)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (true, ratelimit.tokens_above_debt(level), interval '0', ratelimit.duration(reset_us), capacity, false, false)::ratelimit.decision
$$;
comment on function ratelimit.grant_of(bigint, bigint, bigint) is
  'The decision of a grant, from the level that it left and the microseconds until the bucket is full.';

-- For plain policies.
create or replace function ratelimit.granted_by_rate(
    level_now bigint, level bigint, elapsed_us double precision, capacity bigint, full_level bigint, gain bigint, per bigint, up bigint)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (true, ratelimit.tokens_above_debt(level_now), interval '0',
          ratelimit.short_duration(ratelimit.ticks_below(full_level, level, gain, per, up) - elapsed_us),
          capacity, false, false)::ratelimit.decision
$$;
comment on function ratelimit.granted_by_rate(bigint, bigint, double precision, bigint, bigint, bigint, bigint, bigint) is
  'The decision of a grant, from the bucket that it left.';

-- The level may be below zero, so it is rounded from below the deepest debt.
create or replace function ratelimit.denied_by_rate(
    cost bigint, level_now bigint, level bigint, elapsed_us double precision, capacity bigint, full_level bigint, gain bigint, per bigint, up bigint)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (false, (level_now + 9000000000000000000) / 1000000 - 9000000000000,
          ratelimit.short_duration(ratelimit.ticks_below(ratelimit.microtokens(cost), level, gain, per, up) - elapsed_us),
          ratelimit.short_duration(ratelimit.ticks_below(full_level, level, gain, per, up) - elapsed_us),
          capacity, false, false)::ratelimit.decision
$$;
comment on function ratelimit.denied_by_rate(bigint, bigint, bigint, double precision, bigint, bigint, bigint, bigint, bigint) is
  'The decision of a denial, from the level now, and the bucket as it is stored and since when.';

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
  select case when granted.ready_at > now then ratelimit.time_until(granted.ready_at, now) else 0 end
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
    perform ratelimit.refuse_slots(p.name) from ratelimit.policies as p where p.name = refusal.policy collate "C" and p.kind = 'slots';
    perform ratelimit.refuse_unknown(policy);
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

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

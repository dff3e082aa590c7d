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
  v_policy ratelimit.policies;
begin
  if not acceptable(key, cost) then
    perform check_request(policy, key, cost, null);  -- raises 22023
  end if;
  v_policy := p from policies as p where p.name = policy collate "C";
  if v_policy.durable is not true then
    if v_policy.id is null or pg_is_in_recovery() then
      perform refuse_policy(policy, v_policy);  -- raises RL001 or 0A000
    end if;
    return peek_ephemeral(v_policy, key, cost);  -- what follows, on the twin tables
  end if;

  declare
    v_key         alias for key;
    v_cost        alias for cost;
    v_now         timestamptz := clock();
    v_level       bigint;       -- microtokens in the bucket
    v_level_now   bigint;       -- likewise, with the refill until now
    v_refilled_at timestamptz;  -- when it held v_level
    v_elapsed_us  double precision;  -- microseconds since then
    v_retry_us    bigint;
    v_reset_us    bigint;
    v_override    ratelimit.overrides;
    v_numbers     ratelimit.numbers;
    v_look        record;       -- at slots
  begin
    if v_policy.special then
      if v_policy.kind = 'slots' then
        select l.* into v_look from look_at_slots(v_policy, v_key, v_now, v_cost, null) as l;
        return (coalesce(v_look.retry_us = 0, false), v_look.capacity - v_look.held, duration(v_look.retry_us), duration(v_look.reset_us),
                v_look.capacity, false, false)::ratelimit.decision;
      end if;
      v_override := o from overrides as o where o.policy_id = v_policy.id and o.key = v_key collate "C";
      if v_override.key is not null then
        v_numbers := numbers_by(v_policy, v_override, v_now);
        v_policy  := v_numbers.policy;
      end if;
      if v_policy.kind = 'quota' or v_numbers.ends_at is not null then
        select b.level, b.retry_us, b.reset_us into v_level, v_retry_us, v_reset_us from look_past_end_in_buckets(v_policy, v_numbers.ends_at, v_numbers.after, v_key, v_now, v_cost) as b;
        return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
      end if;
    end if;
    select b.level, b.refilled_at into v_level, v_refilled_at from buckets as b where b.policy_id = v_policy.id and b.key = v_key collate "C";
    if v_level is null then  -- full
      v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
      return answer_of(microtokens(v_policy.capacity), v_retry_us, 0, v_policy.capacity);
    elsif v_policy.plain and v_cost between 1 and v_policy.capacity and v_level > v_policy.rate_floor and v_refilled_at <= v_now then
      v_elapsed_us := date_part('epoch', v_now - v_refilled_at) * 1000000;
      v_level_now  := least(v_policy.rate_full, v_level + credit_by_rate(v_elapsed_us, v_policy.rate_gain, v_policy.rate_per, v_policy.fill_ticks));
      if v_level_now < microtokens(v_cost) then
        return denied_by_rate(v_cost, v_level_now, v_level, v_elapsed_us, v_policy.capacity, v_policy.rate_full, v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up);
      elsif v_level_now < v_policy.rate_full then
        return granted_by_rate(v_level_now, v_level, v_elapsed_us, v_policy.capacity, v_policy.rate_full, v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up);
      end if;
    end if;
    v_retry_us := case
                    when v_cost = 0 then 0::bigint
                    when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), v_level, v_refilled_at, v_now, v_policy)
                  end;
    v_reset_us := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
    v_level    := refilled(v_level, v_refilled_at, v_now, v_policy);
    return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
  end;
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

-- The level of a bucket, in microtokens, and the microseconds until it is full; null is never. policy has the numbers that
-- apply to the key until ends_at, and after those that apply then.
create or replace function ratelimit.level_of_buckets(
    in policy ratelimit.policies, in ends_at timestamptz, in after ratelimit.policies, in key text, in now timestamptz,
    out level bigint, out reset_us bigint)
  language plpgsql stable
as $$
declare
  v_key text collate "C" := key;
begin
  if policy.kind = 'quota' or ends_at is not null then
    select b.level, b.reset_us into level, reset_us from look_past_end_in_buckets(policy, ends_at, after, v_key, now, 0) as b;
  else
    select refilled(b.level, b.refilled_at, now, policy), wait_until(policy.full_level, b.level, b.refilled_at, now, policy)
      into level, reset_us
      from buckets as b
     where b.policy_id = policy.id
       and b.key       = v_key;
  end if;
  if not found then  -- full
    level    := microtokens(policy.capacity);
    reset_us := 0;
  end if;
end;
$$;
comment on function ratelimit.level_of_buckets(ratelimit.policies, timestamptz, ratelimit.policies, text, timestamptz) is
  'What a bucket holds, and how long until it is full.';

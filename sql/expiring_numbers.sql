-- An override is the numbers of a policy for one key. It is live until it expires. ratelimit.overrides has the derived
-- columns of ratelimit.policies, so the arithmetic takes them from either.
--
-- Nothing looks for an override unless the policy's column overridden says that it has had some. So a policy without them pays nothing.
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
  returns bigint language plpgsql immutable
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
  returns bigint language plpgsql immutable
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
  select case when isfinite((numbers.calendar).ends_at) then least(ratelimit.microseconds((numbers.calendar).ends_at - now), ratelimit.longest_wait())::bigint end
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
  language plpgsql stable
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
    if pg_is_in_recovery() then perform refuse_ephemeral(numbers); end if;  -- raises 0A000
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
  returns ratelimit.policies language plpgsql stable
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

-- A call that may have waited for a session that changed the numbers reads them again, if the policy has overrides or the bucket has no
-- row. A policy that was dropped meanwhile stays as it was.
create or replace function ratelimit.numbers_again(policy ratelimit.policies, key text, now timestamptz)
  returns ratelimit.policies language plpgsql stable
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

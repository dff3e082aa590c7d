-- An override is the numbers of a policy for one key. It is live until it expires. ratelimit.overrides has the derived
-- columns of ratelimit.policies, so the arithmetic takes them from either.
--
-- Nothing looks for an override unless the policy's column overridden says that it has had some. So a policy without them pays nothing.
create or replace function ratelimit.with_override(policy ratelimit.policies, override ratelimit.overrides)
  returns ratelimit.policies language sql immutable parallel safe
as $$
  select row(policy.id, policy.name, override.capacity, override.refill, override.every, policy.stepped, policy.durable, policy.remember,
             policy.shadow, policy.overridden, policy.period, override.time_zone, override.anchor, override.lease,
             override.tick, override.every_us, override.tick_us, override.full_level, override.gain, override.tick_gain, override.round_up,
             policy.remember_us, policy.months, policy.kind, policy.special)::ratelimit.policies
$$;
comment on function ratelimit.with_override(ratelimit.policies, ratelimit.overrides) is
  'A policy with the numbers of an override.';

-- A wait by the numbers of an override holds if it is over before they end. From then on the numbers of the policy apply, to the
-- bucket as it is stored: the wait is the later of the end and the wait by them. level and refilled_at are null for a bucket without
-- a row, which is full by the numbers that apply. policy has the numbers that apply to the key, ends_at is when they end (null: they
-- do not), turns are those of a quota, and own is the policy without the numbers of an override. Names are qualified: Citus calls the
-- functions on other nodes.
create or replace function ratelimit.wait_past_end(
    tokens bigint, level bigint, refilled_at timestamptz, now timestamptz,
    policy ratelimit.policies, ends_at timestamptz, turns ratelimit.turns, own ratelimit.policies)
  returns bigint language plpgsql immutable
as $$
declare
  v_wait_us bigint := ratelimit.own_wait(tokens, level, refilled_at, now, policy, turns);
begin
  if ends_at is null or v_wait_us < ratelimit.time_until(ends_at, now) then
    return v_wait_us;
  end if;
  return ratelimit.wait_after_end(tokens, level, refilled_at, now, ends_at, own);
end;
$$;
comment on function ratelimit.wait_past_end(bigint, bigint, timestamptz, timestamptz, ratelimit.policies, timestamptz, ratelimit.turns, ratelimit.policies) is
  'Microseconds until a bucket holds tokens, where an override may end first; null tokens are a full bucket, and null is never.';

create or replace function ratelimit.wait_after_end(
    tokens bigint, level bigint, refilled_at timestamptz, now timestamptz, ends_at timestamptz, own ratelimit.policies)
  returns bigint language plpgsql immutable
as $$
declare
  v_wait_us bigint := ratelimit.own_wait(tokens, level, refilled_at, now, own, ratelimit.turns_of(own, now));
begin
  return case when v_wait_us is not null then greatest(v_wait_us, ratelimit.time_until(ends_at, now)) end;
end;
$$;
comment on function ratelimit.wait_after_end(bigint, bigint, timestamptz, timestamptz, timestamptz, ratelimit.policies) is
  'Microseconds until a bucket holds tokens by the numbers of its policy, once an override has ended; as of wait_past_end.';

create or replace function ratelimit.own_wait(
    tokens bigint, level bigint, refilled_at timestamptz, now timestamptz, policy ratelimit.policies, turns ratelimit.turns)
  returns bigint language sql immutable parallel safe
as $$
  select case
    when tokens > policy.capacity then null
    when level is null then 0
    when policy.kind = 'quota' then ratelimit.wait_for_turn(tokens, level, refilled_at, now, policy, turns)
    else ratelimit.wait_until(coalesce(ratelimit.microtokens(tokens), policy.full_level), level, refilled_at, now, policy)
  end
$$;
comment on function ratelimit.own_wait(bigint, bigint, timestamptz, timestamptz, ratelimit.policies, ratelimit.turns) is
  'Microseconds until a bucket holds tokens by the numbers of a policy, as of wait_past_end.';

-- The bucket of a key of a quota, or of one whose override has an end, as of one snapshot.
create or replace function ratelimit.look_past_end(
    in policy ratelimit.policies, in ends_at timestamptz, in key text, in now timestamptz, in tokens bigint,
    out level bigint, out retry_us bigint, out reset_us bigint)
  language plpgsql stable
as $$
declare
  v_policy alias for policy;
  v_key    text collate "C" := key;
  v_own    ratelimit.policies;
  v_turns  ratelimit.turns := turns_of(policy, now);
  v_bucket ratelimit.buckets;
begin
  if ends_at is not null then
    v_own := policy_now(policy);
  end if;
  if v_policy.durable then
    select b.* into v_bucket from buckets as b where b.policy_id = v_policy.id and b.key = v_key;
  else
    if pg_is_in_recovery() then perform refuse_ephemeral(v_policy); end if;  -- raises 0A000
    select b.* into v_bucket from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = v_key;
  end if;
  level    := case when v_bucket.level is null then microtokens(v_policy.capacity) else level_now(v_bucket.level, v_bucket.refilled_at, now, v_policy, v_turns) end;
  retry_us := case when tokens = 0 then 0 else wait_past_end(tokens, v_bucket.level, v_bucket.refilled_at, now, v_policy, ends_at, v_turns, v_own) end;
  reset_us := wait_past_end(null, v_bucket.level, v_bucket.refilled_at, now, v_policy, ends_at, v_turns, v_own);
end;
$$;
comment on function ratelimit.look_past_end(ratelimit.policies, timestamptz, text, timestamptz, bigint) is
  'The level of a bucket now, and the waits for tokens and until it is full, where an override may end first.';

create or replace function ratelimit.policy_now(policy ratelimit.policies)
  returns ratelimit.policies language plpgsql stable
as $$
declare
  v_policy ratelimit.policies;
begin
  select p.* into v_policy from ratelimit.policies as p where p.id = policy.id;
  if not found then
    return policy;  -- dropped meanwhile
  end if;
  return v_policy;
end;
$$;
comment on function ratelimit.policy_now(ratelimit.policies) is
  'The policy of a key as it is now, without the numbers of an override; it stays as it was if it was dropped.';

-- What applies to a key: the policy with the numbers of the override that is live, when these end, and the turns of a quota.
create or replace function ratelimit.numbers_of_key(policy ratelimit.policies, key text, now timestamptz)
  returns ratelimit.numbers language plpgsql stable
as $$
declare
  v_override ratelimit.overrides;
  v_key      text collate "C" := key;
begin
  if policy.overridden then
    select o.* into v_override from ratelimit.overrides as o where o.policy_id = policy.id and o.key = v_key and o.expires_at > now;
    if found then
      policy := ratelimit.with_override(policy, v_override);
    end if;
  end if;
  return (policy, nullif(v_override.expires_at, 'infinity'), ratelimit.turns_of(policy, now))::ratelimit.numbers;
end;
$$;
comment on function ratelimit.numbers_of_key(ratelimit.policies, text, timestamptz) is
  'The numbers of a policy that apply to a key.';

-- A call that may have waited for a session that changed the numbers reads them again, if the policy is special or the bucket has no
-- row.
create or replace function ratelimit.numbers_now(policy ratelimit.policies, key text, now timestamptz)
  returns ratelimit.numbers language sql stable
as $$
  select ratelimit.numbers_of_key(ratelimit.policy_now(policy), key, now)
$$;
comment on function ratelimit.numbers_now(ratelimit.policies, text, timestamptz) is
  'The numbers that apply to a key, by the policy as it is now; a policy that was dropped stays as it was.';

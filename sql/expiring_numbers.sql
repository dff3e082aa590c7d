-- An override is a patch of the numbers of a policy for one key. One part of it stays, and one ends at expires_at. Each number applies as
-- the part that ends has it until then, else as the part that stays has it, else as the policy has it. refill and every are one number.
--
-- Nothing looks for an override unless the policy's column overridden says that it has had some. So a policy without them pays nothing.
create or replace function ratelimit.with_override(policy ratelimit.policies, override ratelimit.overrides, at timestamptz)
  returns ratelimit.policies language plpgsql immutable
as $$
begin
  if at < override.expires_at then
    override.capacity := coalesce(override.ending_capacity, override.capacity);
    override.refill   := coalesce(override.ending_refill, override.refill);
    override.every    := coalesce(override.ending_every, override.every);
    override.lease    := coalesce(override.ending_lease, override.lease);
  end if;
  if override.capacity is not null then
    policy.capacity   := override.capacity;
    policy.full_level := override.capacity * numeric '1000000';
  end if;
  if override.refill is not null then
    policy.refill   := override.refill;
    policy.every    := override.every;
    policy.every_us := ratelimit.microseconds(override.every);
    if policy.stepped then
      policy.tick    := override.every;
      policy.tick_us := policy.every_us;
    end if;
    policy.gain      := override.refill * numeric '1000000000000';
    policy.tick_gain := ratelimit.microtokens(override.refill) * policy.tick_us;
    policy.round_up  := policy.tick_gain - 1;
  end if;
  if override.time_zone is not null then
    policy.time_zone := override.time_zone;
  end if;
  if override.anchor is not null then
    policy.anchor := override.anchor;
  end if;
  if override.lease is not null then
    policy.lease := override.lease;
  end if;
  return policy;
end;
$$;
comment on function ratelimit.with_override(ratelimit.policies, ratelimit.overrides, timestamptz) is
  'A policy with the numbers that an override has at an instant; at infinity, those that stay.';

create or replace function ratelimit.numbers_by(policy ratelimit.policies, override ratelimit.overrides, at timestamptz)
  returns ratelimit.numbers language sql immutable parallel safe
as $$
  select row(ratelimit.with_override(policy, override, at), case when override.expires_at > at then override.expires_at end, null,
             case when override.expires_at > at then ratelimit.with_override(policy, override, 'infinity') end)::ratelimit.numbers
$$;
comment on function ratelimit.numbers_by(ratelimit.policies, ratelimit.overrides, timestamptz) is
  'The numbers that apply to a key at an instant, by its override; without the turns of a quota.';

-- A wait by the numbers of an override holds if it is over before they end. From then on what stays applies, to the
-- bucket as it is stored: the wait is the later of the end and the wait by that. level and refilled_at are null for a bucket without
-- a row, which is full by the numbers that apply. policy has the numbers that apply to the key, ends_at is when some end (null: none
-- does), turns are those of a quota, and after has the numbers that apply then. Names are qualified: Citus calls the
-- functions on other nodes.
create or replace function ratelimit.wait_past_end(
    tokens bigint, level bigint, refilled_at timestamptz, now timestamptz,
    policy ratelimit.policies, ends_at timestamptz, turns ratelimit.turns, after ratelimit.policies)
  returns bigint language plpgsql immutable
as $$
declare
  v_wait_us bigint := ratelimit.own_wait(tokens, level, refilled_at, now, policy, turns);
begin
  if ends_at is null or v_wait_us < ratelimit.time_until(ends_at, now) then
    return v_wait_us;
  end if;
  return ratelimit.wait_after_end(tokens, level, refilled_at, now, ends_at, after);
end;
$$;
comment on function ratelimit.wait_past_end(bigint, bigint, timestamptz, timestamptz, ratelimit.policies, timestamptz, ratelimit.turns, ratelimit.policies) is
  'Microseconds until a bucket holds tokens, where an override may end first; null tokens are a full bucket, and null is never.';

create or replace function ratelimit.wait_after_end(
    tokens bigint, level bigint, refilled_at timestamptz, now timestamptz, ends_at timestamptz, after ratelimit.policies)
  returns bigint language plpgsql immutable
as $$
declare
  v_wait_us bigint := ratelimit.own_wait(tokens, level, refilled_at, now, after, ratelimit.turns_of(after, now));
begin
  return case when v_wait_us is not null then greatest(v_wait_us, ratelimit.time_until(ends_at, now)) end;
end;
$$;
comment on function ratelimit.wait_after_end(bigint, bigint, timestamptz, timestamptz, timestamptz, ratelimit.policies) is
  'Microseconds until a bucket holds tokens by the numbers that apply once a part of its override has ended; as of wait_past_end.';

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

-- The bucket of a key of a quota, or of one of whose override a part ends, as of one snapshot.
create or replace function ratelimit.look_past_end_in_buckets(
    in policy ratelimit.policies, in ends_at timestamptz, in after ratelimit.policies, in key text, in now timestamptz, in tokens bigint,
    out level bigint, out retry_us bigint, out reset_us bigint)
  language plpgsql stable
as $$
declare
  v_policy alias for policy;
  v_key    text collate "C" := key;
  v_turns  ratelimit.turns := turns_of(policy, now);
  v_bucket ratelimit.buckets;
begin
  select b.* into v_bucket from buckets as b where b.policy_id = v_policy.id and b.key = v_key;
  level    := case when v_bucket.level is null then microtokens(v_policy.capacity) else level_now(v_bucket.level, v_bucket.refilled_at, now, v_policy, v_turns) end;
  retry_us := case when tokens = 0 then 0 else wait_past_end(tokens, v_bucket.level, v_bucket.refilled_at, now, v_policy, ends_at, v_turns, after) end;
  reset_us := wait_past_end(null, v_bucket.level, v_bucket.refilled_at, now, v_policy, ends_at, v_turns, after);
end;
$$;
comment on function ratelimit.look_past_end_in_buckets(ratelimit.policies, timestamptz, ratelimit.policies, text, timestamptz, bigint) is
  'The level of a bucket now, and the waits for tokens and until it is full, where an override may end first.';

create or replace function ratelimit.policy_now(policy ratelimit.policies)
  returns ratelimit.policies language plpgsql stable
as $$
declare
  v_policy ratelimit.policies;
begin
  v_policy := p from ratelimit.policies as p where p.id = policy.id;
  if v_policy.id is null then
    return policy;  -- dropped meanwhile
  end if;
  return v_policy;
end;
$$;
comment on function ratelimit.policy_now(ratelimit.policies) is
  'The policy of a key as it is now, without the numbers of an override; it stays as it was if it was dropped.';

-- What applies to a key: the policy with the numbers of its override, when a part of these ends, the turns of a quota, and what applies then.
create or replace function ratelimit.numbers_of_key(policy ratelimit.policies, key text, now timestamptz)
  returns ratelimit.numbers language plpgsql stable
as $$
declare
  v_override ratelimit.overrides;
  v_numbers  ratelimit.numbers;
  v_key      text collate "C" := key;
begin
  v_numbers.policy := policy;
  if policy.overridden then
    v_override := o from ratelimit.overrides as o where o.policy_id = policy.id and o.key = v_key;
    if v_override.key is not null then
      v_numbers := ratelimit.numbers_by(policy, v_override, now);
    end if;
  end if;
  v_numbers.turns := ratelimit.turns_of(v_numbers.policy, now);
  return v_numbers;
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

-- An override is the numbers of a policy for one key. It is live until it expires. ratelimit.overrides has the derived
-- columns of ratelimit.policies, so the arithmetic takes them from either.
--
-- Nothing looks for an override unless the policy's column overridden says that it has had some. So a policy without them
-- pays nothing.
create or replace function ratelimit.with_override(policy ratelimit.policies, override ratelimit.overrides)
  returns ratelimit.policies language sql immutable parallel safe
as $$
  select row(policy.id, policy.name, override.capacity, override.refill, override.every, policy.stepped, policy.durable, policy.remember,
             override.tick, override.every_us, override.tick_us, override.full_level, override.gain, override.tick_gain, override.round_up,
             policy.remember_us, policy.overridden, policy.shadow)::ratelimit.policies
$$;
comment on function ratelimit.with_override(ratelimit.policies, ratelimit.overrides) is
  'A policy with the numbers of an override.';

-- A call that may have waited for a session that changed the numbers reads them again, if the policy has overrides or the bucket has
-- no row. A policy that was dropped meanwhile stays
-- as it was.
create or replace function ratelimit.numbers_again(policy ratelimit.policies, key text, now timestamptz)
  returns ratelimit.policies
  language plpgsql
  stable
as $$
declare
  v_policy   ratelimit.policies;
  v_override ratelimit.overrides;
  v_key      text collate "C" := key;
begin
  select p.* into v_policy from policies as p where p.id = policy.id;
  if not found then
    return policy;
  end if;
  if v_policy.overridden then
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

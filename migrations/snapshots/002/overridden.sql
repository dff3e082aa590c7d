-- An override is the numbers of a policy for one key. It is live until it expires. ratelimit.overrides has the derived
-- columns of ratelimit.policies, so the arithmetic takes them from either.
--
-- Nothing looks for an override unless the policy's column overridden says that it has some. So a policy without them
-- pays nothing.
create or replace function ratelimit.overridden(policy ratelimit.policies, override ratelimit.overrides)
  returns ratelimit.policies language sql immutable parallel safe
as $$
  select row(policy.id, policy.name, override.capacity, override.refill, override.every, policy.stepped, policy.durable, policy.remember,
             override.tick, override.every_us, override.tick_us, override.full_level, override.gain, override.tick_gain, override.round_up,
             policy.remember_us, policy.overridden, policy.shadow)::ratelimit.policies
$$;
comment on function ratelimit.overridden(ratelimit.policies, ratelimit.overrides) is
  'A policy with the numbers of an override.';

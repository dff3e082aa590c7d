-- The steps of ratelimit_acquire for functions of this package, which know the policy, and do not depend on the schema of the public
-- functions.
create or replace function ratelimit.acquire(v_policy ratelimit.policies, key text, cost bigint, idempotency_key text)
  returns ratelimit.decision
  language plpgsql
  volatile
as $$
begin
  if not v_policy.durable then
    return acquire_ephemeral(v_policy, key, cost, idempotency_key);
  end if;
  {{ template "acquire_steps" (dict "buckets" "buckets" "idempotency_keys" "idempotency_keys") }}
end;
$$;
comment on function ratelimit.acquire(ratelimit.policies, text, bigint, text) is
  'The steps of ratelimit_acquire, for the guards.';

-- Takes cost tokens from one bucket as ratelimit_acquire does, and raises RL429 where that would answer with a denial.
-- So it can stand in a function, a trigger or a policy of row level security, where nobody looks at an answer.
--
-- The error rolls back the statement, or what the caller rolls back with it, and with it what the statement took before.
--
-- Locks and writes: as ratelimit_acquire.
create or replace function ratelimit_enforce(
    policy          text,
    key             text,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy   policies;
  v_decision decision;
begin
  if not acceptable(key, cost) or idempotency_key is not null then
    if (acceptable(key, cost) and is_name(idempotency_key)) is not true then
      perform check_request(policy, key, cost, idempotency_key);  -- raises 22023
    end if;
    if cost = 0 then
      idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;
  v_decision := acquire(v_policy, key, cost, idempotency_key);
  if not v_decision.allowed then
    perform rate_limit_exceeded(policy, cost, v_decision, false);
  end if;
  return v_decision;
end;
$$;
comment on function ratelimit_enforce(text, text, bigint, text) is
  'Take cost tokens from a bucket as ratelimit_acquire does, or raise RL429.';

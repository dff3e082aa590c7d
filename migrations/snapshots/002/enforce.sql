-- ratelimit_acquire for functions of this package, which do not depend on the schema of the public ones.
create or replace function ratelimit.acquire(policy text, key text, cost bigint, idempotency_key text)
  returns ratelimit.decision
  language plpgsql
  volatile
as $$
{{ template "acquire" "acquire" }}
$$;
comment on function ratelimit.acquire(text, text, bigint, text) is
  'What ratelimit_acquire does, for the guards.';

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
  v_decision decision := acquire(policy, key, cost, ratelimit_enforce.idempotency_key);
begin
  if not v_decision.allowed then
    perform rate_limit_exceeded(policy, cost, v_decision, false);
  end if;
  return v_decision;
end;
$$;
comment on function ratelimit_enforce(text, text, bigint, text) is
  'Take cost tokens from a bucket as ratelimit_acquire does, or raise RL429.';

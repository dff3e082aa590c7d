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
  v_policy := p from policies as p where p.name = policy collate "C";
  if v_policy.id is null then
    perform refuse_unknown(policy);
  end if;
  v_decision := acquire(v_policy, key, cost, idempotency_key);
  if not v_decision.allowed then
    perform rate_limit_exceeded(policy, cost, v_decision, false);
  end if;
  return v_decision;
end;
$$;
comment on function ratelimit_enforce(text, text, bigint, text) is
'Takes cost tokens as ratelimit_acquire does, and raises RL429 in place of a denial.
It can stand in a function, a trigger or a policy of row level security, where a denial would go unread.
cost: as in ratelimit_acquire.
idempotency_key: as in ratelimit_acquire.
Errors: RL429 for a denial, 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key
  that was granted with another cost, RL004 for a live idempotency key whose grant was settled, 25006 in a read-only
  transaction. DETAIL of RL429 is a JSON object with policy, cost, remaining, retry_after (in seconds, or null) and
  capacity. It never has the key. In a request of PostgREST the SQLSTATE is PGRST, and the response has status 429.
Locks: as ratelimit_acquire. The rollback after RL429 releases them.
Writes: as ratelimit_acquire.
Role: application.';

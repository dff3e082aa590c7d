-- Takes as many whole tokens as one bucket has, at_most, and says how many it took. If it has fewer than at_least, it takes
-- none: that is a denial, whose retry_after is the time until at_least are there.
--
-- The grant is remembered under the idempotency key with what was taken, and ratelimit_acquire knows it as a grant of that
-- cost. A repeat takes nothing, and answers the same taken; if that is not between its own at_least and at_most, it is RL002.
-- A shadow policy answers at_most for every grant, though it takes what enforcing it would.
--
-- The steps are those of ratelimit_acquire for at_most tokens, in include/decide.sql, but for one: if the update took nothing and
-- the bucket was read, and it has at_least, all its whole tokens are taken, from the bucket as it was read. If another session
-- has changed it since, the next round reads it again. So taken is what the locked row had.
--
-- Locks:  a grant holds the bucket row, and then the row of the idempotency key, until the caller's transaction ends. A denial
--         and a replay hold the bucket row only if they had to wait for it.
-- Writes: a grant writes the bucket and its idempotency key. A denial and a replay write nothing.
create or replace function ratelimit_acquire_up_to(
    policy          text,
    key             text,
    at_most         bigint,
    at_least        bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.partial_decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  {{ template "locals_of_seen" (dict "function" "ratelimit_acquire_up_to" "cost" "at_least") }}
  v_at_most         alias for ratelimit_acquire_up_to.at_most;
  v_granted         bigint := v_at_most;  -- the tokens to take
  v_answer          ratelimit.decision;   -- the answer without them
begin
  if (is_name(v_key) and v_cost between 1 and v_at_most and is_name(v_idempotency_key) is not false) is not true then
    perform check_request(policy, v_key, 0, v_idempotency_key);
    perform check_bounds(v_at_most, v_cost);
  end if;
  {{ template "include/policy.sql" "ratelimit_acquire_up_to" }}
  v_wanted := case when v_at_most <= v_policy.capacity then microtokens(v_at_most) else 0 end;
  if v_policy.durable then
    {{ template "include/decide.sql" (dict "kind" "up_to" "buckets" "buckets" "keys" "idempotency_keys") }}
  else
    {{ template "include/decide.sql" (dict "kind" "up_to" "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys") }}
  end if;
end;
$$;
comment on function ratelimit_acquire_up_to(text, text, bigint, bigint, text) is
  'Take as many tokens as a bucket has, at_most, or none if it has fewer than at_least.';

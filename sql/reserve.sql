-- Takes cost tokens from one bucket now, if it will have them within max_wait, and says how long to wait before acting.
-- What is not there yet is debt, which refill pays. So callers are served in order: each waits for its own tokens and for
-- those before it, and ratelimit_acquire is denied while there is debt. With max_wait 0 it is ratelimit_acquire.
--
-- The wait is until the debt is paid that the reservation leaves: then the level is 0 or more, and a microsecond earlier it
-- is not. If the wait is longer than max_wait, or the debt would go below its floor, nothing is taken, allowed is false, and wait
-- says how long it would have been; null means never. A shadow policy answers wait 0, and shadowed where enforcing it would
-- wait or refuse.
--
-- The grant is remembered until the policy's remember after its wait is over. A repeat has the rest of the wait. Until then
-- ratelimit_acquire under its key answers a denial. Tokens that are given back, by ratelimit_settle or ratelimit_refund, do
-- not shorten the wait of those who were promised theirs.
--
-- The steps are those of ratelimit_acquire, in include/decide.sql, but for two. The update takes the tokens if the bucket will
-- have them within max_wait; it leaves that open if it is a matter of the last microtoken. So if the bucket was read, and the
-- cost fits, the tokens are taken from the bucket as it was read. If another session has changed it since, the next round
-- follows.
--
-- The wait counts from the clock after the update, which may have waited for another session. Other times count as those of
-- ratelimit_acquire.
--
-- A cost of 0 takes nothing, and neither looks at nor stores an idempotency key.
--
-- Locks:  a grant holds the bucket row, and then the row of the idempotency key, until the caller's transaction ends. A
--         refusal and a replay hold the bucket row only if they had to wait for it.
-- Writes: a grant writes the bucket and its idempotency key. A refusal, a replay and a cost of 0 write nothing.
create or replace function ratelimit_reserve(
    policy          text,
    key             text,
    max_wait        interval,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.reservation
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  {{ template "locals_of_seen" (dict "function" "ratelimit_reserve") }}
  v_until           timestamptz;  -- when the wait must be over
  v_ready_at        timestamptz;  -- when it holds; null: at once
begin
  if not acceptable(v_key, v_cost) or is_max_wait(max_wait) is not true or v_idempotency_key is not null then
    if (acceptable(v_key, v_cost) and is_max_wait(max_wait) and is_name(v_idempotency_key) is not false) is not true then
      perform check_request(policy, v_key, v_cost, v_idempotency_key);
      perform check_max_wait(max_wait);
    end if;
    if v_cost = 0 then
      v_idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  {{ template "include/policy.sql" "ratelimit_reserve" }}
  v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
  if v_policy.durable then
    {{ template "include/decide.sql" (dict "kind" "reserve" "until" "v_until" "buckets" "buckets" "keys" "idempotency_keys") }}
  else
    {{ template "include/decide.sql" (dict "kind" "reserve" "until" "v_until" "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys") }}
  end if;
end;
$$;
comment on function ratelimit_reserve(text, text, interval, bigint, text) is
  'Take cost tokens from a bucket that will have them within max_wait, and say how long to wait for them.';

-- Takes cost tokens from one bucket if it has them, and answers; a denial is an answer, not an error.
--
-- The steps, where an idempotency key is in play:
--   1. a live key is replayed, whatever the bucket holds by now
--   2. one conditional update takes the tokens; of concurrent acquires exactly those that fit pass
--   3. not taken: the bucket is read, and after it the key again, because a request under the same
--      key may be what emptied it. A bucket without a row is created, less the cost
--   4. taken: the key is remembered. The bucket's row is ours, so a live key that turns up only now
--      was committed between 1 and 2: the tokens go back and the key is replayed. What stays is that the
--      bucket was refilled by this clock
--
-- The clock is read once for a grant, and again after the update for a denial, which may have waited.
-- Locks:  a grant holds the bucket row until the caller's transaction ends; a denial holds nothing,
--         unless it had to wait for the row.
-- Writes: a grant, the bucket and its idempotency key; a denial or a replay nothing, but for the
--         replay of step 4.
create or replace function ratelimit_acquire(
    policy          text,
    key             text,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off
as $$
declare
  v_key             text collate "C" := ratelimit_acquire.key;
  v_cost            alias for ratelimit_acquire.cost;
  v_idempotency_key text collate "C" := ratelimit_acquire.idempotency_key;
  v_policy          policies;
  v_now             timestamptz;
  v_take            bigint;
  v_level           bigint;
  v_refilled_at     timestamptz;
  v_retry_us        bigint;
  v_reset_us        bigint;
  v_due_at          timestamptz;
  v_expires_at      timestamptz;
  v_round           integer;
  v_replayed        boolean;
  v_first           idempotency_keys;
begin
  if not acceptable(v_key, v_cost) then
    perform check_request(policy, v_key, v_cost, v_idempotency_key);
  end if;
  if v_idempotency_key is not null then
    if not is_name(v_idempotency_key) then
      perform check_request(policy, v_key, v_cost, v_idempotency_key);
    end if;
    if v_cost = 0 then
      v_idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  select p.* into v_policy from policies as p where p.name = ratelimit_acquire.policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;

  v_take := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
  v_now  := clock();
  if v_policy.durable then
    {{ template "decide.sql" (dict "buckets" "buckets" "keys" "idempotency_keys") }}
  else
    {{ template "decide.sql" (dict "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys") }}
  end if;

  if v_replayed then
    return replay(v_first, v_cost);
  elsif v_take > 0 then
    return granted(v_level, v_reset_us, v_policy.capacity);
  end if;
  return answer(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_acquire(text, text, bigint, text) is
  'Take cost tokens from a bucket if it has them; a repeat under the same idempotency key takes nothing.';

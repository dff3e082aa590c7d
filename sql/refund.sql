{{ define "refund" -}}
update {{ . }} as b
       set level       = least(refilled_level(b.level, b.refilled_at, v_now,
                                              v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
                               microtokens(v_policy.capacity - v_amount)) + microtokens(v_amount),
           refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
           due_at      = least(b.due_at, v_now)  -- perhaps full by now
     where b.policy_id = v_policy.id
       and b.key       = v_key
    returning b.level, b.refilled_at into v_level, v_refilled_at;
{{- end -}}
-- Gives amount tokens back to one bucket, never above the policy's capacity, and answers what it
-- holds. An amount above capacity counts as capacity.
--
-- A bucket without a row is full already: nothing to give back.
-- Locks:  the bucket row, until the caller's transaction ends.
-- Writes: the bucket.
create or replace function ratelimit_refund(policy text, key text, amount bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off
as $$
declare
  v_key         text collate "C" := ratelimit_refund.key;
  v_policy      policies;
  v_amount      bigint;
  v_now         timestamptz;
  v_level       bigint;
  v_refilled_at timestamptz;
  v_reset_us    bigint;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  perform check_tokens('amount', ratelimit_refund.amount);
  v_policy := policy_named(policy);
  v_amount := least(ratelimit_refund.amount, v_policy.capacity);
  v_now    := clock();
  if v_policy.durable then
    {{ template "refund" "buckets" }}
  else
    {{ template "refund" "ephemeral_buckets" }}
  end if;
  if not found then
    return answer(microtokens(v_policy.capacity), 0, 0, v_policy.capacity);
  end if;
  v_reset_us := wait_for(v_policy.full_level, v_level, v_refilled_at, v_now,
                         v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
  return answer(v_level, 0, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_refund(text, text, bigint) is
  'Give tokens back to a bucket, never above its capacity.';

{{- /* Updates the bucket and copies its new state. The argument is the name of the table. */ -}}
{{ define "refund" -}}
update {{ . }} as b
       set level       = least({{ template "refilled_level" (dict "bucket" "b.") }},
                               microtokens(v_policy.capacity - v_amount)) + microtokens(v_amount),
           refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
           room        = null,
           due_at      = least(b.due_at, v_now)  -- the bucket may be full now: clean-up looks at it in five minutes or later
     where b.policy_id = v_policy.id
       and b.key       = v_key
    returning b.level, b.refilled_at into v_level, v_refilled_at;
    v_has_row := found;
{{- end -}}
-- Gives amount tokens back to one bucket, never above the policy's capacity, and answers with the tokens
-- that the bucket holds then. An amount above capacity counts as capacity.
--
-- A bucket without a row is full already, so nothing is written.
-- Locks:  the bucket row, until the caller's transaction ends.
-- Writes: the bucket.
create or replace function ratelimit_refund(policy text, key text, amount bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_key         text collate "C" := ratelimit_refund.key;
  v_policy      policies;
  v_override    overrides;
  v_amount      bigint;
  v_now         timestamptz;
  v_level       bigint;
  v_refilled_at timestamptz;
  v_reset_us    bigint;
  v_has_row     boolean;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  perform check_tokens('amount', ratelimit_refund.amount);
  v_policy := policy_named(policy);
  v_now    := clock();
  if v_policy.overridden then
    {{ template "include/override.sql" }}
  end if;
  v_amount := least(ratelimit_refund.amount, v_policy.capacity);
  if v_policy.durable then
    {{ template "refund" "buckets" }}
  else
    {{ template "refund" "ephemeral_buckets" }}
  end if;
  if not v_has_row then
    return answer_of(microtokens(v_policy.capacity), 0, 0, v_policy.capacity);
  end if;
  v_reset_us := {{ template "wait_for" (dict "target" "v_policy.full_level" "bucket" "v_") }};
  return answer_of(v_level, 0, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_refund(text, text, bigint) is
  'Give tokens back to a bucket, never above its capacity.';

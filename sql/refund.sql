create or replace function ratelimit_refund(policy text, key text, amount bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if not acceptable(key, amount) then
    perform check_name('policy', policy);  -- each raises 22023
    perform check_name('key', key);
    perform check_tokens('amount', amount);
  end if;
  v_policy := p from policies as p where p.name = policy collate "C";
  if v_policy.durable is not true then
    if v_policy.id is null or pg_is_in_recovery() then
      perform refuse_policy(policy, v_policy);  -- raises 22023, RL001 or 0A000
    end if;
    return refund_ephemeral(v_policy, key, amount);  -- what follows, on the twin tables
  end if;

  declare
    v_key         text collate "C" := key;
    v_amount      bigint;
    v_now         timestamptz := clock();
    v_level       bigint;       -- microtokens in the bucket
    v_refilled_at timestamptz;  -- when the bucket held v_level
    v_reset_us    bigint;       -- microseconds until the bucket is full; null: never
    v_override    ratelimit.overrides;
    v_numbers     ratelimit.numbers;
  begin
    if v_policy.special then
      if v_policy.kind = 'slots' then
        perform refuse_slots(v_policy.name);  -- raises 22023
      elsif v_policy.kind = 'quota' then
        return refund_quota_of_buckets(v_policy, v_key, amount);
      end if;
      v_override := o from overrides as o where o.policy_id = v_policy.id and o.key = v_key;
      if v_override.key is not null then
        v_numbers := numbers_by(v_policy, v_override, v_now);
        v_policy  := v_numbers.policy;
      end if;
    end if;
    v_amount := least(amount, v_policy.capacity);
    if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
    update buckets as b
       set level       = least(least(refilled(b.level, b.refilled_at, v_now, v_policy), microtokens(v_policy.capacity - v_amount))
                               + microtokens(v_amount), case when b.paused_until > v_now then 0 end),  -- least ignores null
           refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
           room        = null,
           due_at      = least(b.due_at, v_now)  -- the bucket may be full now: clean-up looks at it in five minutes or later
     where b.policy_id = v_policy.id
       and b.key       = v_key
    returning b.level, b.refilled_at into v_level, v_refilled_at;
    if not found then  -- full
      return answer_of(microtokens(v_policy.capacity), 0, 0, v_policy.capacity);
    end if;
    v_reset_us := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
    if v_policy.special then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after);
    end if;
    return answer_of(v_level, 0, v_reset_us, v_policy.capacity);
  end;
end;
$$;
comment on function ratelimit_refund(text, text, bigint) is
'Gives amount tokens back to one bucket, never above its capacity, and returns the tokens that the bucket holds then.
Refunded tokens can be taken again: do not let a role refund that is itself to be limited.
amount: whole tokens, 0 or more. An amount above the capacity counts as the capacity. A quota gets back at most what is used,
  and a paused bucket what pays its debt.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction, 0A000 for an ephemeral policy on a
  standby.
Locks: the bucket row until the transaction ends. A bucket without a row is full, and nothing is locked or written.
Writes: the bucket.
Role: application.';

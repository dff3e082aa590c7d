{{- /* Reads one bucket as of v_now, without a lock, and works out every number of an answer. The table's
       name is the argument; the locals are those of ratelimit_acquire and ratelimit_peek. FOUND tells
       afterwards whether the bucket has a row. */ -}}
select b.level, b.refilled_at
      into v_level, v_refilled_at
      from {{ . }} as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    if not found then  -- full
      v_level       := microtokens(v_policy.capacity);
      v_refilled_at := v_now;
    end if;
    v_retry_us := case
      when v_cost = 0 then 0
      when v_cost <= v_policy.capacity then
        wait_for(microtokens(v_cost), v_level, v_refilled_at, v_now,
                 v_policy.refill, v_policy.every_us, v_policy.stepped)
    end;  -- null: never
    v_reset_us := wait_for(microtokens(v_policy.capacity), v_level, v_refilled_at, v_now,
                           v_policy.refill, v_policy.every_us, v_policy.stepped);
    v_level    := refilled_level(v_level, v_refilled_at, v_now, v_policy.capacity,
                                 v_policy.refill, v_policy.every_us, v_policy.stepped);

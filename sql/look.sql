{{- /* Reads one bucket as of v_now, without a lock, and works out every number of an answer: v_level by now,
       v_retry_us (null: never) and v_reset_us. FOUND tells afterwards whether the bucket has a row. The
       arguments are the name of the table and newest, as of decide.sql; the locals those of ratelimit_acquire and
       ratelimit_peek. */ -}}
select refilled_level(b.level, b.refilled_at, v_now,
                      v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then
               wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now,
                        v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now,
                    v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from {{ .buckets }} as b
     {{ if .newest -}}
     {{ template "newest.sql" (dict "policy_id" "v_policy.id" "key" "v_key") }};
     {{- else -}}
     where b.policy_id = v_policy.id
       and b.key       = v_key;
     {{- end }}
    if not found then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

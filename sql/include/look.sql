{{- /* Reads one bucket as of v_now, without a lock, and computes every number of an answer.
       The locals are declared in locals.sql. The argument buckets is the name of the table. With the argument newest, the
       bucket is found by newest.sql. */ -}}
select {{ template "refilled_level" (dict "bucket" "b.") }},
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then {{ template "wait_for" (dict "target" "microtokens(v_cost)" "bucket" "b.") }}
           end,
           {{ template "wait_for" (dict "target" "v_policy.full_level" "bucket" "b.") }}
      into v_level, v_retry_us, v_reset_us
      from {{ .buckets }} as b
     {{ if .newest -}}
     {{ template "include/newest.sql" (dict "policy_id" "v_policy.id" "key" "v_key") }};
     {{- else -}}
     where b.policy_id = v_policy.id
       and b.key       = v_key;
     {{- end }}
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

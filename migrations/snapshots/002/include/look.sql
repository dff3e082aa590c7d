{{- /* Reads one bucket as of v_now, without a lock, and computes every number of an answer. The locals are declared in
       locals.sql. The argument buckets is the name of the table. With the argument again, the policy is read again before a
       bucket without a row is answered as full. With the argument seen, the row is kept as it was read. With the
       argument bare, there is no v_retry_us. */ -}}
select {{ template "refilled_level" (dict "bucket" "b.") }},
           {{- if not .bare }}
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then {{ template "wait_for" (dict "target" "microtokens(v_cost)" "bucket" "b.") }}
           end,
           {{- end }}
           {{ template "wait_for" (dict "target" "v_policy.full_level" "bucket" "b.") }}
           {{- if .seen }},
           b.level, b.refilled_at
           {{- end }}
      into v_level{{ if not .bare }}, v_retry_us{{ end }}, v_reset_us{{ if .seen }}, v_seen_level, v_seen_at{{ end }}
      from {{ .buckets }} as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      {{- if .again }}
      {{ template "include/numbers_again.sql" (dict) }}
      {{- end }}
      v_level    := microtokens(v_policy.capacity);
      {{- if not .bare }}
      v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
      {{- end }}
      v_reset_us := 0;
    end if;

{{- /* Reads one bucket as of v_now, without a lock, and computes every number of an answer. The locals are declared in
       locals.sql. The argument buckets is the name of the table. The argument again is the path of a template that runs
       before a bucket without a row is answered as full. */ -}}
select {{ template "refilled_level" (dict "bucket" "b.") }},
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then {{ template "wait_for" (dict "target" "microtokens(v_cost)" "bucket" "b.") }}
           end,
           {{ template "wait_for" (dict "target" "v_policy.full_level" "bucket" "b.") }}
      into v_level, v_retry_us, v_reset_us
      from {{ .buckets }} as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      {{- if .again }}
      {{ template "include/numbers_again.sql" }}
      {{- end }}
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
      v_reset_us := 0;
    end if;

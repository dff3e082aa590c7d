{{- /* Takes v_wanted from one bucket if it covers that. FOUND tells. The argument buckets is the name of the table. The locals
       are declared in locals.sql, with those of decide. */ -}}
update {{ .buckets }} as b
           set level       = {{ template "refilled_level" (dict "bucket" "b.") }} - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and {{ template "refilled_level" (dict "bucket" "b.") }} >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
{{- /**/ -}}

{{- /* Writes the bucket that lock.sql locked. The argument buckets is the name of the table. */ -}}
update {{ .buckets }} as b
         set level = v_level, refilled_at = v_refilled_at, room = null
       where b.policy_id = v_policy.id
         and b.key       = v_key;
{{- /**/ -}}

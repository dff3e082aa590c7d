{{- /* Reads the grant that is remembered under the idempotency key into v_first. It is live if its expires_at is after
       v_now. The argument keys is the name of the table. expires_at is compared after the fetch. In WHERE, a planner without
       statistics might choose its index instead of the primary key. */ -}}
select k.* into v_first
          from {{ .keys }} as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
{{- /**/ -}}

{{- /* Looks up the idempotency key as of v_now, and returns the replay if it is live. The argument keys is the name of the
       table. expires_at is compared after the fetch. In WHERE, a planner without statistics might choose its index
       instead of the primary key. */ -}}
select k.* into v_first
          from {{ .keys }} as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          perform check_repeated_cost(v_first, v_cost);
          return replay_of(v_first);
        end if;
{{- /**/ -}}

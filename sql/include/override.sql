{{- /* Gives v_policy the numbers of the live override of v_key, if there is one. */ -}}
select o.* into v_override
      from overrides as o
     where o.policy_id  = v_policy.id
       and o.key        = v_key
       and o.expires_at > v_now;
    if found then
      v_policy := overridden(v_policy, v_override);
    end if;
{{- /**/ -}}

{{- /* Reads the policy and the override again, because this call may have waited for a session that changed them. A policy
       that was dropped meanwhile stays as it was. v_wanted follows the new capacity, but for the argument bare. */ -}}
select p.* into v_again from policies as p where p.id = v_policy.id;
      if found then
        v_policy := v_again;
        {{ template "include/override.sql" }}
        {{- if not .bare }}
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
        {{- end }}
      end if;
{{- /**/ -}}

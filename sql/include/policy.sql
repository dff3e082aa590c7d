{{- /* Reads the policy into v_policy, the clock into v_now, and the numbers that apply to v_key. The argument is the name of the
       function, whose argument policy it is. The name of a policy that was found needs no check. */ -}}
select p.* into v_policy from policies as p where p.name = {{ . }}.policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;

  v_now := clock();
  if v_policy.overridden then
    {{ template "include/override.sql" }}
  end if;
{{- /**/ -}}

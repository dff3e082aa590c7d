-- Reports the tokens that a bucket holds, and whether an acquire of this cost would be allowed now. Takes nothing.
-- For a shadow policy it answers as if the policy were enforced.
--
-- Locks:  nothing.
-- Writes: nothing. It works in a read-only transaction and, for durable policies, on a standby.
create or replace function ratelimit_peek(policy text, key text, cost bigint default 1)
  returns ratelimit.decision
  language plpgsql
  stable
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
{{- /* pre_request.sql has the same body. The argument is the name of the function. */ -}}
{{ define "peek" -}}
declare
  {{ template "locals_of_look" (dict "function" .) }}
begin
  if not acceptable(v_key, v_cost) then
    perform check_request(policy, v_key, v_cost, null);
  end if;
  v_policy := policy_named(policy);
  v_now    := clock();
  if v_policy.overridden then
    {{ template "include/override.sql" }}
  end if;
  if v_policy.durable then
    {{ template "include/look.sql" (dict "buckets" "buckets") }}
  else
    {{ template "include/look.sql" (dict "buckets" "ephemeral_buckets") }}
  end if;
  return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
{{- end }}
{{ template "peek" "ratelimit_peek" }}
$$;
comment on function ratelimit_peek(text, text, bigint) is
  'The tokens that a bucket holds, and whether an acquire of this cost would be allowed now; takes nothing.';

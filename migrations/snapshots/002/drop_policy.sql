{{- /* Deletes the rows that no other session has locked. The argument is the name of the table. */ -}}
{{ define "delete_rows_of_policy" -}}
delete from {{ . }} as t
 where t.ctid = any (array(select u.ctid
                             from {{ . }} as u
                            where u.policy_id = v_id
                              for update skip locked));
{{- end -}}
-- Removes a policy with its overrides, buckets and idempotency keys.
--
-- A row that an open transaction has locked is skipped, and left to clean-up. Such a row changes no answer,
-- because a policy defined anew under the same name has another id. SKIP LOCKED can still block if the row
-- changes hands while it is examined, as cleanup.sql says. Here only the caller's lock_timeout ends that wait.
-- Locks:  the policy row and the rows it deletes, until the caller's transaction ends.
-- Writes: policies; the overrides, buckets and idempotency keys of the policy.
create or replace function ratelimit_drop_policy(policy text)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name    text collate "C" := ratelimit_drop_policy.policy;
  v_id      bigint;
  v_durable boolean;
begin
  perform check_name('policy', v_name);
  delete from policies as p where p.name = v_name returning p.id, p.durable into v_id, v_durable;
  if not found then
    perform unknown_policy(v_name);
  end if;
  delete from overrides as o where o.policy_id = v_id;
  if v_durable then
    {{ template "delete_rows_of_policy" "buckets" }}
    {{ template "delete_rows_of_policy" "idempotency_keys" }}
  else
    {{ template "delete_rows_of_policy" "ephemeral_buckets" }}
    {{ template "delete_rows_of_policy" "ephemeral_idempotency_keys" }}
  end if;
end;
$$;
comment on function ratelimit_drop_policy(text) is
  'Remove a policy with its overrides, buckets and idempotency keys.';

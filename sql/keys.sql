-- Stores the idempotency keys of a batch, of durable or of ephemeral policies.
--
-- The caller holds the bucket rows of these elements, so no other session is at the same keys. Element n of keys,
-- idempotency_keys and costs is element n of the batch; places are the elements that were granted, and the arrays after it
-- are parallel to it. policy_ids and remember_us are those by which they were decided. ephemeral tells the kind of all.
--
-- new is the guess that no row has any of these keys. If one does, live or expired, unique_violation is raised. ON CONFLICT
-- costs more, because it looks before it inserts, and confirms after it.
--
-- Locks:  the rows that it writes.
-- Writes: the idempotency keys, an expired one over the old row.
create or replace function ratelimit.remember(
    keys text[], idempotency_keys text[], costs bigint[], now timestamptz, ephemeral boolean, new boolean,
    places bigint[], policy_ids bigint[], remember_us bigint[], remaining bigint[], capacities bigint[], reset_us bigint[])
  returns boolean
  language plpgsql
  volatile
as $$
{{- /* The arguments are the name of the table, and whether the keys are new. */ -}}
{{ define "remember" -}}
insert into {{ .keys }} as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
    select g.policy_id, keys[g.place], idempotency_keys[g.place], costs[g.place],
           g.remaining, duration(g.reset_us), g.capacity, v_now + duration(g.remember_us)
      from unnest(places, policy_ids, remember.remember_us, remember.remaining, capacities, reset_us)
           as g (place, policy_id, remember_us, remaining, capacity, reset_us)
     where is_name(idempotency_keys[g.place])
    {{- if not .new }}
    {{ template "include/remember.sql" . }}
    {{- end }};
{{- end }}
declare
  v_now    alias for remember.now;
  v_stored bigint;
begin
  if new and ephemeral then
    {{ template "remember" (dict "keys" "ephemeral_idempotency_keys" "new" true) }}
  elsif new then
    {{ template "remember" (dict "keys" "idempotency_keys" "new" true) }}
  elsif ephemeral then
    {{ template "remember" (dict "keys" "ephemeral_idempotency_keys" "new" false) }}
  else
    {{ template "remember" (dict "keys" "idempotency_keys" "new" false) }}
  end if;
  get diagnostics v_stored = row_count;
  return v_stored = (select count(remember.idempotency_keys[u.place]) from unnest(places) as u (place));
end;
$$;
comment on function ratelimit.remember(text[], text[], bigint[], timestamptz, boolean, boolean, bigint[], bigint[], bigint[], bigint[], bigint[], bigint[]) is
  'Stores the idempotency keys of granted elements; false if one of them is live already, or is no valid key.';

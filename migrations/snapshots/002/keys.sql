-- Idempotency keys of many requests for one policy. Element n of keys, idempotency_keys and costs is element n of the batch.

-- Locks and writes nothing.
create or replace function ratelimit.known_keys(
    in  policy ratelimit.policies, in keys text[], in idempotency_keys text[], in now timestamptz,
    out places bigint[], out grants ratelimit.idempotency_keys[])
  language plpgsql
  stable
as $$
{{- /* The argument is the name of the table. expires_at is compared after the fetch, as in include/find_key.sql. */ -}}
{{ define "known_keys" -}}
select array_agg(u.place), array_agg(k.granted)
      into places, grants
      from unnest(keys, idempotency_keys) with ordinality as u (key, idempotency_key, place)
     cross join lateral (select row(k.*)::idempotency_keys as granted, k.expires_at
                           from {{ . }} as k
                          where k.policy_id       = policy.id
                            and k.key             = u.key collate "C"
                            and k.idempotency_key = u.idempotency_key collate "C"
                         offset 0) as k
     where k.expires_at > now
{{- end }}
begin
  if policy.durable then
    {{ template "known_keys" "idempotency_keys" }};
  else
    {{ template "known_keys" "ephemeral_idempotency_keys" }};
  end if;
end;
$$;
comment on function ratelimit.known_keys(ratelimit.policies, text[], text[], timestamptz) is
  'The elements whose idempotency key is live, and the grants that it remembers.';

-- The caller holds the bucket rows of these elements, so no other session is at the same keys. Element n of policies, keys,
-- idempotency_keys and costs is element n of the batch; places are the elements that were granted, and the arrays after it
-- are parallel to it. durable and ephemeral tell which policies there are.
--
-- Locks:  the rows that it writes.
-- Writes: the idempotency keys, an expired one over the old row.
create or replace function ratelimit.remember(
    policies text[], keys text[], idempotency_keys text[], costs bigint[], now timestamptz, durable boolean, ephemeral boolean,
    places bigint[], remaining bigint[], capacities bigint[], reset_us bigint[])
  returns boolean
  language plpgsql
  volatile
as $$
{{- /* The arguments are the name of the table, and which policies have their keys there. */ -}}
{{ define "remember" -}}
insert into {{ .keys }} as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
    select p.id, keys[g.place], idempotency_keys[g.place], costs[g.place],
           g.remaining, duration(g.reset_us), g.capacity, v_now + duration(p.remember_us)
      from unnest(places, remember.remaining, capacities, reset_us) as g (place, remaining, capacity, reset_us)
      join policies as p on p.name = policies[g.place] collate "C"
     where is_name(idempotency_keys[g.place])
       and {{ .kind }}
    {{ template "include/remember.sql" . }};
    get diagnostics v_count = row_count;
    v_stored := v_stored + v_count;
{{- end }}
declare
  v_now    alias for remember.now;
  v_count  integer;
  v_stored integer := 0;
begin
  if durable then
    {{ template "remember" (dict "keys" "idempotency_keys" "kind" "p.durable") }}
  end if;
  if ephemeral then
    {{ template "remember" (dict "keys" "ephemeral_idempotency_keys" "kind" "not p.durable") }}
  end if;
  return v_stored = (select count(remember.idempotency_keys[u.place]) from unnest(places) as u (place));
end;
$$;
comment on function ratelimit.remember(text[], text[], text[], bigint[], timestamptz, boolean, boolean, bigint[], bigint[], bigint[], bigint[]) is
  'Stores the idempotency keys of granted elements; false if one of them is live already, or is no valid key.';

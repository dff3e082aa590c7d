-- Reads everything that the requests of a batch are decided by: policies, overrides, buckets and idempotency keys.
--
-- The function is STABLE, so all of it is as of one snapshot. If a second statement read the idempotency keys, it could find
-- one whose tokens the bucket had not lost yet.
--
-- names are the names of the policies. keys are those of the buckets, in the order of policy; the buckets of policy n are
-- from first[n] to before first[n + 1]. created are the buckets whose rows the caller has just created, which stand for none.
-- buckets, charges and idempotency_keys are parallel to the elements of the batch: the number of the bucket, what is
-- charged to it, and the idempotency key; idempotency_keys is null for none.
--
-- policies is parallel to names, and known to the elements: the grant that a live idempotency key remembers. The others are
-- parallel to the buckets: the policy with the numbers that apply to the key; the level as stored, and when; the level
-- now; whether there is a row.
--
-- Locks and writes nothing.
create or replace function ratelimit.look_at_buckets(
    in  names text[], in first integer[], in keys text[], in created boolean[],
    in  buckets integer[], in charges bigint[], in idempotency_keys text[], in now timestamptz,
    out policies ratelimit.policies[], out known ratelimit.idempotency_keys[],
    out numbers ratelimit.policies[], out levels bigint[], out refilled_at timestamptz[], out levels_now bigint[], out has_row boolean[])
  language plpgsql
  stable
as $$
{{- /* Each of these is about the buckets v_from to v_to, which are those of v_policy. The argument is the name of the table. */ -}}
{{ define "look_at_buckets" -}}
select look_at_buckets.levels      || array_agg(coalesce(b.level, microtokens((u.p).capacity)) order by u.n),
             look_at_buckets.refilled_at || array_agg(coalesce(b.refilled_at, v_now) order by u.n),
             look_at_buckets.levels_now  || array_agg(case when b.level is null then microtokens((u.p).capacity)
                                                           else {{ template "refilled_level" (dict "bucket" "b." "policy" "(u.p).") }} end order by u.n),
             look_at_buckets.has_row     || array_agg(b.level is not null order by u.n),
             look_at_buckets.numbers     || array_agg(u.p order by u.n)
        into levels, refilled_at, levels_now, has_row, numbers
        from (select u.key, u.created, u.n, case when v_policy.overridden then
                                         coalesce((select overridden(v_policy, o) from overrides as o
                                                    where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy)
                                       else v_policy end as p
                from unnest(keys[v_from:v_to], created[v_from:v_to]) with ordinality as u (key, created, n)
              offset 0) as u
        left join lateral (select b.level, b.refilled_at
                             from {{ . }} as b
                            {{ template "include/newest.sql" (dict "key" "u.key") }}) as b on u.created is not true;
{{- end }}
{{- /* expires_at is compared after the fetch, as in include/find_key.sql. */ -}}
{{ define "look_at_keys" -}}
for v_found in
        select u.place, k.granted
          from unnest(buckets, charges, idempotency_keys) with ordinality as u (bucket, charge, idempotency_key, place)
         cross join lateral (select row(k.*)::idempotency_keys as granted, k.expires_at
                               from {{ . }} as k
                              where k.policy_id       = v_policy.id
                                and k.key             = keys[u.bucket] collate "C"
                                and k.idempotency_key = u.idempotency_key collate "C"
                             offset 0) as k
         where u.bucket between v_from and v_to
           and u.charge > 0
           and k.expires_at > v_now
      loop
        known[v_found.place] := v_found.granted;
      end loop;
{{- end }}
declare
  v_now     alias for look_at_buckets.now;
  v_policy  ratelimit.policies;
  v_from    integer;
  v_to      integer;
  v_found   record;
begin
  known := array_fill(null::ratelimit.idempotency_keys, array[cardinality(buckets)]);
  for v_n in 1..cardinality(names) loop
    select p.* into v_policy from policies as p where p.name = names[v_n] collate "C";
    policies[v_n] := v_policy;
    v_from        := first[v_n];
    v_to          := first[v_n + 1] - 1;
    if v_policy.durable is not false then  -- an unknown policy has no buckets
      {{ template "look_at_buckets" "buckets" }}
    else
      {{ template "look_at_buckets" "ephemeral_buckets" }}
    end if;
    if idempotency_keys is null then
      continue;
    elsif v_policy.durable is not false then
      {{ template "look_at_keys" "idempotency_keys" }}
    else
      {{ template "look_at_keys" "ephemeral_idempotency_keys" }}
    end if;
  end loop;
end;
$$;
comment on function ratelimit.look_at_buckets(text[], integer[], text[], boolean[], integer[], bigint[], text[], timestamptz) is
  'The policies, buckets and idempotency keys of many requests, as of one snapshot.';

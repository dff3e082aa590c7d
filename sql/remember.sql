-- Stores the idempotency keys of a batch, of one policy, by which the elements were decided.
--
-- The caller holds the bucket rows of these elements, so no other request is at the same keys; clean-up may be, at expired ones.
-- Element n of keys, idempotency_keys and costs is element n of the batch; places are the elements that were granted, and the
-- arrays after it are parallel to it.
--
-- new is the guess that no row has any of these keys. If one does, live or expired, unique_violation is raised. ON CONFLICT
-- costs more, because it looks before it inserts, and confirms after it.
--
-- Locks:  the rows that it writes, and those of live keys.
-- Writes: the idempotency keys, an expired one over the old row.
create or replace function ratelimit.remember_idempotency_keys(
    policy ratelimit.policies, keys text[], idempotency_keys text[], costs bigint[], now timestamptz, new boolean,
    places bigint[], remaining bigint[], capacities bigint[], reset_us bigint[])
  returns boolean language plpgsql volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_all    alias for idempotency_keys;
  v_stored bigint;
begin
  if new then
    insert into idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    select v_policy.id, keys[g.place], v_all[g.place], costs[g.place],
           g.remaining, duration(g.reset_us), g.capacity, v_now + duration(v_policy.remember_us),
           case when v_policy.kind = 'quota' then v_now end
      from unnest(places, remember_idempotency_keys.remaining, capacities, reset_us) as g (place, remaining, capacity, reset_us)
     where is_name(v_all[g.place]);
  else
    insert into idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    select v_policy.id, keys[g.place], v_all[g.place], costs[g.place],
           g.remaining, duration(g.reset_us), g.capacity, v_now + duration(v_policy.remember_us),
           case when v_policy.kind = 'quota' then v_now end
      from unnest(places, remember_idempotency_keys.remaining, capacities, reset_us) as g (place, remaining, capacity, reset_us)
     where is_name(v_all[g.place])
    on conflict on constraint idempotency_keys_pkey do update
           set (cost, remaining, reset_after, capacity, expires_at, ready_at, settled, taken, granted_at)
             = (excluded.cost, excluded.remaining, excluded.reset_after, excluded.capacity, excluded.expires_at, excluded.ready_at,
                excluded.settled, excluded.taken, excluded.granted_at)
         where k.expires_at <= v_now;
  end if;
  get diagnostics v_stored = row_count;
  return v_stored = (select count(v_all[u.place]) from unnest(places) as u (place));
end;
$$;
comment on function ratelimit.remember_idempotency_keys(ratelimit.policies, text[], text[], bigint[], timestamptz, boolean, bigint[], bigint[], bigint[], bigint[]) is
  'Stores the idempotency keys of granted elements; false if one of them is live already, or is no valid key.';

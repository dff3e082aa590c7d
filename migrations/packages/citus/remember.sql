-- Citus: as rows.sql, about one key.
create or replace function ratelimit.remember_idempotency_keys(
    policy ratelimit.policies, keys text[], idempotency_keys text[], costs bigint[], now timestamptz, new boolean,
    places bigint[], remaining bigint[], capacities bigint[], reset_us bigint[])
  returns boolean language plpgsql volatile
as $$
declare
  v_now         alias for now;
  v_all         alias for idempotency_keys;
  v_key         text collate "C";
  v_named       text collate "C";
  v_cost        bigint;
  v_remaining   bigint;
  v_capacity    bigint;
  v_policy_id   bigint := policy.id;
  v_reset_after interval;
  v_expires_at  timestamptz;
  v_granted_at  timestamptz := case when policy.kind = 'quota' then now end;
begin
  for v_n in 1..cardinality(places) loop
    v_named       := v_all[places[v_n]];
    continue when v_named is null;
    v_key         := keys[places[v_n]];
    v_cost        := costs[places[v_n]];
    v_remaining   := remaining[v_n];
    v_capacity    := capacities[v_n];
    v_reset_after := duration(reset_us[v_n]);
    v_expires_at  := v_now + duration(policy.remember_us);
    insert into idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    values (v_policy_id, v_key, v_named, v_cost, v_remaining, v_reset_after, v_capacity, v_expires_at, v_granted_at)
    on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
    if not found then
      return false;
    end if;
  end loop;
  return true;
end;
$$;
comment on function ratelimit.remember_idempotency_keys(ratelimit.policies, text[], text[], bigint[], timestamptz, boolean, bigint[], bigint[], bigint[], bigint[]) is
  'Stores the idempotency keys of granted elements; false if one of them is live already.';

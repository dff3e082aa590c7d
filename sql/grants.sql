-- The rows of ratelimit_grants, which has columns named like its arguments: PL/pgSQL refuses them.
create or replace function ratelimit.grants_of(in of_policy text, in of_key text, in is_settled boolean, in at_most integer,
    out policy text, out key text, out idempotency_key text, out cost bigint, out settled boolean, out granted_for interval, out expires_in interval)
  returns setof record
  language plpgsql
  stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_policy ratelimit.policies := policy_named(of_policy);
begin
  if v_policy.kind = 'slots' then
    perform refuse_slots(v_policy.name);  -- raises 22023
  elsif pg_is_in_recovery() then
    perform refuse_ephemeral(v_policy);  -- raises 0A000
  end if;
  return query execute format($sql$
    select $1, k.key, k.idempotency_key, coalesce(k.settled, k.cost), k.settled is not null,
           duration(greatest(0, case when k.granted_at is not null then microseconds($5 - k.granted_at)
                                     else $6 - microseconds(k.expires_at - $5) end)::bigint),
           duration(time_until(k.expires_at, $5))
      from %s as k
     where k.policy_id = $7
       and k.expires_at > $5
       and ($2 is null or k.key = $2 collate "C")
       and ($3 is null or (k.settled is not null) = $3)
     order by k.expires_at, k.key, k.idempotency_key
     limit $4
  $sql$, case when v_policy.durable then 'idempotency_keys' else 'ephemeral_idempotency_keys' end)
    using of_policy, of_key, is_settled, at_most, clock(), v_policy.remember_us, v_policy.id;
end;
$$;
comment on function ratelimit.grants_of(text, text, boolean, integer) is
  'The live grants of a policy that are remembered under idempotency keys, at most at_most of them, the oldest first.';

create or replace function ratelimit_grants(policy text, key text default null, settled boolean default null, max_rows integer default 1000)
  returns table (policy text, key text, idempotency_key text, cost bigint, settled boolean, granted_for interval, expires_in interval)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $2, $4);
  select * from grants_of($1, $2, $3, $4)
$$;
comment on function ratelimit_grants(text, text, boolean, integer) is
'Lists the live grants of a policy that are remembered under idempotency keys, the oldest first.
What a program that died has not settled is among those that are not settled.
key: null lists the grants of all keys.
settled: true lists the grants that are settled, false the others, null both.
max_rows: 1 or more.
cost: whole tokens: of a settled grant those of the settlement.
granted_for: how long ago it was granted: remember, as the policy has it now, less expires_in. Zero while a reservation waits.
expires_in: how long the idempotency key stays live.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 0A000 for an ephemeral policy on a standby.
Locks: nothing.
Writes: nothing.
Role: administrator.';

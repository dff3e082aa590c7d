-- The rows of ratelimit_holders. That has columns named like its arguments, which PL/pgSQL refuses. The statement is made at run time, as
-- in status.sql.
create or replace function ratelimit.leases_of(in of_policy text, in of_key text, in at_most integer,
    out policy text, out key text, out holder text, out cost bigint, out held_for interval)
  returns setof record
  language plpgsql
  stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_rows constant text := $sql$
    select s.name, s.key, s.holder, s.cost::bigint, duration(least(microseconds(s.ends_at - $4), microseconds(s.lease))::bigint)
      from (select p.name, l.key, l.holder, l.cost, l.ends_at, coalesce(case when o.expires_at > $4 then o.ending_lease end, o.lease, p.lease) as lease
              from policies as p
              join (table leases union all table ephemeral_leases) as l on l.policy_id = p.id
              left join overrides as o on p.overridden and o.policy_id = p.id and o.key = l.key
             where l.ends_at > $4
               and ($1 is null or p.name = $1 collate "C")
               and ($2 is null or l.key = $2 collate "C")
             order by p.name, l.key, l.ends_at, l.holder
             limit $3) as s
     order by s.name, s.key, s.ends_at, s.holder
  $sql$;
begin
  if pg_is_in_recovery() then
    perform refuse_ephemeral(p) from policies as p where p.name = of_policy collate "C";  -- raises 0A000
  end if;
  return query execute case when pg_is_in_recovery() then replace(v_rows, ' union all table ephemeral_leases', '') else v_rows end
    using of_policy, of_key, at_most, clock();
end;
$$;
comment on function ratelimit.leases_of(text, text, integer) is
  'The leases that have not ended, at most at_most of them, by policy, key and end.';

create or replace function ratelimit_holders(policy text default null, key text default null, max_rows integer default 1000)
  returns table (policy text, key text, holder text, cost bigint, held_for interval)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $2, $3);
  select * from leases_of($1, $2, $3)
$$;
comment on function ratelimit_holders(text, text, integer) is
'Lists who holds slots, by policy, key and the end of the lease.
On a standby it lists durable policies only.
policy: null lists the holders of all policies.
key: null lists the holders of all keys.
max_rows: 1 or more.
cost: slots.
held_for: how long the lease lasts, the lease of the key at most.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 0A000 for an ephemeral policy on a standby.
Locks: nothing.
Writes: nothing.
Role: administrator.';

-- The rows of ratelimit_status about slots: keys that somebody holds, those with the smallest share of free slots first. A part of an override that
-- ends is an instant without a lease: its rows have cost 0.
create or replace function ratelimit.fullest_slots(in of_policy text, in of_key text, in at_most integer,
    out policy text, out key text, out remaining bigint, out retry_after interval, out reset_after interval, out capacity bigint,
    out overridden boolean, out share numeric)
  returns setof record
  language plpgsql
  stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_rows constant text := $sql$
    select s.name, s.key, s.capacity - s.held,
           duration(case
                      when s.held < s.capacity then 0
                      when s.first is not null then time_until(s.first, $4)
                    end),
           duration(time_until(s.last, $4)), s.capacity, s.overridden, (s.capacity - s.held)::numeric / greatest(s.capacity, 1) as share
      from (select u.name, u.key, u.capacity, u.overridden, sum(u.cost) as held, max(u.at) filter (where u.cost > 0) as last,
                   min(u.at) filter (where u.later < case when u.at >= u.expires_at then u.stays else u.capacity end) as first
              from (select p.name, l.key, e.cost, e.at, o.expires_at, coalesce(o.capacity, p.capacity) as stays,
                           coalesce(case when o.expires_at > $4 then o.ending_capacity end, o.capacity, p.capacity) as capacity, o.key is not null as overridden,
                           coalesce(sum(e.cost) over (partition by l.policy_id, l.key order by e.at desc
                                                      groups between unbounded preceding and 1 preceding), 0) as later
                      from policies as p
                      join (table leases union all table ephemeral_leases) as l on l.policy_id = p.id
                      left join overrides as o on p.overridden and o.policy_id = p.id and o.key = l.key and (o.stays or o.expires_at > $4)
                     cross join lateral (values (l.ends_at, l.cost), (case when o.expires_at > $4 then o.expires_at end, 0)) as e (at, cost)
                     where l.ends_at > $4
                       and e.at is not null
                       and ($1 is null or p.name = $1 collate "C")
                       and ($2 is null or l.key = $2 collate "C")) as u
             group by u.name, u.key, u.capacity, u.overridden) as s
     order by share, s.name, s.key
     limit $3
  $sql$;
begin
  return query execute case when pg_is_in_recovery() then replace(v_rows, ' union all table ephemeral_leases', '') else v_rows end
    using of_policy, of_key, at_most, clock();
end;
$$;
comment on function ratelimit.fullest_slots(text, text, integer) is
  'The keys of slots that somebody holds, the fullest first, at most at_most of them.';

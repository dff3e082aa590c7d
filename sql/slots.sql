-- Slots: a limit on what is in flight. A policy with a lease lends its capacity to holders, and each lease is a row of leases.
--
-- What is held of a key is the sum of the leases that have not ended: at the microsecond ends_at a lease counts for nobody any more,
-- and nothing has to run for that. A grant removes those of its key that have ended, so that a clock that steps back revives none.
--
-- The row of slots is the lock of a key's leases. A grant, a renewal and a release write it first, under one condition
-- or other; a mere lock would let a transaction of a stricter isolation level count by its old snapshot. It is there
-- before a lease is, and as long as there is one.
--
-- The row has the sum, too, so that a grant under a key with many holders does not read them all: held counts all leases of the key, and
-- is what is held until counted_until, before which none of them ends. From then on the leases are added up, and the grant that does so
-- writes the sum anew. A session that cannot tell the sum sets counted_until to -infinity. A denial never trusts the sum.

-- What is held of a key, the wait for the cost, the wait until nobody holds, and whether a holder holds, by the numbers that apply to
-- the key. All is as of one snapshot, because the function is STABLE. The wait is until the first instant at which the cost fits: the
-- end of a lease, or of a part of an override; then the capacity that stays counts.
create or replace function ratelimit.look_at_slots(
    in policy ratelimit.policies, in key text, in now timestamptz, in cost bigint, in holder text,
    out capacity bigint, out lease interval, out held bigint, out retry_us bigint, out reset_us bigint, out holds boolean, out shadow boolean)
  language plpgsql stable
as $$
declare
  v_key          text collate "C" := key;
  v_now          alias for now;
  v_cost         alias for cost;
  v_holder       text collate "C" := holder;  -- null: nobody is asked for
  v_stays        bigint;       -- the capacity from v_ends_at on
  v_held_then    bigint;
  v_overridden   boolean;
  v_ends_at      timestamptz;  -- of a part of the override; null if none ends
  v_last         timestamptz;
  v_first        timestamptz;
  v_override     ratelimit.overrides;
begin
  select p.capacity, p.capacity, p.lease, p.shadow, p.overridden
    into capacity, v_stays, lease, shadow, v_overridden
    from policies as p
   where p.id = policy.id;
  if not found then  -- dropped meanwhile: as it was
    capacity := policy.capacity;
    lease    := policy.lease;
    shadow   := policy.shadow;
  elsif v_overridden then
    v_override := o from overrides as o where o.policy_id = policy.id and o.key = v_key;
    if v_override.key is not null then
      v_stays := coalesce(v_override.capacity, capacity);
      capacity       := v_stays;
      lease          := coalesce(v_override.lease, lease);
      if v_override.expires_at > v_now then
        v_ends_at := v_override.expires_at;
        capacity  := coalesce(v_override.ending_capacity, capacity);
        lease     := coalesce(v_override.ending_lease, lease);
      end if;
    end if;
  end if;
  select coalesce(sum(u.cost), 0), coalesce(sum(u.cost) filter (where u.ends_at > v_ends_at), 0), max(u.ends_at),
         coalesce(bool_or(u.holder = v_holder), false),
         min(u.ends_at) filter (where v_cost <= case when u.ends_at >= v_ends_at then v_stays else look_at_slots.capacity end - u.held_then)
    into held, v_held_then, v_last, holds, v_first
    from (select l.cost, l.ends_at, l.holder,
                 coalesce(sum(l.cost) over (order by l.ends_at desc groups between unbounded preceding and 1 preceding), 0) as held_then
            from leases as l
           where l.policy_id = policy.id and l.key = v_key and l.ends_at > v_now) as u;
  v_first  := least(v_first, case when v_cost <= v_stays - v_held_then then v_ends_at end);
  retry_us := case when v_cost = 0 or v_cost <= capacity - held then 0 else time_until(v_first, v_now) end;
  reset_us := coalesce(time_until(v_last, v_now), 0);
end;
$$;
comment on function ratelimit.look_at_slots(ratelimit.policies, text, timestamptz, bigint, text) is
  'The capacity and the lease that apply to a key of slots, what is held of it and whether by a holder, and the waits for a cost and until nobody holds.';

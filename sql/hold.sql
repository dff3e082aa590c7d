-- Lends cost slots of a key to a holder until its lease ends, if they are free.
--
-- The steps:
--   1. Mostly the holder holds nothing yet, and none of the leases has ended. One conditional update of the key's row takes the slots, and
--      the lease is written, if the holder has none.
--   2. Else the leases are looked at. If the cost does not fit then, the answer is a denial. It locks nothing that step 1 has not.
--   3. The row of the key is locked, or created. Another session may have changed the leases: they are added up under the lock. If the
--      cost does not fit any more, step 2 follows again.
--   4. The row and the lease are written, and leases that have ended are removed.
-- A holder that holds is renewed whether or not its cost would fit now.
--
-- The clock is read first, before each step 2 and under the lock. If in step 1 the holder turns out to hold, or a lease or an override has
-- ended while the update waited, or the clock went back, step 2 follows, and the row says that its sum does not count.
--
-- Under REPEATABLE READ and SERIALIZABLE, steps 1 and 3 fail with 40001 if the leases were changed since the snapshot, and a denial is as
-- old as the snapshot.
create or replace function ratelimit_hold(
    policy text,
    key    text,
    holder text,
    cost   bigint default 1)
  returns ratelimit.hold
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if (is_name(holder) and cost >= 1) is not true then
    perform check_hold(policy, key, holder, cost);  -- raises 22023
  end if;
  v_policy := p from policies as p where p.name = policy collate "C";
  if v_policy.lease is null then
    perform check_hold(policy, key, holder, cost);  -- raises 22023
    if v_policy.id is null then
      perform refuse_unknown(policy, 'capacity => 5, lease => ''5 minutes''');
    end if;
    perform refuse_tokens(policy);  -- raises 22023
  end if;
  if not v_policy.durable then
    if pg_is_in_recovery() then perform refuse_ephemeral(v_policy); end if;  -- raises 0A000
    return hold_ephemeral(v_policy, key, holder, cost);  -- what follows, on the twin tables
  end if;

  declare
    v_key         text collate "C" := key;
    v_holder      text collate "C" := holder;
    v_cost        alias for cost;
    v_now         timestamptz := clock();
    v_seen_at     timestamptz;  -- the clock by which step 1 took the slots
    v_held        bigint;       -- by leases that have not ended
    v_until       timestamptz;  -- no lease ends before
    v_own_cost    integer;      -- of the holder's lease; null: it holds nothing
    v_ends_at     timestamptz;
    v_lease       interval;
    v_look        record;
    v_rounds      integer;
    v_override    ratelimit.overrides;
    v_numbers     ratelimit.numbers;
    v_numbers_end timestamptz;  -- of a part of the override; null: none ends
  begin
    if v_policy.overridden then
      v_override := o from overrides as o where o.policy_id = v_policy.id and o.key = v_key;
      if v_override.key is not null then
        v_policy      := with_override(v_policy, v_override, v_now);
        v_numbers_end := case when v_override.expires_at > v_now then v_override.expires_at end;
      end if;
    end if;

    -- 1. A new holder, under a key of which the sum counts.
    v_lease := date_part('epoch', v_policy.lease) * interval '1 second';  -- without days
    if current_setting('transaction_read_only') = 'off' then
      v_ends_at := v_now + v_lease;
      update slots as s
         set held          = s.held + v_cost,
             counted_until = least(s.counted_until, v_ends_at),
             due_at        = least(s.due_at, v_ends_at)
       where s.policy_id     = v_policy.id
         and s.key           = v_key
         and s.counted_until > v_now
         and s.held         <= v_policy.capacity - v_cost
      returning s.held, s.counted_until into v_held, v_until;
      if found then
        v_seen_at := v_now;
        v_now     := clock();
        if v_now >= v_seen_at and v_now < least(v_until, v_numbers_end) then
          insert into leases (policy_id, key, holder, cost, ends_at)
          values (v_policy.id, v_key, v_holder, v_cost, v_now + v_lease)
          on conflict on constraint leases_pkey do nothing;
          if found then
            return (true, v_policy.capacity - v_held, interval '0', v_lease, v_policy.capacity, false, false)::ratelimit.hold;
          end if;
        end if;
        update slots as s set counted_until = '-infinity' where s.policy_id = v_policy.id and s.key = v_key;
      end if;
    end if;

    if is_name(v_key) is not true then
      perform check_hold(v_policy.name, v_key, v_holder, v_cost);  -- raises 22023
    end if;
    loop
      -- 2. A denial, unless enough slots are free by now, or the holder holds.
      v_now := clock();
      select l.* into v_look from look_at_slots(v_policy, v_key, v_now, v_cost, v_holder) as l;
      if not v_look.holds and v_look.retry_us is distinct from 0 then
        if v_look.shadow then
          return (true, v_look.capacity - v_look.held, interval '0', duration(microseconds(v_look.lease)::bigint), v_look.capacity,
                  false, true)::ratelimit.hold;
        end if;
        return (false, v_look.capacity - v_look.held, duration(v_look.retry_us), interval '0', v_look.capacity, false, false)::ratelimit.hold;
      end if;
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006

      -- 3. The lock, and the leases under it.
      perform s.held from slots as s where s.policy_id = v_policy.id and s.key = v_key for update;
      if not found then
        insert into slots (policy_id, key, held, counted_until, due_at)
        values (v_policy.id, v_key, 0, '-infinity', v_now)  -- due at once: clean-up will postpone it
        on conflict on constraint slots_pkey do nothing;
      end if;
      if found then
        v_now     := clock();
        v_numbers := numbers_now(v_policy, v_key, v_now);
        v_policy  := v_numbers.policy;
        select coalesce(sum(l.cost), 0), min(l.ends_at), min(l.cost) filter (where l.holder = v_holder)
          into v_held, v_until, v_own_cost
          from leases as l
         where l.policy_id = v_policy.id
           and l.key       = v_key
           and l.ends_at   > v_now;
        if v_own_cost <> v_cost then
          perform held_with_another_cost(v_holder, v_own_cost, v_cost);  -- raises RL002
        end if;
        exit when v_own_cost = v_cost or v_cost <= v_policy.capacity - v_held;
      end if;
      v_rounds := next_round(v_rounds, v_policy.name, v_key);  -- raises 40001
    end loop;

    -- 4. The row of the key, and the leases.
    if v_own_cost is null then
      v_held := v_held + v_cost;
    end if;
    v_lease   := date_part('epoch', v_policy.lease) * interval '1 second';
    v_ends_at := v_now + v_lease;
    update slots as s
       set held          = v_held,
           counted_until = least(v_until, v_ends_at),
           due_at        = least(s.due_at, v_ends_at)
     where s.policy_id = v_policy.id
       and s.key       = v_key;
    delete from leases as l
     where l.policy_id = v_policy.id
       and l.key       = v_key
       and l.ends_at  <= v_now;
    insert into leases (policy_id, key, holder, cost, ends_at)
    values (v_policy.id, v_key, v_holder, v_cost, v_ends_at)
    on conflict on constraint leases_pkey do update set ends_at = excluded.ends_at;
    return (true, v_policy.capacity - v_held, interval '0', v_lease, v_policy.capacity, v_own_cost is not null, false)::ratelimit.hold;
  end;
end;
$$;
comment on function ratelimit_hold(text, text, text, bigint) is
'Lends cost slots of a key to a holder if they are free, until the lease ends or ratelimit_release is called.
A denial is an answer and not an error.
A lease that has ended counts for nobody from that microsecond on. What its holder still does is not stopped: renew before each
  step with an effect outside, and stop when ratelimit_renew returns null.
A repeat by a holder that holds begins its lease anew, with renewed true, also after the capacity was lowered.
Call it as the last statement of a short transaction: other calls for the key wait until it ends. A transaction that holds several
  keys asks for them in the order of policy and key.
holder: 1 to 512 bytes, a new one for each attempt, such as a uuid. Two attempts with one name are one holder, and each could
  release the slots of the other.
cost: slots, 1 or more. A cost above the capacity that applies to the key is denied.
Errors: 22023 for a bad argument and for a policy without a lease, RL001 for an unknown policy, RL002 for a holder that holds with
  another cost, 25006 in a read-only transaction.
Locks: a grant locks the row of the key until the transaction ends. A denial keeps a lock on it only if the call waited for it.
Writes: a grant writes the row of the key and the lease, and deletes the leases of the key that have ended. A denial writes nothing, or
  the row of the key if a lease or an override ended while it waited.
Role: application.';

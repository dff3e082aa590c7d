-- Lends cost slots of a key to a holder until its lease ends, if they are free.
--
-- The steps:
--   1. The row of the key is read: how often its leases were changed, and what is held. From counted_until on the leases are added up
--      instead. A key without a row has no leases.
--   2. If the cost does not fit, the leases are looked at. If it does not fit then, the answer is a denial: nothing was locked. If it
--      does, step 1 follows again, and adds them up.
--   3. One conditional update writes the row of the key, if nobody has changed the leases since step 1. It may wait for a session that
--      holds, renews or releases under the same key. A row that is missing is created.
--   4. If another session has changed them, the row is locked, and steps 1 to 3 follow with the leases as they are under the lock.
--   5. The row is this transaction's now, and the lease is written. Leases that have ended are removed.
-- A holder that holds is renewed whether or not its cost would fit now.
--
-- The clock is read before step 1 and again after step 3, which may have waited. If a lease or an override has ended in between, or the
-- clock went back, step 1 follows again.
--
-- Under REPEATABLE READ and SERIALIZABLE, step 3 fails with 40001 if the leases were changed since the snapshot, and a denial is as old as
-- the snapshot.
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
  if (is_name(key) and is_name(holder) and cost >= 1) is not true then
    perform check_hold(policy, key, holder, cost);  -- raises 22023
  end if;
  v_policy := p from policies as p where p.name = policy collate "C";
  if v_policy.kind is distinct from 'slots' then
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
    v_key          text collate "C" := key;
    v_holder       text collate "C" := holder;
    v_cost         alias for cost;
    v_now          timestamptz := clock();
    v_seen_at      timestamptz;  -- the clock by which the leases were read
    v_changes      bigint;       -- of the key; null: it has no row
    v_held         bigint;       -- by leases that have not ended
    v_until        timestamptz;  -- no lease ends before
    v_ended        boolean;      -- some lease has
    v_own_cost     integer;      -- of the holder's lease
    v_own_end      timestamptz;  -- likewise
    v_renewed      boolean;
    v_next_changes bigint;
    v_ends_at      timestamptz;
    v_lease        interval;
    v_retry_us     bigint;       -- microseconds until the cost fits; null: never
    v_look         record;
    v_written      boolean;
    v_rounds       integer;
    v_override     ratelimit.overrides;
    v_numbers      ratelimit.numbers;
    v_numbers_end  timestamptz;  -- of a part of the override; null: none ends
  begin
    if v_policy.overridden then
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key;
      if found then
        v_policy      := with_override(v_policy, v_override, v_now);
        v_numbers_end := case when v_override.expires_at > v_now then v_override.expires_at end;
      end if;
    end if;

    loop
      -- 1. The row of the key, and the holder's lease.
      select s.changes, s.held, s.counted_until, l.cost, l.ends_at
        into v_changes, v_held, v_until, v_own_cost, v_own_end
        from slots as s
        left join leases as l on l.policy_id = v_policy.id and l.key = v_key and l.holder = v_holder
       where s.policy_id = v_policy.id and s.key = v_key;
      v_ended := false;
      if v_changes is null then
        v_held := 0;
      elsif v_until <= v_now or v_retry_us = 0 then
        select coalesce(sum(l.cost) filter (where l.ends_at > v_now), 0),
               min(l.ends_at) filter (where l.ends_at > v_now),
               count(*) filter (where l.ends_at <= v_now) > 0
          into v_held, v_until, v_ended
          from leases as l
         where l.policy_id = v_policy.id and l.key = v_key;
      end if;
      v_renewed  := (v_own_end > v_now) is true;
      v_lease    := date_part('epoch', v_policy.lease) * interval '1 second';  -- without days
      if v_renewed and v_own_cost <> v_cost then
        perform held_with_another_cost(v_holder, v_own_cost, v_cost);  -- raises RL002
      end if;

      -- 2. A denial. By the time of this look there may be more, or the holder may hold.
      if not v_renewed and v_cost > v_policy.capacity - v_held then
        select l.* into v_look from look_at_slots(v_policy, v_key, v_now, v_cost, v_holder) as l;
        v_retry_us := case when v_look.holds then 0 else v_look.retry_us end;
        if v_retry_us is distinct from 0 and v_look.shadow then
          return (true, v_look.capacity - v_look.held, interval '0', duration(microseconds(v_look.lease)::bigint), v_look.capacity,
                  false, true)::ratelimit.hold;
        elsif v_retry_us is distinct from 0 then
          return (false, v_look.capacity - v_look.held, duration(v_retry_us), interval '0', v_look.capacity, false, false)::ratelimit.hold;
        end if;

      -- 3. The row of the key.
      else
        if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
        v_ends_at := v_now + v_lease;
        if not v_renewed then
          v_held := v_held + v_cost;
        end if;
        if v_changes is null then
          v_next_changes := microseconds(v_now - timestamptz 'epoch')::bigint;
          insert into slots (policy_id, key, changes, held, counted_until, due_at)
          values (v_policy.id, v_key, v_next_changes, v_held, v_ends_at, v_now)  -- due at once: clean-up will postpone it
          on conflict on constraint slots_pkey do nothing;
        else
          update slots as s
             set changes       = v_changes + 1,
                 held          = v_held,
                 counted_until = least(v_until, v_ends_at),
                 due_at        = least(s.due_at, v_ends_at)
           where s.policy_id = v_policy.id
             and s.key       = v_key
             and s.changes   = v_changes;
        end if;
        v_written := found;
        v_seen_at := v_now;
        v_now     := clock();  -- it may have waited; if the clock went back, leases may be live that had ended
        exit when v_written and v_now >= v_seen_at and (v_until > v_now and v_numbers_end > v_now) is not false;

        -- 4. The lock. A row that was written counts a lease that this call may not grant any more.
        if v_written then
          update slots as s
             set counted_until = '-infinity'
           where s.policy_id = v_policy.id
             and s.key       = v_key;
        else
          perform s.changes from slots as s
            where s.policy_id = v_policy.id
              and s.key       = v_key
              for update;
        end if;
      end if;
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
      v_now         := clock();
      v_numbers     := numbers_now(v_policy, v_key, v_now);
      v_policy      := v_numbers.policy;
      v_numbers_end := v_numbers.ends_at;
    end loop;

    -- 5. The lease.
    v_ends_at := v_now + v_lease;
    if v_ended then
      delete from leases as l
       where l.policy_id = v_policy.id
         and l.key       = v_key
         and l.ends_at  <= v_now;
    end if;
    if v_renewed then
      update leases as l
         set ends_at = v_ends_at
       where l.policy_id = v_policy.id
         and l.key       = v_key
         and l.holder    = v_holder;
    else
      insert into leases (policy_id, key, holder, cost, ends_at)
      values (v_policy.id, v_key, v_holder, v_cost, v_ends_at);
    end if;
    return (true, v_policy.capacity - v_held, interval '0', v_lease, v_policy.capacity, v_renewed, false)::ratelimit.hold;
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
Writes: a grant writes the row of the key and the lease, and deletes the leases of the key that have ended. A denial writes nothing.
Role: application.';

create or replace function ratelimit.peek_slots(policy ratelimit.policies, key text, cost bigint, now timestamptz)
  returns ratelimit.decision language plpgsql stable
as $$
declare
  v_look record;
begin
  if policy.durable then
    select l.* into v_look from look_at_slots(policy, key, now, cost, null) as l;
  else
    if pg_is_in_recovery() then perform refuse_ephemeral(policy); end if;  -- raises 0A000
    select l.* into v_look from look_at_ephemeral_slots(policy, key, now, cost, null) as l;
  end if;
  return (coalesce(v_look.retry_us = 0, false), v_look.capacity - v_look.held, duration(v_look.retry_us), duration(v_look.reset_us),
          v_look.capacity, false, false)::ratelimit.decision;
end;
$$;
comment on function ratelimit.peek_slots(ratelimit.policies, text, bigint, timestamptz) is
  'The steps of ratelimit_peek for slots.';

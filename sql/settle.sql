-- Replaces the cost of a grant by the real one, exactly once.
--
-- The steps:
--   1. The grant is read.
--   2. The bucket is locked. One without a row is full, and is created first: without a lock, others would see a grant that
--      is not settled yet beside a level that this settlement did not.
--   3. The grant is marked as settled. If it is no longer as it was read, step 1 follows.
--   4. The level moves. So no move is ever undone; one that was cut at full could not be.
create or replace function ratelimit_settle(
    policy          text,
    key             text,
    idempotency_key text,
    cost            bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if not acceptable(key, cost) or cost > 9000000000000 or is_name(idempotency_key) is not true then
    perform check_charge(policy, key, cost, idempotency_key);  -- raises 22023
    perform check_name('idempotency_key', idempotency_key);    -- likewise
  end if;
  v_policy := p from policies as p where p.name = policy collate "C";
  if v_policy.durable is not true then
    if v_policy.id is null or pg_is_in_recovery() then
      perform refuse_policy(policy, v_policy);  -- raises 22023, RL001 or 0A000
    end if;
    return settle_ephemeral(v_policy, key, idempotency_key, cost);  -- what follows, on the twin tables
  end if;

  declare
    v_key             text collate "C" := key;
    v_idempotency_key text collate "C" := idempotency_key;
    v_cost            alias for cost;
    v_now             timestamptz := clock();
    v_level           bigint;       -- microtokens in the bucket
    v_stored          bigint;       -- what the row of a quota has for that
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_paused_until    timestamptz;  -- as of ratelimit_pause
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_back            bigint;       -- microtokens that the settlement gives back; below zero: that it takes
    v_first           ratelimit.idempotency_keys;  -- the grant
    v_override        ratelimit.overrides;
    v_turns           ratelimit.turns;  -- of a quota
    v_counts_from     timestamptz;      -- of one with a history
    v_numbers         ratelimit.numbers;
  begin
    if v_policy.special then
      if v_policy.kind = 'slots' then
        perform refuse_slots(v_policy.name);  -- raises 22023
      end if;
      v_override := o from overrides as o where o.policy_id = v_policy.id and o.key = v_key;
      if v_override.key is not null then
        v_numbers := numbers_by(v_policy, v_override, v_now);
        v_policy  := v_numbers.policy;
      end if;
    end if;
    loop
      -- 1. The grant. A shadow policy looks for it again after the bucket was read: a grant that was committed meanwhile is in the
      --    level that was read, and so must be found.
      v_first := k from idempotency_keys as k
                  where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if (v_first.expires_at > v_now) is not true then
        if not v_policy.shadow then
          perform no_grant(v_policy.name, v_idempotency_key);  -- raises RL003
        end if;
        select n.level, n.reset_us into v_level, v_reset_us from level_of_buckets(v_policy, v_numbers.ends_at, v_numbers.after, v_key, v_now) as n;
        v_first := k from idempotency_keys as k
                    where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if (v_first.expires_at > v_now) is not true then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
      end if;
      if v_first.settled is not null then
        if v_first.settled <> v_cost then
          perform another_cost(format('%L was settled with cost %s and is settled again with cost %s.', v_idempotency_key, v_first.settled, v_cost),
                               'The first settlement stands: charge or refund the difference.');
        end if;
        select n.level, n.reset_us into v_level, v_reset_us from level_of_buckets(v_policy, v_numbers.ends_at, v_numbers.after, v_key, v_now) as n;
        return spent_of(v_level, v_reset_us, v_policy.capacity, true);
      end if;
      v_back := coalesce(v_first.taken, microtokens(v_first.cost)) - microtokens(v_cost);

      -- 2. The bucket.
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
      loop
        select b.level, b.refilled_at, b.paused_until into v_level, v_refilled_at, v_paused_until
          from buckets as b
         where b.policy_id = v_policy.id
           and b.key       = v_key
           for update;
        v_has_row := found;
        v_now     := clock();  -- the lock may have waited
        if v_policy.special or not v_has_row then
          v_numbers := numbers_now(v_policy, v_key, v_now);
          v_policy  := v_numbers.policy;
          v_turns   := v_numbers.turns;
          if v_policy.kind = 'quota' then
            v_level := level_now(v_level, v_refilled_at, v_now, v_policy, v_turns);
            if v_policy.history is not null then
              v_counts_from := v_turns.turned_at;
              if v_refilled_at < v_turns.turned_at then
                perform close_period(v_policy.id, v_key, v_now);
              end if;
            end if;
            if v_back > 0 and v_first.granted_at < v_turns.turned_at then
              v_back := 0;  -- the period of the grant is over
            end if;
          end if;
        end if;
        exit when v_has_row;
        v_level       := microtokens(v_policy.capacity);
        v_refilled_at := v_now;
        insert into buckets (policy_id, key, level, refilled_at, due_at, counts_from)
        values (v_policy.id, v_key, stored_level(v_level, v_policy), v_refilled_at, v_now, v_counts_from)  -- due at once: clean-up will postpone it
        on conflict on constraint buckets_pkey do nothing;
        v_has_row := found;
        exit when v_has_row;
      end loop;

      -- 3. The mark, if the grant is still as it was read.
      update idempotency_keys as k
         set settled = v_cost
       where k.policy_id       = v_policy.id
         and k.key             = v_key
         and k.idempotency_key = v_idempotency_key
         and k.settled is null
         and k.cost            = v_first.cost
         and k.expires_at      = v_first.expires_at
         and k.expires_at      > v_now;
      exit when found;
    end loop;

    -- 4. The level.
    v_level       := moved_level(refilled(v_level, v_refilled_at, v_now, v_policy), v_back,
                                 case when v_back > 0 and v_paused_until > v_now then 0 else v_policy.full_level end, floor_level(v_policy.gain, v_policy.every_us));
    v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
    v_reset_us    := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
    if v_policy.special then
      if v_policy.kind = 'quota' then
        v_level  := greatest(v_level, lowest_level_of_quota(v_policy.capacity));
        v_stored := v_level - microtokens(v_policy.capacity);
      end if;
      if v_policy.kind = 'quota' or v_numbers.ends_at is not null then
        v_reset_us := wait_past_end(null, coalesce(v_stored, v_level), v_refilled_at, v_now, v_policy, v_numbers.ends_at, v_turns, v_numbers.after);
      end if;
    end if;
    update buckets as b
       set level = coalesce(v_stored, v_level), refilled_at = v_refilled_at, room = null
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  end;
end;
$$;
comment on function ratelimit_settle(text, text, text, bigint) is
'Replaces the cost of a grant by the real cost, exactly once.
Any function that takes an idempotency key can have made the grant. The level moves by the old cost minus the real
  one: up to full at most, and down to the floor of debt (see ratelimit_charge). allowed is always true, and the rest
  is the bucket after the settlement.
The first settlement stands. A repeat with the same cost has replayed true and changes nothing.
After a settlement any request under the key fails: with RL002 if its cost is not that of the grant, or else with RL004. A charge
  with that cost is replayed.
What the grant of a quota took too much is not given back once its period is over.
Under a shadow policy a missing grant is no error: nothing is charged, and shadowed is true.
idempotency_key: the key of the grant.
cost: the real cost in whole tokens, 0 to 9000000000000.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a grant that was settled with another cost,
  RL003 if the transaction sees no live grant under the key, 25006 in a read-only transaction.
Locks: the bucket row, which is created if the bucket has none, and then the row of the idempotency key, until the
  transaction ends. A replay locks nothing, unless it ran beside the first settlement.
Writes: the bucket and the idempotency key. A replay changes nothing.
Role: application.';

-- Takes cost tokens from one bucket, whatever it holds.
--
-- The steps:
--   1. A live idempotency key is replayed.
--   2. The bucket is locked. One without a row is full, and is created first.
--   3. The idempotency key is remembered, with the tokens that the charge takes: one that is cut at the floor is settled against that. If
--      another session has stored the key meanwhile, step 1 follows.
--   4. The level moves. So nothing that was moved is ever moved back.
create or replace function ratelimit_charge(
    policy          text,
    key             text,
    cost            bigint,
    idempotency_key text default null)
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
  if not acceptable(key, cost) or cost > 9000000000000 or is_name(idempotency_key) is false then
    perform check_charge(policy, key, cost, idempotency_key);  -- raises 22023
  end if;
  v_policy := p from policies as p where p.name = policy collate "C";
  if v_policy.durable is not true then
    if v_policy.id is null or pg_is_in_recovery() then
      perform refuse_policy(policy, v_policy);  -- raises 22023, RL001 or 0A000
    end if;
    return charge_ephemeral(v_policy, key, cost, idempotency_key);  -- what follows, on the twin tables
  end if;

  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C";  -- null without one
    v_now             timestamptz := clock();
    v_level           bigint;       -- microtokens in the bucket
    v_stored          bigint;       -- what the row of a quota has for that
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_held            bigint;       -- what the bucket held before the charge
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the charge that is remembered under the idempotency key
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
    if v_cost = 0 then
      select n.level, n.reset_us into v_level, v_reset_us from level_of_buckets(v_policy, v_numbers.ends_at, v_numbers.after, v_key, v_now) as n;
      return spent_of(v_level, v_reset_us, v_policy.capacity, false);
    end if;

    loop
      -- 1. The idempotency key.
      if idempotency_key is not null then
        v_idempotency_key := idempotency_key;
        v_first := k from idempotency_keys as k
                    where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if v_first.cost <> v_cost then
            perform refuse_repeat(v_first, v_cost);  -- raises RL002
          end if;
          return replay_of(v_first);
        end if;
      end if;

      -- 2. The bucket.
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
      loop
        select b.level, b.refilled_at into v_level, v_refilled_at
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

      -- 3. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
      v_held        := refilled(v_level, v_refilled_at, v_now, v_policy);
      v_level       := moved_level(v_held, -microtokens(v_cost), v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
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
      exit when v_idempotency_key is null;
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, taken, remaining, reset_after, capacity, expires_at, granted_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost, nullif(v_held - v_level, microtokens(v_cost)),
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us),
              case when v_policy.kind = 'quota' then v_now end)
      on conflict on constraint idempotency_keys_pkey do update
           set (cost, remaining, reset_after, capacity, expires_at, ready_at, settled, taken, granted_at)
             = (excluded.cost, excluded.remaining, excluded.reset_after, excluded.capacity, excluded.expires_at, excluded.ready_at,
                excluded.settled, excluded.taken, excluded.granted_at)
         where k.expires_at <= v_now;
      exit when found;
    end loop;

    -- 4. The level.
    update buckets as b
       set level = coalesce(v_stored, v_level), refilled_at = v_refilled_at, room = null
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  end;
end;
$$;
comment on function ratelimit_charge(text, text, bigint, text) is
'Takes cost tokens from one bucket whatever the bucket holds.
It is for usage that is known only afterwards. allowed is always true.
Tokens that the bucket does not hold are debt: remaining goes below zero, and refill pays the debt first. Debt ends at
  a floor: 9000000000000 tokens, or the refill of 10000 years if that is less and not 0. Of a quota at most 9000000000000
  tokens are used. The rest of a charge that
  reaches the floor is dropped.
A repeat under a live idempotency key gets the first answer and takes nothing, also after a settlement.
cost: whole tokens, 0 to 9000000000000. A cost of 0 takes nothing and ignores the idempotency key.
idempotency_key: as in ratelimit_acquire.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key that was granted with
  another cost, 25006 in a read-only transaction.
Locks: the bucket row, and then the row of the idempotency key, until the transaction ends. A cost of 0 locks nothing.
  A replay locks nothing, unless it ran beside the first request.
Writes: the bucket and the idempotency key. A replay and a cost of 0 take nothing and write no level.
Role: application.';

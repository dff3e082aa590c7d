-- Takes cost tokens from one bucket now, if it will have them within max_wait, and returns how long to wait before acting.
-- With max_wait 0 it decides as ratelimit_acquire does.
--
-- The wait is until the debt is paid that the reservation leaves: then the level is 0 or more, and a microsecond earlier it
-- is not.
--
-- The steps are those of ratelimit_acquire, but for two. The update of step 2 takes the tokens if the bucket will have them
-- within max_wait; it leaves that open if it is a matter of the last microtoken. So if the bucket was read in step 3, and the
-- cost fits, step 3c takes the tokens from the bucket as it was read. If another session has changed it since, step 2 is
-- repeated.
--
-- The wait counts from the clock after the update, which may have waited for another session. Other times count as those of
-- ratelimit_acquire.
-- Locks and writes are those of ratelimit_acquire.
create or replace function ratelimit_reserve(
    policy          text,
    key             text,
    max_wait        interval,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.reservation
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if not acceptable(key, cost) or is_max_wait(max_wait) is not true or idempotency_key is not null then
    if (acceptable(key, cost) and is_max_wait(max_wait) and is_name(idempotency_key) is not false) is not true then
      perform check_request(policy, key, cost, idempotency_key);  -- raises 22023
      perform check_max_wait(max_wait);                           -- likewise
    end if;
    if cost = 0 then
      idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  v_policy := p from policies as p where p.name = policy collate "C";
  if v_policy.durable is not true then
    if v_policy.id is null or pg_is_in_recovery() then
      perform refuse_policy(policy, v_policy);  -- raises 22023, RL001 or 0A000
    end if;
    return reserve_ephemeral(v_policy, key, max_wait, cost, idempotency_key);  -- what follows, on the twin tables
  end if;

  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C";  -- null without one
    v_now             timestamptz := clock();
    v_until           timestamptz;  -- when the wait must be over
    v_wanted          bigint;       -- cost in microtokens; 0 if nothing can be taken
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_seen_level      bigint;       -- the row as it was read
    v_seen_at         timestamptz;  -- likewise
    v_wait_us         bigint;       -- microseconds until the debt is paid that cost would leave; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_ready_at        timestamptz;  -- when the grant holds; null: at once
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_quota           ratelimit.partial_decision;
    v_rounds          integer;
    v_override        ratelimit.overrides;
    v_numbers         ratelimit.numbers;
  begin
    if v_policy.special then
      if v_policy.kind = 'slots' then
        perform refuse_slots(v_policy.name);  -- raises 22023
      elsif v_policy.kind = 'quota' then
        v_quota := take_quota_of_buckets(v_policy, v_key, v_cost, v_cost, idempotency_key);
        return (v_quota.allowed, v_quota.retry_after, v_quota.remaining, v_quota.reset_after, v_quota.capacity, v_quota.replayed,
                v_quota.shadowed)::ratelimit.reservation;
      end if;
      v_override := o from overrides as o where o.policy_id = v_policy.id and o.key = v_key;
      if v_override.key is not null then
        v_numbers := numbers_by(v_policy, v_override, v_now);
        v_policy  := v_numbers.policy;
      end if;
    end if;
    v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;

    -- 1. The idempotency key.
    if idempotency_key is not null then
      v_idempotency_key := idempotency_key;
      v_first := k from idempotency_keys as k
                  where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update. max_wait counts without days, which may have 23 or 25 hours. The update rounds the refill down to whole
      --    microtokens, so the debt may be paid a microtoken later than the bucket as it was would have covered the cost: the
      --    bucket counts for one less. The condition compares the stored level with the floor of debt.
      --    Where an override ends within max_wait, step 3c decides.
      v_until := v_now + date_part('epoch', max_wait) * interval '1 second';
      if v_wanted > 0 and (v_numbers.ends_at <= v_until) is not true and current_setting('transaction_read_only') = 'off' then
        update buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level - 1, b.refilled_at, v_until, v_policy) >= v_wanted
           and b.level     >= v_wanted - deepest_debt()
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.special then
        v_numbers := numbers_now(v_policy, v_key, v_now);
        v_policy  := v_numbers.policy;
        v_wanted  := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy),
             b.level, b.refilled_at
        into v_level, v_reset_us, v_seen_level, v_seen_at
        from buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_numbers  := numbers_now(v_policy, v_key, v_now);
        v_policy   := v_numbers.policy;
        v_wanted   := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
        v_level    := microtokens(v_policy.capacity);
        v_reset_us := 0;
      end if;
      v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
      v_wait_us     := case
                         when v_cost = 0 then 0::bigint
                         when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), v_level, v_refilled_at, v_now, v_policy)
                       end;
      if v_numbers.ends_at is not null then
        v_reset_us := wait_past_end(null, v_seen_level, v_seen_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after);
        if v_wanted = 0 or not v_has_row then
          v_wait_us := case when v_cost = 0 then 0 else wait_past_end(v_cost, v_seen_level, v_seen_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after) end;
        else  -- as the row will be stored
          v_wait_us := wait_past_end(v_cost, v_level, v_refilled_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after);
        end if;
      end if;

      -- 3a. Too long to wait, or too deep a debt.
      if v_wanted = 0
         or (v_wait_us <= microseconds(max_wait)
             and (v_wait_us = 0 or v_level::numeric - v_wanted >= floor_level(v_policy.gain, v_policy.every_us))) is not true then
        if v_idempotency_key is not null then
          v_first := k from idempotency_keys as k
                      where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
          end if;
        end if;
        return reservation_of(v_cost = 0, v_level, v_wait_us, v_reset_us, v_policy.capacity, v_policy.shadow);
      end if;

      -- 3b. No row. The insert may wait for a session that creates the same one.
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
      v_level := v_level - v_wanted;
      if not v_has_row then
        v_refilled_at := v_now;
        v_reset_us    := long_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint buckets_pkey do nothing;
        exit when found;

      -- 3c. From the bucket as it was read.
      else
        update buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- Again. Each round is due to another session.
      v_rounds := next_round(v_rounds, v_policy.name, v_key);  -- raises 40001
    end loop;
    if not v_policy.special and v_refilled_at <= v_now then
      v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);
    elsif v_numbers.ends_at is null then
      v_reset_us := long_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);
    else
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after);
      if v_level < 0 then
        v_ready_at := v_now + duration(wait_past_end(0, v_level, v_refilled_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after));
      end if;
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      if v_level < 0 then
        v_ready_at := coalesce(v_ready_at, v_refilled_at + duration(short_wait(0, v_level, 0, v_policy)));
      end if;
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, ready_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity,
              coalesce(v_ready_at, v_now) + duration(v_policy.remember_us), v_ready_at)
      on conflict on constraint idempotency_keys_pkey do update
           set (cost, remaining, reset_after, capacity, expires_at, ready_at, settled, taken, granted_at)
             = (excluded.cost, excluded.remaining, excluded.reset_after, excluded.capacity, excluded.expires_at, excluded.ready_at,
                excluded.settled, excluded.taken, excluded.granted_at)
         where k.expires_at <= v_now;
      if not found then
        update buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        v_first := k from idempotency_keys as k
                    where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    -- The update may have waited, so the clock is read again: nobody waits longer than until the debt is paid.
    if v_level < 0 then
      if v_numbers.ends_at is not null then
        return waiting_of(v_level, greatest(0, time_until(v_ready_at, clock()))::double precision, v_reset_us, v_policy.capacity, v_policy.shadow);
      end if;
      return waiting_of(v_level, greatest(0, time_below(0, v_level, microseconds(clock() - v_refilled_at), v_policy.every_us, v_policy.tick_us,
                                                         v_policy.tick_gain, v_policy.round_up))::double precision,
                        v_reset_us, v_policy.capacity, v_policy.shadow);
    end if;
    return reserved_of(v_level, v_reset_us, v_policy.capacity);
  end;
end;
$$;
comment on function ratelimit_reserve(text, text, interval, bigint, text) is
'Takes cost tokens now if the bucket will hold them within max_wait, and returns how long to wait before using them.
Tokens that are not there yet are debt, which refill pays. So callers are served in order: each waits for its own
  tokens and for the tokens of earlier callers. ratelimit_acquire is denied while there is debt.
A wait above max_wait, a debt below the floor (see ratelimit_charge), or a cost above the capacity that applies now is a
  denial and takes nothing.
A repeat under a live idempotency key has the rest of the wait. Until the wait is over ratelimit_acquire under the key
  is denied, with that rest as retry_after.
Tokens that are given back do not shorten the wait of earlier reservations.
A shadow policy returns wait 0.
A quota lends nothing of a period that has not begun: it grants with wait 0, or denies.
max_wait: 0 to 365 days, without months and years. 0 takes only tokens that the bucket holds now.
cost: as in ratelimit_acquire.
idempotency_key: as in ratelimit_acquire. The grant is remembered until remember after the end of the wait.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key that was granted with
  another cost, RL004 for a live idempotency key whose grant was settled, 25006 in a read-only transaction.
Locks: as ratelimit_acquire.
Writes: as ratelimit_acquire.
Role: application.';

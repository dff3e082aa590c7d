-- Takes cost tokens from one bucket if it has them, and answers; a denial is an answer, not an error.
--
-- The steps. Steps 1 and 4 are for an acquire with an idempotency key. An idempotency key that has not expired is live.
--   1. A live idempotency key is replayed, even when the bucket is empty. If its grant was settled, that is RL004.
--   2. One conditional update takes the tokens. Concurrent acquires take turns at it, and each takes tokens
--      only if the bucket still has enough.
--   3. If the update takes nothing, the bucket is read.
--      a. If it has too few tokens, the idempotency key is looked up again, because the request that emptied the
--         bucket may have had the same one; then the answer is the replay or the denial.
--      b. If the bucket has no row, it is full: the row is created, less the cost.
--      c. If another session created the row first, or the bucket has enough tokens after all, step 2 is repeated.
--   4. After the tokens are taken, the idempotency key is remembered. By now this call has locked the bucket's
--      row in step 2, or created it in step 3. So a live idempotency key that turns up only now was committed
--      after step 1 and before the lock. The tokens go back and the idempotency key is replayed. The refill that
--      step 2 credited stays.
-- A cost above capacity takes nothing: it has only steps 1 and 3. A cost of 0 has only step 3. Either is answered from the bucket
-- as read.
--
-- The clock is read before step 1 and in each step 3. The update of step 2 and the insert of step 3 may wait for
-- another session. A grant that waited is answered by the clock from before the wait: its reset_after is never
-- too short, and the refill of the wait is credited later. A denial is answered by the clock from after the wait.
--
-- Under REPEATABLE READ and SERIALIZABLE, an acquire that would take from a bucket that changed since the snapshot
-- fails with 40001, and a denial is as old as the snapshot. A read-only transaction has no step 2: an acquire that the
-- bucket covers fails with 25006 in step 3.
--
-- Locks:  a grant and a replay of step 4 hold the bucket row and the row of the idempotency key until the
--         caller's transaction ends. A denial and a replay of step 3 hold the bucket row only if they had to
--         wait for it. A replay of step 1 holds nothing.
-- Writes: a grant writes the bucket and its idempotency key, a replay of step 4 the bucket; the others write nothing.
create or replace function ratelimit_acquire(
    policy          text,
    key             text,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- a plan made while the table was empty would read all of it once it has grown
as $$
declare
  v_policy policies;
begin
  v_policy := p from policies as p where p.name = policy collate "C";  -- as one value: the columns of a select into cost 6,000 instructions
  if v_policy.durable is not true then
    if v_policy.id is null or pg_is_in_recovery() then
      perform check_request(policy, key, cost, idempotency_key);  -- raises 22023
      perform refuse_policy(policy, v_policy);  -- raises RL001 or 0A000
    end if;
    return acquire_ephemeral(v_policy, key, cost, idempotency_key);  -- what follows, on the twin tables
  end if;

  declare
    v_key             alias for key;
    v_cost            alias for cost;
    v_idempotency_key alias for idempotency_key;
    v_now             timestamptz := clock();
    v_wanted          bigint;       -- cost in microtokens; 0 if nothing can be taken
    v_level           bigint;       -- microtokens in the bucket
    v_level_now       bigint;       -- likewise, with the refill until now
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_elapsed_us      double precision;  -- microseconds since then
    v_retry_us        bigint;       -- microseconds until the bucket holds cost; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_answer          ratelimit.decision;
    v_quota           ratelimit.partial_decision;
    v_rounds          integer;
    v_override        ratelimit.overrides;
    v_numbers         ratelimit.numbers;
  begin
    <<take>>
    begin
      -- This block answers for a plain policy and a cost of 1 to capacity. It leaves to the loop a new bucket, one in deep debt, one whose row
      -- a later clock wrote, one that covers the cost by now, and read-only transactions.
      <<plain>>
      begin
        if not v_policy.plain or v_idempotency_key is not null then
          if v_policy.special then
            if v_policy.kind <> 'tokens' then
              if v_policy.kind = 'slots' or not acceptable(v_key, v_cost) then
                perform check_request(v_policy.name, v_key, v_cost, v_idempotency_key);  -- raises 22023
                perform refuse_slots(v_policy.name);                                     -- likewise
              end if;
              v_quota := take_quota_of_buckets(v_policy, v_key, v_cost, v_cost, v_idempotency_key);
              return (v_quota.allowed, v_quota.remaining, v_quota.retry_after, v_quota.reset_after, v_quota.capacity, v_quota.replayed,
                      v_quota.shadowed)::ratelimit.decision;
            end if;
            v_override := o from overrides as o where o.policy_id = v_policy.id and o.key = v_key collate "C";
            if v_override.key is not null then
              if v_override.expires_at > v_now then
                v_numbers := numbers_by(v_policy, v_override, v_now);
              end if;
              v_policy := with_override(v_policy, v_override, v_now);
            end if;
          end if;
          exit plain when v_idempotency_key is null;

          -- 1. The idempotency key. Its expiry is compared after the row is found: in WHERE, a planner without statistics might
          --    choose the index of expires_at.
          if (v_cost > 0 and is_name(v_idempotency_key)) is not true then
            perform check_request(v_policy.name, v_key, v_cost, v_idempotency_key);  -- raises 22023
            v_idempotency_key := null;  -- nothing is granted, so nothing is remembered
          end if;
          v_first := k from idempotency_keys as k
                      where k.policy_id = v_policy.id and k.key = v_key collate "C" and k.idempotency_key = v_idempotency_key collate "C";
          if v_first.expires_at > v_now then
            if v_first.cost = v_cost and v_first.settled is null and v_first.ready_at is null then
              return (true, v_first.remaining, interval '0', v_first.reset_after, v_first.capacity, true, false)::ratelimit.decision;
            end if;
            return answer_again(v_first, v_cost, v_now, v_policy.shadow);
          end if;
          exit plain when not v_policy.plain;
        end if;

        -- 2. The update, and 3a. of a plain policy, in whole numbers. A key that has a row is valid.
        exit plain when v_cost < 1 or v_cost > v_policy.capacity or current_setting('transaction_read_only') = 'on';
        update buckets as b
           set level       = least(v_policy.rate_full, b.level + credit_by_rate(date_part('epoch', v_now - b.refilled_at) * 1000000,
                                                                                v_policy.rate_gain, v_policy.rate_per, v_policy.fill_ticks))
                             - microtokens(v_cost),
               refilled_at = v_now,
               room        = null  -- what a new row has more, so that its page has room for this version
         where b.policy_id   = v_policy.id
           and b.key         = v_key collate "C"
           and b.level       > v_policy.rate_floor
           and b.refilled_at <= v_now
           and credit_by_rate(date_part('epoch', v_now - b.refilled_at) * 1000000, v_policy.rate_gain, v_policy.rate_per, v_policy.fill_ticks)
               >= microtokens(v_cost) - b.level
        returning b.level into v_level;
        if found then
          v_answer := granted_by_rate(v_level, v_level, 0, v_policy.capacity, v_policy.rate_full, v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up);
          exit take when v_idempotency_key is not null;
          return v_answer;
        end if;
        v_now := clock();
        select b.level, date_part('epoch', v_now - b.refilled_at) * 1000000 into v_level, v_elapsed_us
          from buckets as b
         where b.policy_id   = v_policy.id
           and b.key         = v_key collate "C"
           and b.level       > v_policy.rate_floor
           and b.refilled_at <= v_now;
        v_level_now := least(v_policy.rate_full, v_level + credit_by_rate(v_elapsed_us, v_policy.rate_gain, v_policy.rate_per, v_policy.fill_ticks));
        if v_level_now < microtokens(v_cost) then
          if v_idempotency_key is not null or v_policy.shadow then
            if v_idempotency_key is not null then
              v_first := k from idempotency_keys as k
                          where k.policy_id = v_policy.id and k.key = v_key collate "C" and k.idempotency_key = v_idempotency_key collate "C";
            end if;
            if v_first.expires_at > v_now then
              return answer_again(v_first, v_cost, v_now, v_policy.shadow);
            elsif v_policy.shadow then
              v_reset_us := ticks_below(v_policy.rate_full, v_level, v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up) - v_elapsed_us::bigint;
              return shadow_of(v_level_now, v_reset_us, v_policy.capacity);
            end if;
          end if;
          return denied_by_rate(v_cost, v_level_now, v_level, v_elapsed_us, v_policy.capacity, v_policy.rate_full, v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up);
        end if;
        v_has_row := v_level is not null;
      end plain;

      loop
        if v_cost between 1 and v_policy.capacity and v_has_row is not false  -- false: the look above has found none, or none that it can tell
           and current_setting('transaction_read_only') = 'off' then
          update buckets as b
             set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - microtokens(v_cost),
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
                 room        = null
           where b.policy_id = v_policy.id
             and b.key       = v_key collate "C"
             and refilled(b.level, b.refilled_at, v_now, v_policy) >= microtokens(v_cost)
          returning b.level, b.refilled_at into v_level, v_refilled_at;
          exit when found;
        end if;

        -- 3. The bucket, as of now: the update may have waited.
        if v_has_row is not false then
          v_now := clock();
          if v_policy.special then
            v_numbers := numbers_now(v_policy, v_key, v_now);
            v_policy  := v_numbers.policy;
          end if;
          v_wanted := case when v_cost between 1 and v_policy.capacity then microtokens(v_cost) else 0 end;
          select refilled(b.level, b.refilled_at, v_now, v_policy),
                 case
                   when v_wanted > 0 then wait_until(v_wanted, b.level, b.refilled_at, v_now, v_policy)
                   when v_cost = 0 then 0
                 end,
                 wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
            into v_level, v_retry_us, v_reset_us
            from buckets as b
           where b.policy_id = v_policy.id
             and b.key       = v_key collate "C";
          v_has_row := found;
        end if;
        if not v_has_row or v_wanted = 0 then
          if not acceptable(v_key, v_cost) then
            perform check_request(v_policy.name, v_key, v_cost, v_idempotency_key);  -- raises 22023
          end if;
        end if;
        if not v_has_row then  -- full, by the newest numbers
          v_policy := policy_now(v_policy);
          if v_policy.special then
            v_numbers := numbers_of_key(v_policy, v_key, v_now);
            v_policy  := v_numbers.policy;
          end if;
          v_wanted   := case when v_cost between 1 and v_policy.capacity then microtokens(v_cost) else 0 end;
          v_level    := microtokens(v_policy.capacity);
          v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
          v_reset_us := 0;
        end if;

        -- 3a. Too few tokens.
        if v_wanted = 0 or v_retry_us is distinct from 0 then
          if v_numbers.ends_at is not null then
            select b.level, b.retry_us, b.reset_us into v_level, v_retry_us, v_reset_us from look_past_end_in_buckets(v_policy, v_numbers.ends_at, v_numbers.after, v_key, v_now, v_cost) as b;
            continue when v_wanted > 0 and v_retry_us = 0;  -- another session gave tokens back
          end if;
          if v_idempotency_key is not null then
            v_first := k from idempotency_keys as k
                        where k.policy_id = v_policy.id and k.key = v_key collate "C" and k.idempotency_key = v_idempotency_key collate "C";
            if v_first.expires_at > v_now then
              return answer_again(v_first, v_cost, v_now, v_policy.shadow);
            end if;
          end if;
          if v_policy.shadow and v_retry_us is distinct from 0 then
            return shadow_of(v_level, v_reset_us, v_policy.capacity);
          end if;
          return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        end if;

        -- 3b. No row. The insert may wait for a session that creates the same one.
        if not v_has_row and current_setting('transaction_read_only') = 'off' then
          v_level       := v_level - v_wanted;
          v_refilled_at := v_now;
          v_reset_us    := long_wait(v_policy.full_level, v_level, 0, v_policy);
          insert into buckets (policy_id, key, level, refilled_at, due_at)
          values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
          on conflict on constraint buckets_pkey do nothing;
          exit when found;
          v_has_row := null;
        end if;

        -- 3c. Again. Each repetition but the first is due to another session.
        if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
        v_rounds := next_round(v_rounds, v_policy.name, v_key);  -- raises 40001
      end loop;
      if not v_policy.special and v_refilled_at <= v_now then
        v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);
      elsif v_numbers.ends_at is null then
        v_reset_us := long_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);
      else
        v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after);
      end if;
      if v_idempotency_key is null then
        return grant_of(v_level, v_reset_us, v_policy.capacity);
      end if;
      v_answer := grant_of(v_level, v_reset_us, v_policy.capacity);
    end take;

    -- 4. The idempotency key is remembered.
    loop
      insert into idempotency_keys (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost, v_answer.remaining, v_answer.reset_after, v_answer.capacity,
              v_now + short_duration(v_policy.remember_us))
      on conflict on constraint idempotency_keys_pkey do nothing;
      exit when found;
      v_first := k from idempotency_keys as k
                  where k.policy_id = v_policy.id and k.key = v_key collate "C" and k.idempotency_key = v_idempotency_key collate "C";
      if v_first.expires_at > v_now then
        update buckets as b
           set level = b.level + microtokens(v_cost)
         where b.policy_id = v_policy.id
           and b.key       = v_key collate "C";
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
      delete from idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key collate "C" and k.idempotency_key = v_idempotency_key collate "C"
         and k.expires_at <= v_now;
    end loop;
    return v_answer;
  end;
end;
$$;
comment on function ratelimit_acquire(text, text, bigint, text) is
'Takes cost tokens from one bucket if the bucket holds them.
A denial is an answer and not an error.
A repeat under a live idempotency key gets the first answer with replayed true, and takes nothing, even if the bucket
  is empty by now.
The calling program chooses the idempotency key, one for each operation. A key chosen by the clients of the program
  would let a client pass every time.
cost: whole tokens, 0 or more. A cost above the capacity that applies to the key is denied. A cost of 0 takes nothing and
  ignores the idempotency key.
idempotency_key: 1 to 512 bytes. The grant is remembered for the interval remember of the policy. null: a repeat is
  charged again.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key that was granted with
  another cost, RL004 for one that was granted with this cost and settled, 25006 in a read-only transaction.
Locks: a grant locks the bucket row and the row of the idempotency key until the transaction ends. A denial keeps a
  lock on the bucket row only if the call waited for it, a replay only if it ran beside the first request.
Writes: a grant writes the bucket and the idempotency key. A denial writes nothing. A replay writes nothing, or the
  bucket if it ran beside the first request.
Role: application.';

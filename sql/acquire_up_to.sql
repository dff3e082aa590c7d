-- Takes as many whole tokens as one bucket has, at_most, or none if it has fewer than at_least.
--
-- The steps are those of ratelimit_acquire for at_most tokens, but for one. If the update of step 2 took nothing, and the
-- bucket was read in step 3 and has at_least, step 3c takes its whole tokens, up to at_most, from the bucket as it was read. If another
-- session has changed it since, it is read again. So taken is what the locked row had. Locks and writes are those of ratelimit_acquire.
create or replace function ratelimit_acquire_up_to(
    policy          text,
    key             text,
    at_most         bigint,
    at_least        bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.partial_decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  if (is_name(key) and at_least between 1 and at_most and is_name(idempotency_key) is not false) is not true then
    perform check_request(policy, key, 0, idempotency_key);  -- raises 22023
    perform check_bounds(at_most, at_least);                 -- likewise
  end if;
  v_policy := p from policies as p where p.name = policy collate "C";
  if v_policy.durable is not true then
    if v_policy.id is null or pg_is_in_recovery() then
      perform refuse_policy(policy, v_policy);  -- raises 22023, RL001 or 0A000
    end if;
    return acquire_up_to_ephemeral(v_policy, key, at_most, at_least, idempotency_key);  -- what follows, on the twin tables
  end if;

  declare
    v_key             text collate "C" := key;
    v_idempotency_key text collate "C";  -- null without one
    v_now             timestamptz := clock();
    v_taken           bigint := at_most;
    v_wanted          bigint;       -- the tokens to take in microtokens; 0 if at_most never fits
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_seen_level      bigint;       -- the row as it was read
    v_seen_at         timestamptz;  -- likewise
    v_retry_us        bigint;       -- microseconds until the bucket holds at_least; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_answer          ratelimit.decision;
    v_rounds          integer;
    v_override        ratelimit.overrides;
    v_numbers         ratelimit.numbers;
  begin
    if v_policy.special then
      if v_policy.kind = 'slots' then
        perform refuse_slots(v_policy.name);  -- raises 22023
      elsif v_policy.kind = 'quota' then
        return take_quota_of_buckets(v_policy, v_key, at_most, at_least, idempotency_key);
      end if;
      v_override := o from overrides as o where o.policy_id = v_policy.id and o.key = v_key;
      if v_override.key is not null then
        v_numbers := numbers_by(v_policy, v_override, v_now);
        v_policy  := v_numbers.policy;
      end if;
    end if;
    v_wanted := case when at_most <= v_policy.capacity then microtokens(at_most) else 0 end;

    -- 1. The idempotency key.
    if idempotency_key is not null then
      v_idempotency_key := idempotency_key;
      v_first := k from idempotency_keys as k
                  where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update, for all of at_most. It is worth one try.
      if v_wanted > 0 and v_rounds is null and current_setting('transaction_read_only') = 'off' then
        update buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.special then
        v_numbers := numbers_now(v_policy, v_key, v_now);
        v_policy  := v_numbers.policy;
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             case when at_least <= v_policy.capacity then wait_until(microtokens(at_least), b.level, b.refilled_at, v_now, v_policy) end,
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy),
             b.level, b.refilled_at
        into v_level, v_retry_us, v_reset_us, v_seen_level, v_seen_at
        from buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_numbers  := numbers_now(v_policy, v_key, v_now);
        v_policy   := v_numbers.policy;
        v_level    := microtokens(v_policy.capacity);
        v_retry_us := case when at_least <= v_policy.capacity then 0::bigint end;
        v_reset_us := 0;
      end if;

      -- 3a. Too few tokens.
      if v_retry_us is distinct from 0 then
        if v_numbers.ends_at is not null then
          v_retry_us := wait_past_end(at_least, v_seen_level, v_seen_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after);
          v_reset_us := wait_past_end(null, v_seen_level, v_seen_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after);
        end if;
        if v_idempotency_key is not null then
          v_first := k from idempotency_keys as k
                      where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
          end if;
        end if;
        v_answer := case when v_policy.shadow then shadow_of(v_level, v_reset_us, v_policy.capacity)
                         else answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity) end;
        return partial_of(v_answer, at_most);
      end if;
      v_taken  := least(at_most, whole_tokens(v_level));
      v_wanted := microtokens(v_taken);

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
        v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
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
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_taken,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us))
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
        return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
      end if;
    end if;
    v_answer := grant_of(v_level, v_reset_us, v_policy.capacity);
    return partial_of(v_answer, case when v_policy.shadow then at_most else v_taken end);
  end;
end;
$$;
comment on function ratelimit_acquire_up_to(text, text, bigint, bigint, text) is
'Takes as many whole tokens as one bucket holds, at_most, or none if it holds fewer than at_least.
retry_after of a denial is the time until the bucket holds at_least.
A repeat under a live idempotency key has the same taken. For ratelimit_acquire the grant has the cost taken.
A shadow policy returns taken = at_most, although it takes what an enforced policy would.
at_most: whole tokens, 1 or more.
at_least: whole tokens, 1 to at_most. An at_least above the capacity is denied.
idempotency_key: as in ratelimit_acquire.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key that was granted with
  fewer tokens than at_least or more than at_most, RL004 for a live idempotency key whose grant was settled, 25006 in
  a read-only transaction.
Locks: as ratelimit_acquire.
Writes: as ratelimit_acquire.
Role: application.';

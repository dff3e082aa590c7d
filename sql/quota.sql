-- Takes from the bucket of a quota, in {{ .buckets }}, for ratelimit_acquire, ratelimit_reserve and ratelimit_acquire_up_to: as many whole tokens as there
-- are, at_most, or none if there are fewer than at_least. The steps, locks and writes are those of the last. A period that has not begun
-- lends nothing, so to reserve is to acquire. calendar.sql says what the level of a row is.
create or replace function ratelimit.take_quota_of_{{ .buckets }}(
    policy ratelimit.policies, key text, at_most bigint, at_least bigint, idempotency_key text)
  returns ratelimit.partial_decision
  language plpgsql
  volatile
as $$
declare
  v_key             text collate "C" := key;
  v_idempotency_key text collate "C" := idempotency_key;
  v_now             timestamptz := clock();
  v_quota           ratelimit.policies := quota_of_key(policy, v_key, v_now);
  v_own             ratelimit.policies := policy;  -- without the numbers of an override
  v_taken           bigint := at_most;
  v_wanted          bigint;
  v_level           bigint;       -- as the row has it
  v_refilled_at     timestamptz;  -- when the row was written
  v_held            bigint;       -- microtokens in the bucket
  v_retry_us        bigint;
  v_reset_us        bigint;
  v_has_row         boolean;      -- a bucket without a row is full
  v_first           ratelimit.idempotency_keys;
  v_answer          ratelimit.decision;
  v_rounds          integer;
begin
  -- 1. The idempotency key.
  if v_idempotency_key is not null then
    select k.* into v_first
      from {{ .idempotency_keys }} as k
     where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
    if v_first.expires_at > v_now then
      return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
    end if;
  end if;

  loop
    -- 2. The update.
    if v_taken between 1 and v_quota.capacity then
      v_wanted := microtokens(v_taken);
      update {{ .buckets }} as b
         set level       = used_level(b.level, b.refilled_at, (v_quota.calendar).turned_at) - v_wanted,
             refilled_at = greatest(b.refilled_at, v_now),
             room        = null
       where b.policy_id = policy.id
         and b.key       = v_key
         and used_level(b.level, b.refilled_at, (v_quota.calendar).turned_at) >= v_wanted - microtokens(v_quota.capacity)
      returning b.level, b.refilled_at into v_level, v_refilled_at;
      exit when found;
    end if;

    -- 3. The bucket, as of now: the update may have waited.
    v_now   := clock();
    v_own   := own_numbers(v_quota);
    v_quota := quota_of_key(v_own, v_key, v_now);
    select b.level, b.refilled_at into v_level, v_refilled_at
      from {{ .buckets }} as b
     where b.policy_id = policy.id
       and b.key       = v_key;
    v_has_row := found;
    v_held    := microtokens(v_quota.capacity) + coalesce(used_level(v_level, v_refilled_at, (v_quota.calendar).turned_at), 0);
    v_taken   := least(at_most, whole_tokens(v_held));

    -- 3a. Too few tokens.
    if at_most = 0 or v_taken < at_least then
      v_retry_us := case when at_most = 0 then 0
                         else wait_past_end(at_least, v_level, v_refilled_at, v_now, v_quota, v_own) end;
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, v_own);
      if v_idempotency_key is not null then
        select k.* into v_first
          from {{ .idempotency_keys }} as k
         where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
        end if;
      end if;
      if v_quota.shadow and at_most > 0 then
        v_answer := shadow_of(v_held, v_reset_us, v_quota.capacity);
        return partial_of(v_answer, at_most);
      end if;
      v_answer := answer_of(v_held, v_retry_us, v_reset_us, v_quota.capacity);
      return partial_of(v_answer, 0);
    end if;

    -- 3b. No row. The insert may wait for a session that creates the same one.
    if not v_has_row then
      v_wanted      := microtokens(v_taken);
      v_level       := -v_wanted;
      v_refilled_at := v_now;
      insert into {{ .buckets }} (policy_id, key, level, refilled_at, due_at)
      values (policy.id, v_key, v_level, v_refilled_at, (v_quota.calendar).turns_at)
      on conflict on constraint {{ .buckets }}_pkey do nothing;
      exit when found;
    end if;

    -- Again. Each round but the first is due to another session.
    v_rounds := coalesce(v_rounds, 0) + 1;
    if v_rounds = 1000 then
      perform too_many_rounds(v_quota.name, v_key);  -- raises 40001
    end if;
  end loop;
  v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, v_own);
  v_held     := microtokens(v_quota.capacity) + v_level;

  -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
  if v_idempotency_key is not null then
    insert into {{ .idempotency_keys }} as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    values (policy.id, v_key, v_idempotency_key, v_taken,
            tokens_above_debt(v_held), duration(v_reset_us), v_quota.capacity, v_now + duration(v_quota.remember_us), v_now)
    {{ template "include/unless_live.sql" . }};
    if not found then
      update {{ .buckets }} as b
         set level = b.level + v_wanted
       where b.policy_id = policy.id
         and b.key       = v_key;
      select k.* into v_first
        from {{ .idempotency_keys }} as k
       where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
    end if;
  end if;
  v_answer := grant_of(v_held, v_reset_us, v_quota.capacity);
  return partial_of(v_answer, case when v_quota.shadow then at_most else v_taken end);
end;
$$;
comment on function ratelimit.take_quota_of_{{ .buckets }}(ratelimit.policies, text, bigint, bigint, text) is
  'The steps of ratelimit_acquire, ratelimit_reserve and ratelimit_acquire_up_to for a quota.';

-- Takes cost tokens from one bucket if it has them, and answers; a denial is an answer, not an error.
--
-- The steps, where an idempotency key is in play:
--   1. a live key is replayed, whatever the bucket holds by now
--   2. one conditional update takes the tokens; of concurrent acquires exactly those that fit pass
--   3. not taken: the bucket is read, and after it the key again, because a request under the same
--      key may be what emptied it. A bucket without a row is created, less the cost
--   4. taken: the key is remembered. The bucket's row is ours, so a live key that turns up only now
--      was committed between 1 and 2: the tokens go back and the key is replayed
--
-- Locks:  a grant holds the bucket row until the caller's transaction ends; a denial holds nothing,
--         unless it had to wait for the row.
-- Writes: a grant, the bucket and its idempotency key; a denial or a replay, nothing.
{{ define "find_key" -}}
select k.* into v_grant
        from {{ .keys }} as k
       where k.policy_id       = v_policy.id
         and k.key             = v_key
         and k.idempotency_key = v_idempotency_key
         and k.expires_at      > v_now;
{{- end -}}
{{ define "acquire" -}}
if v_idempotency_key is not null then
      {{ template "find_key" . }}
      if found then
        return replay(v_grant, v_cost);
      end if;
    end if;

    loop
      if v_cost between 1 and v_policy.capacity then
        update {{ .buckets }} as b
           set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.capacity,
                                            v_policy.refill, v_policy.every_us, v_policy.stepped)
                             - microtokens(v_cost),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.every, v_policy.stepped)
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled_level(b.level, b.refilled_at, v_now, v_policy.capacity,
                              v_policy.refill, v_policy.every_us, v_policy.stepped)
               >= microtokens(v_cost)
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      v_now := clock();  -- the update may have waited
      {{ template "look.sql" .buckets }}
      if v_cost = 0 or v_retry_us is distinct from 0 then
        if v_idempotency_key is not null then
          {{ template "find_key" . }}
          if found then
            return replay(v_grant, v_cost);
          end if;
        end if;
        return answer(v_level, v_retry_us, v_reset_us, v_policy.capacity);
      end if;

      if not found then
        v_level    := v_level - microtokens(v_cost);
        v_reset_us := wait_for(microtokens(v_policy.capacity), v_level, v_refilled_at, v_now,
                               v_policy.refill, v_policy.every_us, v_policy.stepped);
        v_due_at   := v_now + least(duration(v_reset_us), interval '24 hours');
        insert into {{ .buckets }} (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
        on conflict on constraint {{ .buckets }}_pkey do nothing;
        exit when found;
      end if;
    end loop;

    v_now      := clock();
    v_reset_us := wait_for(microtokens(v_policy.capacity), v_level, v_refilled_at, v_now,
                           v_policy.refill, v_policy.every_us, v_policy.stepped);

    if v_idempotency_key is not null then
      v_expires_at := v_now + v_policy.remember;
      insert into {{ .keys }} as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
      on conflict on constraint {{ .keys }}_pkey do update
         set cost        = excluded.cost,
             remaining   = excluded.remaining,
             reset_after = excluded.reset_after,
             capacity    = excluded.capacity,
             expires_at  = excluded.expires_at
       where k.expires_at <= v_now;
      if not found then
        update {{ .buckets }} as b
           set level = b.level + microtokens(v_cost)
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        {{ template "find_key" . }}
        return replay(v_grant, v_cost);
      end if;
    end if;
{{- end -}}
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
as $$
declare
  v_name            text collate "C" := ratelimit_acquire.policy;
  v_key             text collate "C" := ratelimit_acquire.key;
  v_cost            bigint           := ratelimit_acquire.cost;
  v_idempotency_key text collate "C" := ratelimit_acquire.idempotency_key;
  v_policy          policies;
  v_now             timestamptz;
  v_level           bigint;
  v_refilled_at     timestamptz;
  v_due_at          timestamptz;
  v_expires_at      timestamptz;
  v_retry_us        bigint;
  v_reset_us        bigint;
  v_grant           idempotency_keys;
begin
  if (octet_length(v_name) between 1 and 512
      and octet_length(v_key) between 1 and 512
      and v_cost >= 0
      and (v_idempotency_key is null or octet_length(v_idempotency_key) between 1 and 512)) is not true then
    perform check_name('policy', v_name);
    perform check_name('key', v_key);
    perform check_tokens('cost', v_cost);
    if v_idempotency_key is not null then
      perform check_name('idempotency_key', v_idempotency_key);
    end if;
  end if;

  select p.* into v_policy from policies as p where p.name = v_name;
  if not found then
    perform unknown_policy(v_name);
  end if;
  if v_cost = 0 then
    v_idempotency_key := null;  -- nothing is granted, so nothing is remembered
  end if;

  v_now := clock();
  if v_policy.durable then
    {{ template "acquire" (dict "buckets" "buckets" "keys" "idempotency_keys") }}
  else
    {{ template "acquire" (dict "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys") }}
  end if;
  return answer(v_level, 0, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_acquire(text, text, bigint, text) is
  'Take cost tokens from a bucket if it has them; a repeat under the same idempotency key takes nothing.';

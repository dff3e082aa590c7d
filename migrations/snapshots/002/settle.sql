-- Replaces the cost of a grant by the real one, exactly once. The grant was made under idempotency_key, by any function that
-- takes one: its cost was an estimate. The level moves by estimate - cost: up to full at most, and below zero without
-- refusal, down to the floor of debt. The answer is the bucket as it is after that.
--
-- The first settlement wins. A repeat with the same cost is answered with replayed, and changes nothing; with another cost
-- it is RL002. Without a live grant under the key it is RL003, also while the grant is not committed. A shadow policy that
-- does not know the key charges nothing, and answers with shadowed. A request that is repeated under its key after
-- that is RL004, because its operation is over; a charge is replayed.
--
-- The steps:
--   1. The grant is read.
--   2. The bucket is locked. One without a row is full, and is created first, unless the settlement only gives back: it
--      stays full, so the grant alone is written.
--   3. The grant is marked as settled. If it is no longer as it was read, step 1 follows.
--   4. The level moves. So no move is ever taken back; one that was cut at full could not be.
--
-- Locks:  the bucket row, and then the row of the idempotency key, until the caller's transaction ends. A replay that did
--         not wait locks nothing.
-- Writes: the bucket and its idempotency key. A replay writes nothing.
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
{{- /* The arguments buckets and keys are the names of the two tables. */ -}}
{{ define "settle_grant" -}}
loop
      {{ template "include/find_key.sql" . }}
      if (v_first.expires_at > v_now) is not true then
        if not v_policy.shadow then
          perform no_grant(v_policy.name, v_idempotency_key);
        end if;
        -- The bucket may have been read after a grant that was not there yet.
        {{ template "include/look.sql" (dict "buckets" .buckets "bare" true) }}
        {{ template "include/find_key.sql" . }}
        if (v_first.expires_at > v_now) is not true then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
      end if;
      if v_first.settled is not null then
        if v_first.settled <> v_cost then
          perform another_cost(format('%L was settled with cost %s and comes back with cost %s.', v_idempotency_key, v_first.settled, v_cost));
        end if;
        {{ template "include/look.sql" (dict "buckets" .buckets "bare" true) }}
        return spent_of(v_level, v_reset_us, v_policy.capacity, true);
      end if;

      {{ template "include/lock.sql" (dict "buckets" .buckets "unless" "microtokens(v_cost) <= coalesce(v_first.taken, microtokens(v_first.cost))") }}
      update {{ .keys }} as k
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
    if not v_has_row then
      return spent_of(microtokens(v_policy.capacity), 0, v_policy.capacity, false);
    end if;
    {{ template "include/move.sql" (dict "change" "coalesce(v_first.taken, microtokens(v_first.cost)) - microtokens(v_cost)") }}
    {{ template "include/write.sql" . }}
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
{{- end }}
declare
  {{ template "locals_of_lock" (dict "function" "ratelimit_settle") }}
begin
  if (acceptable(v_key, v_cost) and v_cost <= 9000000000000 and is_name(v_idempotency_key)) is not true then
    perform check_charge(policy, v_key, v_cost, v_idempotency_key);
    perform check_name('idempotency_key', v_idempotency_key);
  end if;
  {{ template "include/policy.sql" "ratelimit_settle" }}
  if v_policy.durable then
    {{ template "settle_grant" (dict "buckets" "buckets" "keys" "idempotency_keys") }}
  else
    {{ template "settle_grant" (dict "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys") }}
  end if;
end;
$$;
comment on function ratelimit_settle(text, text, text, bigint) is
  'Replace the cost of a grant made under an idempotency key by the real one, exactly once.';

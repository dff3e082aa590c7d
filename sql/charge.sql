-- Takes cost tokens from one bucket, whatever it holds; allowed is always true. What the bucket does not hold is debt:
-- its level goes below zero, down to a floor, and refill pays the debt first. It is for what is known only after it was used.
--
-- The steps are those of ratelimit_settle. A live idempotency key is replayed. Otherwise the bucket is locked, a full one
-- is created first if it has no row, the idempotency key is stored, and only then the level moves. So nothing that was
-- moved is ever moved back. A charge that is cut at the floor remembers what it took, and is settled against that.
--
-- A cost of 0 takes nothing, and neither looks at nor stores an idempotency key.
--
-- Locks:  the bucket row, and then the row of the idempotency key, until the caller's transaction ends. A replay that did
--         not wait locks nothing.
-- Writes: the bucket and its idempotency key. A replay and a cost of 0 write nothing.
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
{{- /* The arguments buckets and keys are the names of the two tables. */ -}}
{{ define "charge_bucket" -}}
if v_cost = 0 then
      {{ template "include/look.sql" (dict "buckets" .buckets "bare" true) }}
      return spent_of(v_level, v_reset_us, v_policy.capacity, false);
    end if;
    loop
      if v_idempotency_key is not null then
        {{ template "include/find_key.sql" . }}
        if v_first.expires_at > v_now then
          perform check_repeated_cost(v_first, v_cost);
          return replay_of(v_first);
        end if;
      end if;
      {{ template "include/lock.sql" . }}
      {{ template "include/move.sql" (dict "change" "-microtokens(v_cost)") }}
      exit when v_idempotency_key is null;
      v_expires_at := v_now + duration(v_policy.remember_us);
      insert into {{ .keys }} as k
             (policy_id, key, idempotency_key, cost, taken, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost, nullif(v_held - v_level, microtokens(v_cost)),
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
      {{ template "include/remember.sql" . }};
      exit when found;
      -- A live idempotency key: the session that held the bucket has stored it.
    end loop;
    {{ template "include/write.sql" . }}
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
{{- end }}
declare
  {{ template "locals_of_lock" (dict "function" "ratelimit_charge") }}
  v_expires_at      timestamptz;  -- when the idempotency key is forgotten
begin
  if (acceptable(v_key, v_cost) and v_cost <= 9000000000000 and is_name(v_idempotency_key) is not false) is not true then
    perform check_charge(policy, v_key, v_cost, v_idempotency_key);
  end if;
  {{ template "include/policy.sql" "ratelimit_charge" }}
  if v_policy.durable then
    {{ template "charge_bucket" (dict "buckets" "buckets" "keys" "idempotency_keys") }}
  else
    {{ template "charge_bucket" (dict "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys") }}
  end if;
end;
$$;
comment on function ratelimit_charge(text, text, bigint, text) is
  'Take cost tokens from a bucket whatever it holds, into debt if need be.';

-- Tells what the bucket holds, and whether an acquire of this cost would be allowed now; takes nothing.
--
-- Locks and writes nothing; works in a read-only transaction and, for durable policies, on a standby.
create or replace function ratelimit_peek(policy text, key text, cost bigint default 1)
  returns ratelimit.decision
  language plpgsql
  stable
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off
as $$
declare
  v_key         text collate "C" := ratelimit_peek.key;
  v_cost        bigint := ratelimit_peek.cost;
  v_policy      policies;
  v_now         timestamptz;
  v_level       bigint;
  v_retry_us    bigint;
  v_reset_us    bigint;
begin
  if not acceptable(v_key, v_cost) then
    perform check_request(policy, v_key, v_cost, null);
  end if;
  v_policy := policy_named(policy);
  v_now    := clock();
  if v_policy.durable then
    {{ template "look.sql" (dict "buckets" "buckets") }}
  else
    {{ template "look.sql" (dict "buckets" "ephemeral_buckets") }}
  end if;
  return answer(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_peek(text, text, bigint) is
  'What a bucket holds, and whether an acquire of this cost would be allowed now; takes nothing.';

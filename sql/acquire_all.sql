-- Takes from several buckets if every one covers what is charged to it, and otherwise from none.
--
-- decisions[n] is the answer about the bucket of element n, for all that this request charges to it: allowed and
-- retry_after as if that bucket were asked alone, remaining and reset_after as they are after the whole request.
-- retry_after is the longest of them. binding is the element that decides: of a denial the one with the longest wait, of a
-- grant the one that covers the fewest repeats of its charge. remaining, reset_after and capacity are those of binding.
-- Buckets of shadow policies count for retry_after and binding only if there are no others.
--
-- A bucket that remembers the idempotency key answers as it did, and is not charged again; the others are asked. replayed
-- is true if the request is granted, a bucket remembers the key, and nothing was charged; and if it is denied only because a
-- grant of ratelimit_reserve has still to wait.
--
-- policies, keys and costs have one element for each bucket, 1000 at most. A bucket may be named twice. Without costs
-- every cost is 1. An element of cost 0 looks at its bucket.
--
-- The steps, for a request without an idempotency key whose buckets have rows:
--   1. One statement reads all buckets. If they cover by their stored levels, which is most often so, step 3 follows.
--   2. Each bucket is read again with all that an answer needs. If one does not cover, the answer is the denial.
--   3. Each bucket is charged by a conditional update, in the order of policy and key, durable ones first. If another
--      session took the tokens in between, the charges are rolled back.
-- acquire_batch decides what these steps do not: there it is a batch of one request.
--
-- Locks:  a grant holds its bucket rows and its idempotency keys until the caller's transaction ends. A denial holds none.
-- Writes: the same rows. A denial writes nothing.
create or replace function ratelimit_acquire_all(
    in  policies        text[],
    in  keys            text[],
    in  costs           bigint[] default null,
    in  idempotency_key text     default null,
    out allowed         boolean,
    out remaining       bigint,
    out retry_after     interval,
    out reset_after     interval,
    out capacity        bigint,
    out replayed        boolean,
    out shadowed        boolean,
    out binding         integer,
    out decisions       ratelimit.decision[])
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan  -- as in acquire_batch
  set enable_seqscan = off  -- as in ratelimit_acquire
  set jit = off             -- as in acquire_batch
as $$
declare
  v_count       integer := cardinality(policies);
  v_costs       bigint[];
  v_policy      policies;
  v_override    overrides;
  v_key         text collate "C";
  v_cost        bigint;
  v_now         timestamptz;
  v_wanted      bigint;
  v_level       bigint;
  v_refilled_at timestamptz;
  v_retry_us    bigint;
  v_reset_us    bigint;
  v_has_row     boolean;
  v_order       integer[];   -- the elements in the order of policy and key
  v_sorted      policies[];  -- their policies, in this order
  v_enough      boolean;     -- the buckets cover by their stored levels
  v_rows        boolean;     -- the buckets that cover have rows
  v_n           integer;
  v_levels      bigint[];
  v_retries_us  bigint[];
  v_resets_us   bigint[];
  v_simple      boolean;     -- the steps above decide the request
  v_rank        bigint;
  v_least       bigint;
  v_batch       packed;
begin
  if (v_count between 1 and 1000) is not true then
    perform check_length('policies', v_count, v_count);
    perform refuse('policies', v_count || ' elements long', 'Pass 1 to 1000 elements.');
  end if;
  v_simple := (array_dims(policies) = '[1:' || v_count || ']' and array_dims(keys) = array_dims(policies)
               and (costs is null or array_dims(costs) = array_dims(policies)) and idempotency_key is null) is true;
  v_costs := case when costs is null then array_fill(1::bigint, array[v_count]) else costs end;
  if v_simple then
    v_now := clock();
    select array_agg(s.n::integer), array_agg(s.policy), bool_and((s.level >= microtokens(s.cost)) is true and s.again is not true)
      into v_order, v_sorted, v_enough
      from (select u.n, p as policy, greatest(0, least(u.cost, 9000000000001)) as cost,
                   case when u.cost > 0 and not p.overridden then least(coalesce(b.level, e.level), p.capacity * 1000000) end as level,
                   u.key = lag(u.key) over in_order and u.policy = lag(u.policy) over in_order as again
              from unnest(policies, keys, v_costs) with ordinality as u (policy, key, cost, n)
              left join policies as p on p.name = u.policy collate "C"
              left join lateral (select b.level from buckets as b where b.policy_id = p.id and b.key = u.key collate "C" offset 0) as b on true
              left join lateral (select b.level from ephemeral_buckets as b where b.policy_id = p.id and b.key = u.key collate "C" offset 0) as e on true
            window in_order as (order by p.durable desc, u.policy collate "C", u.key collate "C")
             order by p.durable desc, u.policy collate "C", u.key collate "C"
            offset 0) as s;

    for v_try in case when v_enough then 1 else 2 end..2 loop
      allowed := true;
      if v_try = 2 then
        v_rows := true;
        for v_i in 1..v_count loop
          v_n      := v_order[v_i];
          v_policy := v_sorted[v_i];
          v_key    := keys[v_n];
          v_cost   := v_costs[v_n];
          if v_policy.id is null or not acceptable(v_key, v_cost) or v_cost = 0
             or policies[v_n] = policies[v_order[v_i - 1]] and v_key = keys[v_order[v_i - 1]] then
            v_simple := false;
            exit;
          end if;
          if v_policy.overridden then
            {{ template "include/override.sql" }}
            v_sorted[v_i] := v_policy;
          end if;
          if v_policy.durable then
            {{ template "include/look.sql" (dict "buckets" "buckets") }}
          else
            {{ template "include/look.sql" (dict "buckets" "ephemeral_buckets") }}
          end if;
          allowed           := allowed and (v_retry_us is not distinct from 0 or v_policy.shadow);
          v_rows            := v_rows and (v_has_row or v_retry_us is distinct from 0);
          v_levels[v_n]     := v_level;
          v_retries_us[v_n] := v_retry_us;
          v_resets_us[v_n]  := v_reset_us;
        end loop;
        v_simple := v_simple and (v_rows or not allowed);
        exit when not v_simple or not allowed;
      end if;
      begin
        for v_i in 1..v_count loop
          v_n      := v_order[v_i];
          continue when v_try = 2 and v_retries_us[v_n] is distinct from 0;  -- a shadow
          v_policy := v_sorted[v_i];
          v_key    := keys[v_n];
          v_wanted := microtokens(v_costs[v_n]);
          if v_policy.durable then
            {{ template "include/charge.sql" (dict "buckets" "buckets") }}
          else
            {{ template "include/charge.sql" (dict "buckets" "ephemeral_buckets") }}
          end if;
          if not found then
            raise exception sqlstate 'RL00T';  -- rolls back to the begin above; caught below, so no caller sees it
          end if;
          v_levels[v_n]     := v_level;
          v_retries_us[v_n] := 0;
          v_resets_us[v_n]  := {{ template "wait_below" (dict "target" "v_policy.full_level" "level" "v_level" "elapsed_us" "microseconds(v_now - v_refilled_at)") }};
        end loop;
        exit;
      exception when sqlstate 'RL00T' then
        v_now    := clock();  -- it may have waited
        v_simple := v_try = 1;
      end;
    end loop;
  end if;

  if v_simple then
    replayed := false;
    shadowed := false;
    for v_i in 1..v_count loop
      v_n      := v_order[v_i];
      v_policy := v_sorted[v_i];
      if v_policy.shadow and v_retries_us[v_n] is distinct from 0 then
        shadowed       := allowed;
        decisions[v_n] := shadow_of(v_levels[v_n], v_resets_us[v_n], v_policy.capacity);
      else
        decisions[v_n] := answer_of(v_levels[v_n], v_retries_us[v_n], v_resets_us[v_n], v_policy.capacity);
      end if;
      v_rank := case
        when v_policy.shadow and not allowed then 20000000000000  -- above all others, also with a debt of 9000000000000 tokens
        when v_policy.shadow then 20000000000000 + repeats(decisions[v_n].remaining, v_costs[v_n])
        when allowed then decisions[v_n].remaining / v_costs[v_n]
        else -coalesce(v_retries_us[v_n], 9223372036854775807)
      end;
      if v_least is null or v_rank < v_least or v_rank = v_least and v_n < binding then
        v_least := v_rank;
        binding := v_n;
      end if;
    end loop;
  else
    v_batch := acquire_batch(policies, keys, costs, array[v_count], case when idempotency_key is not null then array[idempotency_key] end);
    if v_batch.refused is not null then
      raise exception using errcode = v_batch.error_codes[1], message = v_batch.error_messages[1],
                            detail  = v_batch.error_details[1], hint = v_batch.error_hints[1];
    end if;
    allowed   := v_batch.requests_allowed[1];
    replayed  := v_batch.requests_replayed[1];
    shadowed  := v_batch.requests_shadowed[1];
    binding   := v_batch.bindings[1];
    decisions := decisions_of(v_batch.elements, v_batch.remaining, v_batch.retry_after_us, v_batch.reset_after_us, v_batch.capacity,
                              v_batch.replayed, v_batch.shadowed);
  end if;
  remaining   := decisions[binding].remaining;
  retry_after := case when allowed then interval '0' else decisions[binding].retry_after end;
  reset_after := decisions[binding].reset_after;
  capacity    := decisions[binding].capacity;
end;
$$;
comment on function ratelimit_acquire_all(text[], text[], bigint[], text) is
  'Take from several buckets if every one covers its cost, and otherwise from none.';

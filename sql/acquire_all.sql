-- Takes from several buckets if every one covers what is charged to it, and otherwise from none.
--
-- The steps, for a request whose buckets have rows and do not know its idempotency key:
--   1. One statement reads all buckets. If they cover by their stored levels, which is most often so, step 3 follows.
--   2. Each bucket is read again with all that an answer needs. If one does not cover, the answer is the denial. The
--      idempotency key is looked up after the bucket, because the request that emptied it may have had the same one.
--   3. Each bucket is charged by a conditional update, in the order of policy and key, durable ones first, and remembers the
--      idempotency key before the next one is charged. If another session took the tokens in between, or if a bucket has the
--      idempotency key already, live or expired, the charges are rolled back.
-- acquire_batch decides what these steps do not: there it is a batch of one request. So it does where an override has an end, and in a
-- read-only transaction, as those of a standby are, which cannot read ephemeral buckets.
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
  v_simple      boolean := false;  -- the steps above decide the request
  v_elements    element[];   -- in the order of policy and key, durable policies first; the cost is 0 of what is not charged
  v_element     element;
  v_last        element;     -- the one before
  v_enough      boolean;     -- the buckets cover by their stored levels
  v_rows        boolean;     -- all buckets have rows
  v_policy      policies;
  v_numbers     numbers;
  v_now         timestamptz;
  v_wanted      bigint;
  v_level       bigint;
  v_refilled_at timestamptz;
  v_retry_us    bigint;
  v_reset_us    bigint;
  v_rank        bigint;      -- of an element: the least one binds, as of binding_rank; shadows come after all others
  v_least       bigint;
  v_idempotency_key text collate "C" := idempotency_key;
  v_decision    decision;
  v_whole       record;
begin
  if (v_count between 1 and 1000) is not true then
    perform check_length('policies', v_count, v_count);
    perform refuse('policies', v_count || ' elements long', 'Pass 1 to 1000 elements.');
  end if;
  if current_setting('transaction_read_only') = 'off' then
    v_now := clock();
    v_elements := array(
      select row(u.n, p, u.key, u.cost,
                 case when u.cost between 1 and p.capacity and not p.special then
                   case
                     when p.durable then (select b.level from buckets as b where b.policy_id = p.id and b.key = u.key collate "C")
                     else (select b.level from ephemeral_buckets as b where b.policy_id = p.id and b.key = u.key collate "C")
                   end >= microtokens(u.cost)
                 end)::element
        from unnest(policies, keys, coalesce(costs, array_fill(1::bigint, array[v_count]))) with ordinality as u (policy, key, cost, n)
        left join policies as p on p.name = u.policy collate "C"
       order by p.durable desc, u.policy collate "C", u.key collate "C");
    v_simple := cardinality(v_elements) = v_count and is_name(v_idempotency_key) is not false;
    v_enough := true;
    foreach v_element in array v_elements loop
      v_simple := v_simple and (v_element.key = v_last.key and (v_element.policy).id = (v_last.policy).id) is not true;
      v_enough := v_enough and v_element.covers is true;
      v_last   := v_element;
    end loop;
  end if;

  for v_try in case when v_enough then 1 else 2 end..2 loop
    exit when not v_simple;
    allowed  := true;
    replayed := false;
    shadowed := false;
    v_least  := 9223372036854775807;
    binding  := 1;
    if v_try = 2 then
      v_rows := true;
      for v_i in 1..v_count loop
        v_element := v_elements[v_i];
        v_policy  := v_element.policy;
        v_simple  := (v_policy.id is not null and acceptable(v_element.key, v_element.cost) and v_element.cost > 0) is true;
        exit when not v_simple;
        if v_policy.special then
          v_numbers := numbers_of_key(v_policy, v_element.key, v_now);
          v_policy  := v_numbers.policy;
          v_simple  := v_policy.kind = 'tokens' and v_numbers.ends_at is null;  -- an element may fit now, and not when the others do
          exit when not v_simple;
          v_elements[v_i].policy := v_policy;
        end if;
        if v_policy.durable then
          select b.level, b.refilled_at into v_level, v_refilled_at from buckets as b where b.policy_id = v_policy.id and b.key = v_element.key;
        else
          select b.level, b.refilled_at into v_level, v_refilled_at from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = v_element.key;
        end if;
        if not found then  -- full
          v_rows        := false;
          v_level       := microtokens(v_policy.capacity);
          v_refilled_at := v_now;
        end if;
        v_retry_us := case when v_element.cost <= v_policy.capacity then wait_until(microtokens(v_element.cost), v_level, v_refilled_at, v_now, v_policy) end;
        v_reset_us := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
        v_level    := refilled(v_level, v_refilled_at, v_now, v_policy);
        if v_idempotency_key is not null then
          if v_policy.durable then
            v_simple := not exists (select from idempotency_keys as k
                                     where k.policy_id = v_policy.id and k.key = v_element.key and k.idempotency_key = v_idempotency_key);
          else
            v_simple := not exists (select from ephemeral_idempotency_keys as k
                                     where k.policy_id = v_policy.id and k.key = v_element.key and k.idempotency_key = v_idempotency_key);
          end if;
          exit when not v_simple;
        end if;
        v_decision := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        if v_retry_us is distinct from 0 then
          if v_policy.shadow then
            shadowed   := true;
            v_decision := shadow_of(v_level, v_reset_us, v_policy.capacity);
            v_rank     := 20000000000000 + repeats(v_decision.remaining, v_element.cost);
            v_elements[v_i].cost := 0;
          else
            allowed := false;
            v_rank  := -coalesce(v_retry_us, 9223372036854775807);
          end if;
          if (v_rank, v_element.place) < (v_least, binding) then
            v_least := v_rank;
            binding := v_element.place;
          end if;
        end if;
        decisions[v_element.place] := v_decision;
      end loop;
      v_simple := v_simple and (v_rows or not allowed);
      shadowed := shadowed and allowed;
      exit when not v_simple or not allowed;
    end if;
    begin
      foreach v_element in array v_elements loop
        continue when v_element.cost = 0;
        v_policy := v_element.policy;
        v_level  := null;
        if v_try = 1 and v_policy.plain and v_policy.durable then  -- its stored level covers, unless another session, or a later clock, has changed it
          update buckets as b
             set level       = least(v_policy.rate_full, b.level + credit_by_rate(date_part('epoch', v_now - b.refilled_at) * 1000000,
                                                                                  v_policy.rate_gain, v_policy.rate_per, v_policy.fill_ticks))
                               - microtokens(v_element.cost),
                 refilled_at = v_now,
                 room        = null
           where b.policy_id   = v_policy.id
             and b.key         = v_element.key
             and b.level      >= microtokens(v_element.cost)
             and b.refilled_at <= v_now
          returning b.level into v_level;
          v_decision := granted_by_rate(v_level, v_level, 0, v_policy.capacity, v_policy.rate_full, v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up);
        end if;
        if v_level is null then
          v_wanted := microtokens(v_element.cost);
          if v_policy.durable then
            update buckets as b
               set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
                   refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
                   room        = null
             where b.policy_id = v_policy.id
               and b.key       = v_element.key
               and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
            returning b.level, b.refilled_at into v_level, v_refilled_at;
          else
            update ephemeral_buckets as b
               set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
                   refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
                   room        = null
             where b.policy_id = v_policy.id
               and b.key       = v_element.key
               and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
            returning b.level, b.refilled_at into v_level, v_refilled_at;
          end if;
          v_reset_us := long_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);
          v_decision := grant_of(v_level, v_reset_us, v_policy.capacity);
        end if;
        if v_level is null then
          raise exception sqlstate 'RL00T';  -- rolls back to the begin above; caught below, so no caller sees it
        end if;
        decisions[v_element.place] := v_decision;
        v_rank := v_policy.shadow::integer * 20000000000000 + v_decision.remaining / v_element.cost;
        if (v_rank, v_element.place) < (v_least, binding) then
          v_least := v_rank;
          binding := v_element.place;
        end if;
        if v_idempotency_key is not null then
          if v_policy.durable then
            insert into idempotency_keys
                   (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
            values (v_policy.id, v_element.key, v_idempotency_key, v_element.cost, v_decision.remaining, v_decision.reset_after, v_policy.capacity,
                    v_now + duration(v_policy.remember_us));
          else
            insert into ephemeral_idempotency_keys
                   (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
            values (v_policy.id, v_element.key, v_idempotency_key, v_element.cost, v_decision.remaining, v_decision.reset_after, v_policy.capacity,
                    v_now + duration(v_policy.remember_us));
          end if;
        end if;
      end loop;
      exit;
    exception when sqlstate 'RL00T' or unique_violation then
      v_now    := clock();  -- it may have waited
      v_simple := v_try = 1 and sqlstate = 'RL00T';
    end;
  end loop;

  if not v_simple then
    v_whole   := acquire_all_in_batch(policies, keys, costs, idempotency_key);
    allowed   := v_whole.allowed;
    replayed  := v_whole.replayed;
    shadowed  := v_whole.shadowed;
    binding   := v_whole.binding;
    decisions := v_whole.decisions;
  end if;
  v_decision  := decisions[binding];
  remaining   := v_decision.remaining;
  retry_after := case when allowed then interval '0' else v_decision.retry_after end;
  reset_after := v_decision.reset_after;
  capacity    := v_decision.capacity;
end;
$$;
comment on function ratelimit_acquire_all(text[], text[], bigint[], text) is
'Takes from several buckets if every bucket covers its charge, and otherwise from none.
Element n of policies, keys and costs is one charge. A bucket that is named twice is charged the sum.
A bucket that remembers the idempotency key gives its first answer and is not charged again. The other buckets are
  asked.
Buckets of shadow policies count for retry_after and binding only if the request names no other buckets.
policies: 1 to 1000 elements.
keys: as many elements as policies.
costs: whole tokens, 0 or more, as many elements as policies. null: 1 for each element. An element of cost 0 looks at
  its bucket and takes nothing.
idempotency_key: as in ratelimit_acquire. Each bucket remembers it by itself.
allowed: whether every bucket covers its charge.
remaining: of the bucket of the binding element.
retry_after: the longest wait of the elements. Zero if the request is granted; null if an element is always denied.
reset_after: of the bucket of the binding element.
capacity: of the bucket of the binding element.
replayed: the request is granted and charged nothing, because a bucket remembers the idempotency key; or it is denied
  only because a reservation under the key still waits.
shadowed: the request is granted, and a shadow policy would have denied an element.
binding: the number of the element that decides, from 1. Of a denial it is the element with the longest wait, of a
  grant the element whose bucket covers the fewest repeats of its charge.
decisions: one decision for each element, about all that the request charges to the bucket of the element. allowed and
  retry_after are as if the bucket were asked alone, remaining and reset_after as after the whole request. Where the
  override of an element ends before the longest wait, the element of a denied request waits by the numbers of the policy.
Errors: 22023 for a bad argument, RL001 for an unknown policy, RL002 for a live idempotency key that was granted with
  another cost, RL004 for a live idempotency key whose grant was settled, 25006 in a read-only transaction. DETAIL
  begins with the number of the element if there are several.
Locks: a grant locks the bucket rows and the rows of the idempotency key until the transaction ends, in one order:
  durable policies first, then by policy and key. A denial keeps no lock.
Writes: a grant writes the buckets and the idempotency keys. A denial writes nothing.
Role: application.';

-- ratelimit_acquire_all as a batch of one request.
create or replace function ratelimit.acquire_all_in_batch(
    in  policies text[], in keys text[], in costs bigint[], in idempotency_key text,
    out allowed boolean, out replayed boolean, out shadowed boolean, out binding integer, out decisions ratelimit.decision[])
  language plpgsql volatile
as $$
declare
  v_batch ratelimit.packed := acquire_batch(policies, keys, costs, array[cardinality(policies)], case when idempotency_key is not null then array[idempotency_key] end);
begin
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
end;
$$;
comment on function ratelimit.acquire_all_in_batch(text[], text[], bigint[], text) is
  'What ratelimit_acquire_all does, as a batch of one request.';

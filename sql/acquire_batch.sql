-- Decides many requests, as if each were asked on its own, one after another. The functions for many requests differ only
-- in how they take the requests and show the answers; the comments of ratelimit_acquire_packed and of type ratelimit.packed explain them.
--
-- There are two ways. The fast path is for requests that fit, and most do. take.sql charges the buckets of one policy; a batch of
-- several policies is split into parts, in the order in which buckets are locked: durable policies first, then by name. The other
-- way is decide_left: plain denials take one look at the bucket (denials.sql), and decide_in_order decides all other requests. The
-- fast path is a subtransaction, and this is what follows it:
--
--   all elements are charged             the answers
--   some are, of single requests         decide_left decides the others: without a grant, the answers of both
--   ... and it would grant one of them   RL00T: all is rolled back, because its bucket would be locked out of order
--   none is                              RL00T: locks are given back, of buckets that were waited for and not charged
--   an idempotency key is stored before  unique_violation
--   ... or is no valid key               RL00T
-- After unique_violation or RL00T, decide_left decides the whole batch.
--
-- Requests of several elements (sizes) are granted only if all their buckets cover what is charged to them. So all buckets of the
-- batch are read first, and charged only if all cover; otherwise decide_left follows. If another session is at one of them, they are
-- locked before they are charged. If one was not charged after all, RL00L: the fast path is rolled back, and begins again with the
-- locks, once.
--
-- In a read-only transaction decide_left decides from the start, because an UPDATE fails there even if it would take
-- nothing.
--
-- Locks:  as decide_in_order; and the buckets that the fast path has waited for and not charged, unless it was rolled back.
-- Writes: buckets and idempotency keys of granted requests.
--
-- The settings of this function are for all statements about many buckets: also those of the functions in
-- demand.sql, take.sql, denials.sql, look_at_buckets.sql, rows.sql, remember.sql and decide_in_order.sql, which nobody else calls.
create or replace function ratelimit.acquire_batch(
    policies text[], keys text[], costs bigint[], sizes integer[], idempotency_keys text[])
  returns ratelimit.packed
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan  -- no plan is better for some arguments than for others, and planning is slow
  set enable_seqscan = off    -- as in ratelimit_acquire
  set enable_hashjoin = off   -- nested loops alone keep the order of key, in which buckets are locked
  set enable_mergejoin = off  -- likewise
  set enable_tidscan = on     -- likewise: found by row id, the bucket is on the inner side
  set enable_indexscan = on   -- the bucket is found from the end of the index: take.sql
  set enable_bitmapscan = off  -- likewise; a bitmap would read every version
  set jit = off               -- the statements take less time than compiling them
as $$
declare
  v_count    integer := cardinality(policies);
  v_requests bigint[];  -- for each element, the number of its request; null without sizes: its own number
  v_misfits  bigint[];  -- requests of a size that is refused
  v_policy   policies;  -- that of all elements, or of a part
  v_demands  record;    -- the answer of parts_of
  v_parts    part[];    -- the batch by policy; null without sizes if all elements have one policy
  v_seen     record;
  v_row_ids  tid[];
  v_now      timestamptz;
  v_covered  boolean;   -- every bucket covers all that is asked of it; true without sizes; null where v_parts is
  v_lock     boolean;   -- lock the buckets before take
  v_taken    record;
  v_kept     boolean := true;  -- the idempotency keys of what was taken are stored
  v_places   bigint[];  -- elements that the fast path granted; parallel to it:
  v_remaining bigint[];
  v_reset_us bigint[];
  v_capacity bigint[];
  v_shadows  boolean[];
  v_left     bigint[];  -- the other elements
  v_answers  packed;
begin
  if (array_dims(policies) = '[1:' || v_count || ']' and array_dims(keys) = array_dims(policies)
      and (costs is null or array_dims(costs) = array_dims(policies)) and sizes is null
      and (idempotency_keys is null or array_dims(idempotency_keys) = array_dims(policies))) is not true then
    select f.policies, f.keys, f.costs, f.sizes, f.idempotency_keys, f.requests, f.misfits
      into policies, keys, costs, sizes, idempotency_keys, v_requests, v_misfits
      from batch_form(policies, keys, costs, sizes, idempotency_keys) as f;
  elsif costs is null then
    costs := array_fill(1::bigint, array[v_count]);
  end if;

  loop
    begin
      if v_count > 0 and current_setting('transaction_read_only') = 'off' then
        v_now := clock();
        if sizes is null and policies[1] collate "C" = all (policies) then
          v_policy := p from policies as p where p.name = acquire_batch.policies[1] collate "C";
          if v_policy.durable then
            v_taken := take_from_buckets(v_policy, keys, costs, null, null, v_now);
          else
            v_taken := take_from_ephemeral_buckets(v_policy, keys, costs, null, null, v_now);
          end if;
          if cardinality(v_taken.places) = v_count and idempotency_keys is null then  -- so end most batches
            return (v_taken.places, v_taken.remaining, array_fill(0::bigint, array[v_count]), v_taken.reset_us,
                    coalesce(v_taken.capacities, array_fill(v_policy.capacity, array[v_count])), null, null,
                    null, null, null, null, null, null, null, null, null, null)::packed;
          end if;
        else
          v_demands   := parts_of(policies, keys, costs, v_requests);
          v_parts   := v_demands.parts;
          v_covered := sizes is null or (v_demands.size = v_count and not v_demands.twice) is true;
        end if;
        if sizes is not null and v_covered then
          for v_n in 1..cardinality(v_parts) loop
            v_policy := (v_parts[v_n]).policy;
            if v_policy.durable then
              v_seen := covered_in_buckets(v_policy, (v_parts[v_n]).demands, v_now);
            else
              v_seen := covered_in_ephemeral_buckets(v_policy, (v_parts[v_n]).demands, v_now);
            end if;
            v_covered := v_seen.row_ids is not null;
            exit when not v_covered;
            v_lock    := v_lock or v_seen.contended;
            v_parts[v_n].row_ids := v_seen.row_ids;
          end loop;
          if v_covered and v_lock then
            for v_n in 1..cardinality(v_parts) loop
              v_policy := (v_parts[v_n]).policy;
              if v_policy.durable then
                v_row_ids := lock_demanded_buckets(v_policy, (v_parts[v_n]).demands);
              else
                v_row_ids := lock_demanded_ephemeral_buckets(v_policy, (v_parts[v_n]).demands);
              end if;
              if v_row_ids is null then
                raise exception sqlstate 'RL00T';  -- rolls back to the begin above; caught below, so no caller sees it
              end if;
              v_parts[v_n].row_ids := v_row_ids;
            end loop;
            if exists (select from unnest(v_parts) as u
                        where u.policy is distinct from (select p from policies as p where p.id = (u.policy).id)) then
              raise exception sqlstate 'RL00T';  -- the buckets are as of now, and the policy was read before
            end if;
            v_now := clock();  -- it may have waited
          end if;
        end if;
        if v_covered is not false then
          for v_n in 1..coalesce(cardinality(v_parts), 1) loop
            if v_parts is not null then
              v_policy := (v_parts[v_n]).policy;
              if v_policy.durable then
                v_taken := take_from_buckets(v_policy, keys, costs, (v_parts[v_n]).demands, (v_parts[v_n]).row_ids, v_now);
              else
                v_taken := take_from_ephemeral_buckets(v_policy, keys, costs, (v_parts[v_n]).demands, (v_parts[v_n]).row_ids, v_now);
              end if;
            end if;
            continue when v_taken.places is null;
            v_taken.capacities := coalesce(v_taken.capacities, array_fill(v_policy.capacity, array[cardinality(v_taken.places)]));
            v_places    := v_places || v_taken.places;
            v_remaining := v_remaining || v_taken.remaining;
            v_reset_us  := v_reset_us || v_taken.reset_us;
            v_capacity  := v_capacity || v_taken.capacities;
            if sizes is not null then
              v_shadows := v_shadows || array_fill(v_policy.shadow, array[cardinality(v_taken.places)]);
            end if;
            if idempotency_keys is not null and v_policy.durable then
              v_kept := v_kept and remember_idempotency_keys(
                v_policy, keys, idempotency_keys, costs, v_now, true, v_taken.places, v_taken.remaining, v_taken.capacities, v_taken.reset_us);
            elsif idempotency_keys is not null then
              v_kept := v_kept and remember_ephemeral_idempotency_keys(
                v_policy, keys, idempotency_keys, costs, v_now, true, v_taken.places, v_taken.remaining, v_taken.capacities, v_taken.reset_us);
            end if;
          end loop;
          if sizes is not null and coalesce(cardinality(v_places), 0) < v_count then
            raise exception sqlstate 'RL00L';  -- another session was faster; caught below, too
          end if;
        end if;
      end if;

      if (v_places is null and v_count > 0 and v_covered is not false) or not v_kept then
        raise exception sqlstate 'RL00T';  -- gives back what was waited for and not charged, or what an invalid key took
      elsif cardinality(v_places) < v_count then
        v_left    := array(select generate_series(1, v_count) except select unnest(v_places) order by 1);
        v_answers := decide_left(policies, keys, costs, null, idempotency_keys, v_left, false, true);
      end if;
      exit;
    exception
      when sqlstate 'RL00L' then
        v_places    := null;
        v_remaining := null;
        v_reset_us  := null;
        v_capacity  := null;
        v_shadows   := null;
        v_kept      := true;
        exit when v_lock;
        v_lock      := true;
      when sqlstate 'RL00T' or unique_violation then  -- an idempotency key is stored already, or granted twice
        v_places := null;
        exit;
    end;
  end loop;

  if cardinality(v_places) = v_count and sizes is null then
    return (v_places, v_remaining, array_fill(0::bigint, array[v_count]), v_reset_us, v_capacity, null, null,
            null, null, null, null, null, null, null, null, null, null)::packed;
  elsif cardinality(v_places) = v_count then
    select array_agg(r.request), array_agg(r.binding::integer)
      into v_answers.requests, v_answers.bindings
      from (select v_requests[u.place] as request,
                   (min(binding_rank(u.shadow, false, true, u.remaining, acquire_batch.costs[u.place], 0, u.place)))[4] - min(u.place) + 1 as binding
              from unnest(v_places, v_remaining, v_shadows) as u (place, remaining, shadow)
             group by 1) as r;
    v_answers := (v_places, v_remaining, array_fill(0::bigint, array[v_count]), v_reset_us, v_capacity, null, null,
                  v_answers.requests, array_fill(true, array[cardinality(v_answers.requests)]), array_fill(false, array[cardinality(v_answers.requests)]),
                  array_fill(false, array[cardinality(v_answers.requests)]), v_answers.bindings, null, null, null, null, null)::packed;
  elsif v_places is not null then
    return concatenated((v_places, v_remaining, array_fill(0::bigint, array[cardinality(v_places)]), v_reset_us, v_capacity, null, null,
                    null, null, null, null, null, null, null, null, null, null)::packed, v_answers);
  elsif v_count > 0 then
    v_left    := array(select generate_series(1, v_count));
    v_answers := decide_left(policies, keys, costs, v_requests, idempotency_keys, v_left, sizes is not null, false);
  end if;
  if v_misfits is not null then
    v_answers := with_misfits(v_answers, sizes, v_misfits);
  end if;
  return v_answers;
end;
$$;
comment on function ratelimit.acquire_batch(text[], text[], bigint[], integer[], text[]) is
  'Decides many requests, as if each were asked on its own, one after another.';

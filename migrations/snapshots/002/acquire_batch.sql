{{- /* Checks the arguments, and gives them the form that the rest wants: subscripts from 1, all costs, and the requests of the
       elements. */ -}}
{{ define "batch_arguments" -}}
if (array_dims(policies) = '[1:' || v_count || ']' and array_dims(keys) = array_dims(policies)
      and (costs is null or array_dims(costs) = array_dims(policies)) and sizes is null
      and (idempotency_keys is null or array_dims(idempotency_keys) = array_dims(policies))) is not true then
    perform check_length('policies', v_count, v_count);
    perform check_length('keys', cardinality(keys), v_count);
    perform check_length('costs', coalesce(cardinality(costs), v_count), v_count);
    if sizes is null then
      perform check_length('idempotency_keys', coalesce(cardinality(idempotency_keys), v_count), v_count);
    else
      perform check_sizes(sizes, v_count, cardinality(idempotency_keys));
    end if;
    if (is_list(policies) and is_list(keys) and is_list(costs) is not false and is_list(sizes) is not false
        and is_list(idempotency_keys) is not false) is not true then
      -- Subscripts are to count from 1.
      policies         := array(select unnest(policies));
      keys             := array(select unnest(keys));
      costs            := case when costs is not null then array(select unnest(acquire_batch.costs)) end;
      sizes            := case when sizes is not null then array(select unnest(acquire_batch.sizes)) end;
      idempotency_keys := case when idempotency_keys is not null then array(select unnest(acquire_batch.idempotency_keys)) end;
    end if;
  end if;
  if costs is null then
    costs := array_fill(1::bigint, array[v_count]);
  end if;
  if sizes is not null then
    select array_agg(u.request),
           case when acquire_batch.idempotency_keys is not null then array_agg(acquire_batch.idempotency_keys[u.request]) end
      into v_requests, idempotency_keys
      from (select u.request, generate_series(1, u.size) from unnest(acquire_batch.sizes) with ordinality as u (size, request)) as u;
    if 1 > any (sizes) or 1000 < any (sizes) then  -- without a cost, the elements are refused
      v_misfits := array(select u.request
                           from unnest(acquire_batch.sizes) with ordinality as u (size, request)
                          where u.size not between 1 and 1000);
      costs     := array(select case when v_requests[u.element] <> all (v_misfits) then u.cost end
                           from unnest(costs) with ordinality as u (cost, element));
    end if;
  end if;
{{- end -}}
{{- /* Tells the errors of requests that are too large or empty, however the others were decided. */ -}}
{{ define "batch_misfits" -}}
for v_misfit in 1..coalesce(cardinality(v_misfits), 0) loop
    v_i := coalesce(array_position(v_answers.refused, v_misfits[v_misfit]), coalesce(cardinality(v_answers.refused), 0) + 1);
    v_answers.refused[v_i]        := v_misfits[v_misfit];
    v_answers.error_codes[v_i]    := '22023';
    v_answers.error_messages[v_i] := 'invalid sizes';
    v_answers.error_details[v_i]  := format('Request %s has %s elements.', v_misfits[v_misfit], sizes[v_misfits[v_misfit]]);
    v_answers.error_hints[v_i]    := 'Pass 1 to 1000 elements for each request.';
  end loop;
{{- end -}}
{{ define "acquire_batch" -}}
-- Decides many requests, as if each were asked on its own, one after another. The functions for many requests differ only
-- in how they take the requests and show the answers; acquire_packed.sql explains the arguments and the results.
--
-- The fast path is take, for what most requests are: they fit. It is about one policy. A batch of several policies is split
-- into parts, one for each, in the order in which buckets are locked: durable policies first, then by name.
--
-- A request of several elements is granted only if all its buckets cover what is charged to them. So look reads the buckets
-- first, and take follows only if all of them cover. If another session changes one of them, lock_buckets waits for it
-- before take. If one has changed a bucket after the look, the fast path is rolled back, and begins again with the locks.
--
-- decide_in_order decides what take left of single requests. If it would lock a bucket out of order, or if anything else was
-- not as expected, the fast path is rolled back, and decide_in_order decides the whole batch. The rollback needs a
-- subtransaction, which begins with every fast path.
--
-- In a read-only transaction decide_in_order decides from the start, because an UPDATE fails there even if it would take
-- nothing.
--
-- The settings of this function are for all statements about many buckets: also those of the functions in
-- take.sql, keys.sql and decide_in_order.sql, which nobody else calls.
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
  set enable_indexscan = on   -- include/newest.sql reads the index from its end
  set enable_bitmapscan = off  -- likewise; a bitmap would read every version
  set jit = off               -- the statements take less time than compiling them
as $$
declare
  v_count    integer := cardinality(policies);
  v_requests bigint[];  -- for each element, the number of its request; null without sizes: its own number
  v_misfits  bigint[];  -- requests of a size that is refused
  v_policy   policies;  -- that of all elements, or of a part
  v_parts    part[];    -- the batch by policy; null if all elements have one
  v_seen     record;
  v_row_ids  tid[];
  v_now      timestamptz;
  v_covered  boolean;   -- every bucket covers all that is asked of it; not asked without sizes
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
  v_i        integer;
begin
  {{ template "batch_arguments" }}

  loop
    begin
      if v_count > 0 and current_setting('transaction_read_only') = 'off' then
        v_now := clock();
        if sizes is null and policies[1] collate "C" = all (policies) then
          select p.* into v_policy from policies as p where p.name = acquire_batch.policies[1] collate "C";
          v_taken := take(v_policy, keys, costs, null, null, v_now);
          if cardinality(v_taken.places) = v_count and idempotency_keys is null then  -- so end most batches
            return (v_taken.places, v_taken.remaining, array_fill(0::bigint, array[v_count]), v_taken.reset_us,
                    coalesce(v_taken.capacities, array_fill(v_policy.capacity, array[v_count])), null, null,
                    null, null, null, null, null, null, null, null, null, null)::packed;
          end if;
        else
          -- The rows come in the order of key, and asked is in this order, too. A request that names a bucket twice is left to
          -- decide_in_order, which answers both elements with the sum.
          select coalesce(array_agg(row(p, s.asked, null)::part order by p.durable desc, p.name), '{}'),
                 sizes is null or (sum(s.size) = v_count and not bool_or(s.twice)) is true
            into v_parts, v_covered
            from (select a.policy, array_agg(row(a.key, a.wanted, a.places, a.size)::asked) as asked, sum(a.size) as size,
                         bool_or(sizes is not null and a.size > 1
                                 and a.size > (select count(distinct v_requests[u.place]) from unnest(a.places) as u (place))) as twice
                    from ({{ template "asked" (list "policy" "key") }}) as a
                   group by a.policy) as s
            join policies as p on p.name = s.policy;
        end if;
        if sizes is not null and v_covered then
          for v_n in 1..cardinality(v_parts) loop
            v_seen    := look((v_parts[v_n]).policy, (v_parts[v_n]).asked, v_now);
            v_covered := v_seen.row_ids is not null;
            exit when not v_covered;
            v_lock    := v_lock or v_seen.contended;
            v_parts[v_n].row_ids := v_seen.row_ids;
          end loop;
          if v_covered and v_lock then
            for v_n in 1..cardinality(v_parts) loop
              v_row_ids := lock_buckets((v_parts[v_n]).policy, (v_parts[v_n]).asked);
              if v_row_ids is null then
                raise exception sqlstate 'RL00T';  -- rolls back to the begin above; caught below, so no caller sees it
              end if;
              v_parts[v_n].row_ids := v_row_ids;
            end loop;
            if exists (select from unnest(v_parts) as u
                        where u.policy is distinct from (select p from policies as p where p.id = (u.policy).id)) then
              raise exception sqlstate 'RL00T';  -- a bucket that was changed together with its policy is decided by both
            end if;
            v_now := clock();  -- it may have waited
          end if;
        end if;
        if v_covered is not false then
          for v_n in 1..coalesce(cardinality(v_parts), 1) loop
            if v_parts is not null then
              v_policy := (v_parts[v_n]).policy;
              v_taken  := take(v_policy, keys, costs, (v_parts[v_n]).asked, (v_parts[v_n]).row_ids, v_now);
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
            if idempotency_keys is not null then
              v_kept := v_kept and remember(keys, idempotency_keys, costs, v_now, not v_policy.durable, true, v_taken.places,
                                            array_fill(v_policy.id, array[cardinality(v_taken.places)]),
                                            array_fill(v_policy.remember_us, array[cardinality(v_taken.places)]),
                                            v_taken.remaining, v_taken.capacities, v_taken.reset_us);
            end if;
          end loop;
          if sizes is not null and coalesce(cardinality(v_places), 0) < v_count then
            raise exception sqlstate 'RL00L';  -- another session was faster; caught below, too
          end if;
        end if;
      end if;

      if v_places is null and v_count > 0 and v_covered is not false or not v_kept then
        raise exception sqlstate 'RL00T';  -- what take did not charge it has locked, if it waited for it
      elsif cardinality(v_places) < v_count then
        v_left    := array(select generate_series(1, v_count) except select unnest(v_places) order by 1);
        v_answers := decide_in_order(array(select acquire_batch.policies[u.n] from unnest(v_left) as u (n)),
                                     array(select acquire_batch.keys[u.n] from unnest(v_left) as u (n)),
                                     array(select acquire_batch.costs[u.n] from unnest(v_left) as u (n)),
                                     v_left,
                                     case when acquire_batch.idempotency_keys is not null then
                                       array(select acquire_batch.idempotency_keys[u.n] from unnest(v_left) as u (n))
                                     end,
                                     v_left, false, true);
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
    -- The binding element of a grant, as at the end of decide_in_order.
    select array_agg(r.request), array_agg(r.binding::integer)
      into v_answers.requests, v_answers.bindings
      from (select v_requests[u.place] as request,
                   (min(array[u.shadow::integer, u.remaining / acquire_batch.costs[u.place], u.place]))[3] - min(u.place) + 1 as binding
              from unnest(v_places, v_remaining, v_shadows) as u (place, remaining, shadow)
             group by 1) as r;
    v_answers := (v_places, v_remaining, array_fill(0::bigint, array[v_count]), v_reset_us, v_capacity, null, null,
                  v_answers.requests, array_fill(true, array[cardinality(v_answers.requests)]), array_fill(false, array[cardinality(v_answers.requests)]),
                  array_fill(false, array[cardinality(v_answers.requests)]), v_answers.bindings, null, null, null, null, null)::packed;
  elsif v_places is not null then
    return (v_places || v_answers.elements, v_remaining || v_answers.remaining,
            array_fill(0::bigint, array[cardinality(v_places)]) || v_answers.retry_after_us, v_reset_us || v_answers.reset_after_us,
            v_capacity || v_answers.capacity,
            case when v_answers.replayed is not null then array_fill(false, array[cardinality(v_places)]) || v_answers.replayed end,
            case when v_answers.shadowed is not null then array_fill(false, array[cardinality(v_places)]) || v_answers.shadowed end,
            null, null, null, null, null,
            v_answers.refused, v_answers.error_codes, v_answers.error_messages, v_answers.error_details, v_answers.error_hints)::packed;
  elsif v_count > 0 then
    v_left    := array(select generate_series(1, v_count));
    v_answers := decide_in_order(policies, keys, costs, coalesce(v_requests, v_left), idempotency_keys, v_left, sizes is not null, false);
  end if;
  {{ template "batch_misfits" }}
  return v_answers;
end;
$$;
comment on function ratelimit.acquire_batch(text[], text[], bigint[], integer[], text[]) is
  'Decides many requests, as if each were asked on its own, one after another.';
{{- end -}}
{{ template "acquire_batch" }}

-- Decides requests one after another at one instant, whatever they ask for. take.sql has the fast path; this is the rest.
--
-- The arguments are parallel arrays of elements. The elements of a request follow each other and have its number in
-- requests. idempotency_keys is null, or has the key of the request in each element. elements has their numbers in the
-- batch. joint asks for the answers of whole requests, too.
--
-- The steps of a round:
--   1. Lock the buckets that this round may write, and create their rows. The first round locks none.
--   2. Read the clock, and then by one snapshot the policies, overrides, buckets and idempotency keys.
--   3. Decide all requests in order, in memory.
--   4. Does the round stand? If nothing is taken, the answers stand, and locks and rows of step 1 are rolled back. Round 1
--      only creates rows, and remembers the grants of their buckets. Round 2 locks the granted buckets. It is needed if one
--      has a row, or if a request with an idempotency key is denied on one without, because its row may have come and gone since
--      the read, with a grant of that key. A later round that grants from a bucket it has not locked makes the next one lock all.
--   5. Write each bucket once, and remember the grants. If another session created a row or stored an idempotency key first, the
--      next round locks all. Each round after the second is due to another session, or to refill meanwhile.
--   6. After the last round: the answer.
--
-- taken: the caller has charged buckets for other requests of the batch.
--
-- The private errors, none of which reaches a caller of the package:
--   RL00A  here: rolls back a round, for the next one or for the end.
--   RL00T  here if taken, and in acquire_batch, which catches it: the fast path is rolled back, and the whole batch is decided here.
--          ratelimit_acquire_all raises and catches its own: it reads and charges the buckets once more, and then asks acquire_batch.
--   RL00L  acquire_batch raises and catches it: the fast path is rolled back, and begins again with the buckets locked; if they
--          were, the whole batch is decided here.
--
-- All that take from more than one bucket lock them in one order: durable policies first, then by policy and key. To
-- create a row is part of the order, because an INSERT waits for the session that has created the row. So calls that are
-- transactions of their own never deadlock with each other. If the caller has charged buckets already (taken), a grant here would break
-- the order: it is RL00T.
--
-- Locks:  the buckets of the requests that are granted, and those that a second round has locked in vain; all buckets, if a third
--         round was needed. Of each policy the buckets, and then the rows of its idempotency keys.
-- Writes: buckets and idempotency keys of granted requests.
create or replace function ratelimit.decide_in_order(
    policies text[], keys text[], costs bigint[], requests bigint[], idempotency_keys text[], elements bigint[], joint boolean, taken boolean)
  returns ratelimit.packed language plpgsql volatile
as $$
declare
  v_batch       record;             -- the requests, as of number_buckets
  v_look        record;             -- what look_at_buckets has read
  v_verdict     record;             -- what decide has decided
  v_now         timestamptz;
  v_round       integer   := 0;
  v_lock        boolean[];          -- parallel to the buckets: the next round locks it
  v_created     boolean[];          -- likewise: this round has created its row
  v_policies    ratelimit.policies[];  -- parallel to the names: as they were read
  v_numbers     ratelimit.policies[];  -- parallel to the buckets: the policy with the numbers that apply
  v_locked      ratelimit.policies[];  -- the policies by which this round has locked
  v_in_order    integer[];          -- the numbers of the known policies, durable ones first
  v_policy      ratelimit.policies;
  v_from        integer;            -- the first bucket of v_policy
  v_to          integer;            -- the last
  v_places      bigint[];           -- the elements of v_policy whose grants are to be remembered; parallel to it:
  v_remaining   bigint[];
  v_capacities  bigint[];
  v_reset_us    bigint[];
  v_written     bigint;
  v_remembered  boolean;
  v_refused     boolean[];          -- parallel to the elements: it is the one that its request is refused for
  v_place       integer;
  v_over        boolean   := false; -- nothing is taken, and the locks are to be rolled back
  v_packed      ratelimit.packed;
begin
  v_batch := number_buckets(policies, keys, costs, idempotency_keys, requests);
  v_lock  := array_fill(false, array[cardinality(v_batch.bucket_keys)]);

  -- Taken here, and not by the reads of a round: a round that is rolled back would give it back, and the next one would lock
  -- buckets before policies. A migration locks policies first.
  lock table policies in access share mode;

  <<rounds>>
  loop
    v_round := v_round + 1;
    if v_round = 1000 then
      raise exception 'the buckets changed at every look'
        using errcode = '40001',
              hint    = 'Try again.';
    end if;
    begin
      -- 1. Lock.
      v_created := array_fill(false, array[cardinality(v_lock)]);
      if v_round > 1 then
        v_now      := clock();
        v_locked   := v_policies;
        v_in_order := in_locking_order(v_policies);
        for v_n in 1..coalesce(cardinality(v_in_order), 0) loop
          v_policy := v_policies[v_in_order[v_n]];
          v_from   := v_batch.first[v_in_order[v_n]];
          v_to     := v_batch.first[v_in_order[v_n] + 1] - 1;
          if v_policy.durable then
            v_created[v_from:v_to] := lock_buckets(v_policy.id, v_batch.bucket_keys[v_from:v_to], v_lock[v_from:v_to], v_numbers[v_from:v_to], v_now);
          else
            v_created[v_from:v_to] := lock_ephemeral_buckets(v_policy.id, v_batch.bucket_keys[v_from:v_to], v_lock[v_from:v_to], v_numbers[v_from:v_to], v_now);
          end if;
        end loop;
      end if;

      -- 2. Read. The locks may have waited.
      v_now      := clock();
      v_look     := look_at_buckets(v_batch.names, v_batch.first, v_batch.bucket_keys, v_created, v_batch.bucket_numbers, v_batch.charges, idempotency_keys, v_now);
      v_policies := v_look.policies;
      v_numbers  := v_look.numbers;
      if v_round > 1 and exists (select from generate_subscripts(v_policies, 1) as p (n)
                                  where (v_policies[p.n]).id is distinct from (v_locked[p.n]).id) then
        -- a policy was defined anew since the locks
        v_lock := array_fill(true, array[cardinality(v_lock)]);
        raise exception sqlstate 'RL00A';
      end if;

      -- 3. Decide.
      v_verdict := decide(requests, idempotency_keys, v_batch.charges, v_batch.bucket_numbers, v_batch.same, v_batch.twins, v_batch.bad, v_look.known,
                          v_numbers, v_look.ends_at, v_look.turns, v_look.after, v_look.levels, v_look.refilled_at, v_look.levels_now, v_now);

      -- 4. Does it stand?
      if not true = any (v_verdict.wanted) then
        exit rounds when v_round = 1;
        v_over := true;
        raise exception sqlstate 'RL00A';
      end if;
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
      if taken then
        raise exception sqlstate 'RL00T';
      elsif v_round = 1 then
        if exists (select from unnest(v_verdict.wanted, v_look.has_row) as u (wanted, has_row) where u.wanted and u.has_row)
           or idempotency_keys is not null
              and exists (select from unnest(v_batch.bucket_numbers, v_verdict.fits, idempotency_keys) as u (bucket, fits, idempotency_key)
                           where not u.fits and u.idempotency_key is not null and v_verdict.wanted[u.bucket]) then
          v_lock := v_verdict.wanted;
          raise exception sqlstate 'RL00A';
        end if;
      elsif exists (select from unnest(v_verdict.wanted, v_lock) as u (wanted, locked) where u.wanted and not u.locked) then
        v_lock := array_fill(true, array[cardinality(v_lock)]);
        raise exception sqlstate 'RL00A';
      end if;

      -- 5. Write and remember.
      if v_look.after is not null then
        v_verdict.levels := array(select stored_level(u.level, v_numbers[u.n]) from unnest(v_verdict.levels) with ordinality as u (level, n) order by u.n);
      end if;
      v_in_order := in_locking_order(v_policies);
      for v_n in 1..cardinality(v_in_order) loop
        v_policy := v_policies[v_in_order[v_n]];
        v_from   := v_batch.first[v_in_order[v_n]];
        v_to     := v_batch.first[v_in_order[v_n] + 1] - 1;
        if v_round > 1 and v_policy.history is not null then
          perform close_period(v_policy.id, u.key, v_now)
             from unnest(v_batch.bucket_keys[v_from:v_to], v_verdict.wanted[v_from:v_to]) as u (key, wanted)
            where u.wanted;
        end if;
        if v_round > 1 and v_policy.durable then
          v_written := write_buckets(v_policy, v_batch.bucket_keys[v_from:v_to], v_verdict.wanted[v_from:v_to], v_created[v_from:v_to],
                                     v_verdict.levels[v_from:v_to], v_verdict.refilled_at[v_from:v_to]);
        elsif v_round > 1 then
          v_written := write_ephemeral_buckets(v_policy, v_batch.bucket_keys[v_from:v_to], v_verdict.wanted[v_from:v_to], v_created[v_from:v_to],
                                               v_verdict.levels[v_from:v_to], v_verdict.refilled_at[v_from:v_to]);
        elsif v_policy.durable then
          v_written := create_buckets(v_policy.id, v_batch.bucket_keys[v_from:v_to], v_verdict.wanted[v_from:v_to], v_look.has_row[v_from:v_to],
                                      v_verdict.levels[v_from:v_to], v_verdict.refilled_at[v_from:v_to], v_numbers[v_from:v_to]);
        else
          v_written := create_ephemeral_buckets(v_policy.id, v_batch.bucket_keys[v_from:v_to], v_verdict.wanted[v_from:v_to], v_look.has_row[v_from:v_to],
                                                v_verdict.levels[v_from:v_to], v_verdict.refilled_at[v_from:v_to], v_numbers[v_from:v_to]);
        end if;
        v_remembered := true;
        if true = any (v_verdict.kept) then
          select array_agg(u.place order by u.bucket, u.place), array_agg(u.remaining order by u.bucket, u.place),
                 array_agg(u.capacity order by u.bucket, u.place), array_agg(u.reset_us order by u.bucket, u.place)
            into v_places, v_remaining, v_capacities, v_reset_us
            from unnest(v_batch.bucket_numbers, v_verdict.kept, v_batch.same, v_verdict.remaining, v_verdict.capacities, v_verdict.reset_us)
                 with ordinality as u (bucket, kept, same, remaining, capacity, reset_us, place)
           where u.kept and u.same = u.place and u.bucket between v_from and v_to;
          if v_places is not null and v_policy.durable then
            v_remembered := remember_idempotency_keys(v_policy, keys, idempotency_keys, v_batch.charges, v_now, false,
                                                      v_places, v_remaining, v_capacities, v_reset_us);
          elsif v_places is not null then
            v_remembered := remember_ephemeral_idempotency_keys(v_policy, keys, idempotency_keys, v_batch.charges, v_now, false,
                                                                v_places, v_remaining, v_capacities, v_reset_us);
          end if;
        end if;
        if v_written < (select count(*) from unnest(v_verdict.wanted[v_from:v_to]) as u (wanted) where u.wanted) or v_remembered is not true then
          v_lock := array_fill(true, array[cardinality(v_lock)]);
          raise exception sqlstate 'RL00A';
        end if;
      end loop;
      exit rounds;
    exception when sqlstate 'RL00A' then
      exit rounds when v_over;
    end;
  end loop;

  -- 6. The answer.
  select array_agg(elements[a.place]), array_agg(a.remaining), array_agg(a.retry_us), array_agg(a.reset_us), array_agg(a.capacity),
         case when bool_or(a.replayed) then array_agg(a.replayed) end, case when bool_or(a.shadowed) then array_agg(a.shadowed) end
    into v_packed.elements, v_packed.remaining, v_packed.retry_after_us, v_packed.reset_after_us, v_packed.capacity,
         v_packed.replayed, v_packed.shadowed
    from unnest(v_verdict.remaining, v_verdict.retry_us, v_verdict.reset_us, v_verdict.capacities, v_verdict.replayed, v_verdict.shadowed, v_verdict.granted)
         with ordinality as a (remaining, retry_us, reset_us, capacity, replayed, shadowed, granted, place)
   where a.granted is not null;
  if joint then
    select array_agg(r.request), array_agg(r.granted),
           array_agg(case when r.granted then r.replayed and not r.charged else r.waits end),
           array_agg(r.granted and r.shadowed), array_agg(r.binding::integer)
      into v_packed.requests, v_packed.requests_allowed, v_packed.requests_replayed, v_packed.requests_shadowed, v_packed.bindings
      from (select a.request, bool_and(a.granted) as granted, bool_or(a.charged) as charged, bool_or(a.replayed) as replayed,
                   bool_or(a.shadowed) as shadowed,
                   bool_and((a.replayed or a.retry_us = 0) is true) as waits,  -- for nothing but reservations
                   (min(binding_rank(v_numbers[a.bucket].shadow, a.cost = 0, a.granted, a.remaining, a.charge, a.retry_us, a.place)))[4]
                     - min(a.place) + 1 as binding
              from unnest(requests, costs, v_batch.charges, v_batch.bucket_numbers, v_verdict.remaining, v_verdict.retry_us, v_verdict.replayed,
                          v_verdict.shadowed, v_verdict.granted, v_verdict.charged)
                   with ordinality as a (request, cost, charge, bucket, remaining, retry_us, replayed, shadowed, granted, charged, place)
             where a.granted is not null
             group by a.request) as r;
  end if;
  if v_verdict.refused is not null then
    v_refused := array_fill(false, array[cardinality(requests)]);
    foreach v_place in array v_verdict.refused loop
      v_refused[v_place] := true;
    end loop;
    select array_agg(r.request order by r.place), array_agg(f.error_code order by r.place), array_agg(f.error_message order by r.place),
           array_agg(detail_of_element(f.error_message, f.error_detail, r.element, r.elements) order by r.place), array_agg(f.error_hint order by r.place)
      into v_packed.refused, v_packed.error_codes, v_packed.error_messages, v_packed.error_details, v_packed.error_hints
      from (select u.*, u.place - min(u.place) over same + 1 as element, count(*) over same as elements
              from unnest(requests, policies, keys, costs, v_batch.charges, v_batch.bad, decide_in_order.idempotency_keys, v_refused)
                   with ordinality as u (request, policy, key, cost, charge, bad, idempotency_key, refused, place)
            window same as (partition by u.request)
            offset 0) as r
     cross join lateral refusal(r.policy, r.key, case when r.bad then r.cost else r.charge end, r.idempotency_key, v_verdict.known[r.place]) as f
     where r.refused;
  end if;
  return v_packed;
end;
$$;
comment on function ratelimit.decide_in_order(text[], text[], bigint[], bigint[], text[], bigint[], boolean, boolean) is
  'Decides requests one after another at one instant, whatever they ask for.';

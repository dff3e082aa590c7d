-- Answers many ratelimit_acquire_up_to, with at_least 1, one after another, by the two ways of acquire_batch. take_up_to_from_buckets is the fast
-- path. What it left is for decide_left: if that grants any of it, RL00T, and decide_left decides the whole batch. So
-- buckets are locked in one order.
--
-- Locks and writes: as acquire_batch, whose settings these are.
create or replace function ratelimit_acquire_up_to_many(policies text[], keys text[], at_most bigint[])
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean, shadowed boolean, taken bigint,
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan
  set enable_seqscan = off
  set enable_hashjoin = off
  set enable_mergejoin = off
  set enable_tidscan = on
  set enable_indexscan = on
  set enable_bitmapscan = off
  set jit = off
as $$
declare
  v_count integer := cardinality(policies);
  v_costs bigint[];  -- at_most, null where it is refused
  v_parts part[];
  v_part  part;
  v_taken record;
  v_now   timestamptz;
  v_fast  packed;  -- what the fast path granted; its requests are what was taken
  v_left  packed;  -- the other elements
begin
  if (array_dims(policies) = '[1:' || v_count || ']' and array_dims(keys) = array_dims(policies) and array_dims(at_most) = array_dims(policies)) is not true then
    select f.policies, f.keys into policies, keys from batch_form(policies, keys, null, null, null) as f;
    perform check_length('at_most', cardinality(at_most), v_count);
    at_most := array(select unnest(at_most));
  end if;
  v_costs := at_most;
  if (0 < all (at_most)) is not true then
    v_costs := array(select case when u.n > 0 then u.n end from unnest(at_most) as u (n));
  end if;
  begin
    if v_count > 0 and current_setting('transaction_read_only') = 'off' then
      v_now   := clock();
      v_parts := (parts_of(policies, keys, v_costs, null)).parts;
      foreach v_part in array v_parts loop
        continue when ((v_part.policy).calendar).lease is not null;
        if (v_part.policy).durable then
          v_taken := take_up_to_from_buckets(v_part.policy, v_part.asked, v_now);
        else
          v_taken := take_up_to_from_ephemeral_buckets(v_part.policy, v_part.asked, v_now);
        end if;
        v_fast.elements       := v_fast.elements || v_taken.places;
        v_fast.remaining      := v_fast.remaining || v_taken.remaining;
        v_fast.reset_after_us := v_fast.reset_after_us || v_taken.reset_us;
        v_fast.capacity       := v_fast.capacity || v_taken.capacities;
        v_fast.requests       := v_fast.requests || v_taken.taken;
      end loop;
      if v_fast.elements is null then
        raise exception sqlstate 'RL00T';  -- gives back what was waited for and not charged
      end if;
      v_fast.retry_after_us := array_fill(0::bigint, array[cardinality(v_fast.elements)]);
      if cardinality(v_fast.elements) < v_count then
        v_left := decide_left(policies, keys, v_costs, null, null, array(select generate_series(1, v_count) except select unnest(v_fast.elements) order by 1),
                              false, true, true);
        v_fast := both_of(v_fast, v_left);
      end if;
    end if;
  exception when sqlstate 'RL00T' then
    v_fast := null;
  end;
  if v_fast.elements is null and v_count > 0 then
    v_fast := decide_left(policies, keys, v_costs, null, null, array(select generate_series(1, v_count)), false, false, true);
  end if;
  return query
    select e.element, e.retry_us is not distinct from 0, e.remaining, duration(e.retry_us), duration(e.reset_us), e.capacity, false,
           coalesce(e.shadowed, false), e.taken, null::text, null::text, null::text, null::text
      from unnest(v_fast.elements, v_fast.remaining, v_fast.retry_after_us, v_fast.reset_after_us, v_fast.capacity, v_fast.shadowed, v_fast.requests)
           as e (element, remaining, retry_us, reset_us, capacity, shadowed, taken)
    union all
    select r.refused, null, null, null, null, null, null, null, null, r.code, coalesce(b.message, r.message), coalesce(b.detail, r.detail), coalesce(b.hint, r.hint)
      from unnest(v_fast.refused, v_fast.error_codes, v_fast.error_messages, v_fast.error_details, v_fast.error_hints)
           as r (refused, code, message, detail, hint)
      left join lateral (select 'invalid at_most' as message, format('at_most is %s.', coalesce(at_most[r.refused]::text, 'null')) as detail,
                                'Pass a whole number of tokens, 1 or more.' as hint) as b on r.message = 'invalid cost'
     order by 1;
end;
$$;
comment on function ratelimit_acquire_up_to_many(text[], text[], bigint[]) is
'Takes from many buckets in one call, as ratelimit_acquire_up_to with at_least 1 would from one after another.
Row n answers request n. A request with an error does not fail the other requests. Of two requests about one bucket the
  second takes from what the first left.
policies: the policy of each request.
keys: as many elements as policies.
at_most: whole tokens, 1 or more, as many elements as policies.
request: the number of the request, from 1.
taken: whole tokens, 0 for a denial. A shadow policy returns taken = at_most, as in ratelimit_acquire_up_to.
replayed: false.
error_code: the SQLSTATE of the error of this request, null for a decision. The columns of the decision are null
  beside an error.
Errors: 22023 for arrays of different lengths, 25006 in a read-only transaction. error_code has 22023 and RL001.
Locks: as ratelimit_acquire_many.
Writes: granted requests write their buckets.
Role: application.';

-- Answers many ratelimit_peek in one call, as of one snapshot, because the function is STABLE. Each request is asked alone. The
-- buckets of a policy that refills are read by one statement. A request about a quota or slots is peeked by itself.
create or replace function ratelimit_peek_many(policies text[], keys text[], costs bigint[] default null)
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean, shadowed boolean,
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  stable
  security definer
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan  -- as in acquire_batch
  set enable_seqscan = off   -- as in ratelimit_acquire
  set enable_bitmapscan = off  -- as in acquire_batch
  set jit = off              -- likewise
as $$
declare
  v_now     timestamptz := clock();
  v_names   text[];
  v_name    text collate "C";
  v_policy  policies;
  v_places  bigint[];  -- the requests about v_policy
  v_place   bigint;
  v_one     decision;
  v_part    packed;
  v_seen    packed;
  v_refused bigint[];
begin
  select f.policies, f.keys, f.costs into policies, keys, costs from batch_form(policies, keys, costs, null, null) as f;
  v_names := case when policies[1] collate "C" = all (policies) then policies[1:1]
                  else array(select distinct u.policy collate "C" from unnest(policies) as u (policy)) end;
  foreach v_name in array v_names loop
    v_places := array(select u.place from unnest(ratelimit_peek_many.policies) with ordinality as u (policy, place) where u.policy collate "C" is not distinct from v_name);
    select p.* into v_policy from policies as p where p.name = v_name;
    if not found then
      v_refused := v_refused || v_places;
      continue;
    end if;
    v_part := null;
    if (v_policy.calendar).ends_at is null and v_policy.durable then
      v_part := peeked_in_buckets(v_policy, keys, costs, v_places, v_now);
    elsif (v_policy.calendar).ends_at is null then
      if pg_is_in_recovery() then perform refuse_ephemeral(v_policy); end if;  -- raises 0A000
      v_part := peeked_in_ephemeral_buckets(v_policy, keys, costs, v_places, v_now);
    else
      foreach v_place in array v_places loop
        continue when not acceptable(keys[v_place], costs[v_place]);
        v_one                 := peek(v_name, keys[v_place], costs[v_place]);
        v_part.elements       := v_part.elements || v_place;
        v_part.remaining      := v_part.remaining || v_one.remaining;
        v_part.retry_after_us := v_part.retry_after_us || microseconds(v_one.retry_after)::bigint;
        v_part.reset_after_us := v_part.reset_after_us || microseconds(v_one.reset_after)::bigint;
        v_part.capacity       := v_part.capacity || v_one.capacity;
      end loop;
    end if;
    if coalesce(cardinality(v_part.elements), 0) < cardinality(v_places) then  -- the others have a bad argument
      v_refused := v_refused || array(select unnest(v_places) except select unnest(v_part.elements));
    end if;
    v_seen := both_of(v_seen, v_part);
  end loop;
  if v_refused is null then
    return query
      select e.element, e.retry_us is not distinct from 0, e.remaining, duration(e.retry_us), duration(e.reset_us), e.capacity, false, false,
             null::text, null::text, null::text, null::text
        from unnest(v_seen.elements, v_seen.remaining, v_seen.retry_after_us, v_seen.reset_after_us, v_seen.capacity)
             as e (element, remaining, retry_us, reset_us, capacity)
       order by 1;
    return;
  end if;
  return query
    select e.element, e.retry_us is not distinct from 0, e.remaining, duration(e.retry_us), duration(e.reset_us), e.capacity, false, false,
           null::text, null::text, null::text, null::text
      from unnest(v_seen.elements, v_seen.remaining, v_seen.retry_after_us, v_seen.reset_after_us, v_seen.capacity)
           as e (element, remaining, retry_us, reset_us, capacity)
    union all
    select r.place, null, null, null, null, null, null, null, f.error_code, f.error_message, f.error_detail, f.error_hint
      from unnest(v_refused) as r (place)
     cross join lateral refusal(policies[r.place], keys[r.place], costs[r.place], null, null) as f
     order by 1;
end;
$$;
comment on function ratelimit_peek_many(text[], text[], bigint[]) is
'Returns for many buckets what ratelimit_peek returns for one. It takes nothing.
Row n answers request n. Each request is asked alone: two about one bucket get the same answer. A request with an error does not fail
  the other requests.
policies: the policy of each request.
keys: as many elements as policies.
costs: whole tokens, 0 or more, as many elements as policies. null: 1 for each request.
request: the number of the request, from 1.
replayed: false, as is shadowed.
error_code: the SQLSTATE of the error of this request, null for a decision. The columns of the decision are null
  beside an error.
Errors: 22023 for arrays of different lengths, 0A000 for an ephemeral policy on a standby. error_code has 22023 and RL001.
Locks: nothing.
Writes: nothing.
Role: application.';

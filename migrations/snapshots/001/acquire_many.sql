-- Decides many requests in one call, as if each were acquired on its own, one after another; row n answers
-- request n. Within a bucket, requests are decided in the order given. Requests on different buckets do not
-- affect each other. The fast path of acquire_in_order decides the requests for one policy at one instant. Its
-- ordered path reads the clock again each time an update took nothing, because the update may have waited.
--
-- A request that ratelimit_acquire would refuse (unknown policy, bad argument, another cost under its idempotency
-- key) has the error in its row and no decision. The other requests are decided all the same.
--
-- policies and keys are equally long, and so are costs and idempotency_keys unless null. Without costs
-- every cost is 1. Without idempotency_keys no request has one.
--
-- Locks:  as ratelimit_acquire, in the order of policy and key. So calls that are transactions of their own
--         never deadlock with each other. Several calls in one transaction can.
-- Writes: as ratelimit_acquire, and row versions that are rolled back when the fast path of
--         acquire_in_order gives up.
-- A request that is refused with RL002 in step 4 of ratelimit_acquire leaves its bucket locked, and written with
-- the tokens put back. ratelimit_acquire raises the error, which rolls both back.
create or replace function ratelimit_acquire_many(
    policies         text[],
    keys             text[],
    costs            bigint[] default null,
    idempotency_keys text[]   default null)
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean,
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_length integer  := cardinality(ratelimit_acquire_many.policies);
  v_costs  bigint[] := ratelimit_acquire_many.costs;
begin
  perform check_length('policies', v_length, v_length);
  perform check_length('keys', cardinality(keys), v_length);
  perform check_length('costs', coalesce(cardinality(costs), v_length), v_length);
  perform check_length('idempotency_keys', coalesce(cardinality(idempotency_keys), v_length), v_length);
  if v_costs is null then
    v_costs := array_fill(1::bigint, array[v_length]);
  elsif not is_list(v_costs) then
    v_costs := array(select unnest(v_costs));
  end if;
  if idempotency_keys is not null and not (is_list(keys) and is_list(idempotency_keys)) then  -- acquire_in_order subscripts both
    keys             := array(select unnest(keys));
    idempotency_keys := array(select unnest(ratelimit_acquire_many.idempotency_keys));
  end if;

  -- One policy needs no grouping. The other branch calls acquire_in_order in the order of policy.
  if policies[1] collate "C" = all (ratelimit_acquire_many.policies) then
    return query
      select a.*
        from acquire_in_order(policies[1], keys, v_costs, ratelimit_acquire_many.idempotency_keys,
                              array(select generate_series(1::bigint, v_length))) as a
       order by a.request;
  else
    return query
      select a.*
        from (select u.policy, array_agg(u.key order by u.request) as keys, array_agg(u.cost order by u.request) as costs,
                     case when ratelimit_acquire_many.idempotency_keys is not null then
                       array_agg(u.idempotency_key order by u.request)
                     end as idempotency_keys,
                     array_agg(u.request order by u.request) as requests
                from (select r.policy collate "C" as policy, r.key, r.cost, r.idempotency_key, r.request
                        from unnest(ratelimit_acquire_many.policies, ratelimit_acquire_many.keys, v_costs,
                                    ratelimit_acquire_many.idempotency_keys)
                             with ordinality as r (policy, key, cost, idempotency_key, request)) as u
               group by u.policy
               order by u.policy
              offset 0) as p
       cross join lateral acquire_in_order(p.policy, p.keys, p.costs, p.idempotency_keys, p.requests) as a
       order by a.request;
  end if;
end;
$$;
comment on function ratelimit_acquire_many(text[], text[], bigint[], text[]) is
  'Decide many requests in one call, in the order given, each with its own decision or error.';

{{ define "all_or_none" -}}
for v_together, request, allowed, remaining, v_retry_us, v_reset_us, capacity in
      with asked as (
        select u.policy collate "C" as policy, u.key collate "C" as key, u.cost, u.request,
               sum(least(u.cost, 2147483647)::integer)  -- of bigints it would be numeric
                 over (partition by u.policy collate "C", u.key collate "C" order by u.request) as total
          from unnest(acquire_in_order.policies, keys, costs) with ordinality as u (policy, key, cost, request)
      ), wanted as materialized (
        select a.policy, a.key, max(a.total) as total, min(a.cost) as cheapest, max(a.cost) as dearest,
               array_agg(a.request) as requests, array_agg(a.cost) as costs, array_agg(a.total) as totals
          from asked as a
         group by a.policy, a.key
        having bool_and(acceptable(a.policy, a.key, a.cost, null))
      ), found as materialized (
        select w.*, p.id as policy_id, p.capacity, p.every_us, p.tick_us, p.tick_gain, p.tick, p.gain,
               b.row_id, b.level, b.refilled_at,
               refilled_level(b.level, b.refilled_at, v_now, p.capacity, p.gain, p.every_us, p.tick) as level_now
          from wanted as w
          join policies as p on p.name = w.policy
         cross join lateral (select b.ctid as row_id, b.level, b.refilled_at
                               from {{ . }} as b
                              {{ template "newest.sql" (dict "policy_id" "p.id" "key" "w.key") }}) as b
         where p.durable = v_policy.durable
           and w.dearest <= least(p.capacity, 2147483646)
      ), clear as materialized (
        select
          from found as f
        having sum(cardinality(f.requests)) = cardinality(acquire_in_order.policies)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update {{ . }} as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, f.tick)
          from (select o.* from found as o
                 where o.level_now / 1000000 >= o.total and exists (select from clear)
                 order by o.policy, o.key) as f
         where b.ctid        = f.row_id
           and b.policy_id   = f.policy_id
           and b.key         = f.key
           and b.level       = f.level
           and b.refilled_at = f.refilled_at
        returning f.requests, f.totals, f.total, b.level, b.refilled_at, f.capacity, f.every_us, f.tick_us, f.tick_gain
      )
      select count(a.request) over (), a.*
        from clear
        left join (
      select g.request, true, whole_tokens(g.level), 0::bigint,
             wait_for(microtokens(g.capacity), g.level, g.refilled_at, v_now, g.every_us, g.tick_us, g.tick_gain), g.capacity
        from (select r.request, t.level + microtokens(t.total - r.total) as level,  -- what this one left
                     t.refilled_at, t.capacity, t.every_us, t.tick_us, t.tick_gain
                from taken as t
               cross join lateral unnest(t.requests, t.totals) as r (request, total)
              offset 0) as g
      union all
      select r.request, false, whole_tokens(f.level_now),
             wait_for(microtokens(r.cost), f.level, f.refilled_at, v_now, f.every_us, f.tick_us, f.tick_gain),
             wait_for(microtokens(f.capacity), f.level, f.refilled_at, v_now, f.every_us, f.tick_us, f.tick_gain), f.capacity
        from found as f
       cross join lateral unnest(f.requests, f.costs) as r (request, cost)
       where f.level_now / 1000000 < f.cheapest
         and exists (select from clear)
       ) as a (request, allowed, remaining, retry_us, reset_us, capacity) on true
    loop
      if v_together < cardinality(acquire_in_order.policies) then
        raise exception sqlstate 'RL000';
      end if;
      retry_after := duration(v_retry_us);
      reset_after := duration(v_reset_us);
      return next;
    end loop;
{{- end -}}
-- Decides requests bucket by bucket, in one order for all callers, so that calls cannot deadlock.
--
-- The common case is one statement: no idempotency keys, every bucket has a row, and each grants all
-- that is asked of it or nothing. It reads first and takes only when that is so, because what is left
-- over would have to be locked out of order; so it is undone as well when a bucket it waited for was
-- changed or removed, at the price of a subtransaction. It joins in the order of its
-- input only while it has no other way: hence the settings. Everything else goes through the steps of
-- ratelimit_acquire, where equal requests without a key that follow each other on a bucket are one
-- run, taken in one update; on a busy key that is often the whole call.
create or replace function ratelimit.acquire_in_order(
    policies text[], keys text[], costs bigint[], idempotency_keys text[])
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean,
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan
  set enable_seqscan = off
  set enable_hashjoin = off
  set enable_mergejoin = off
  set jit = off
as $$
declare
  v_together        bigint;   -- requests answered by one statement
  v_alike           boolean;  -- all requests are one run
  v_run             record;
  v_position        integer;  -- the requests of the run answered so far
  v_step            bigint;   -- microtokens between two grants of a run
  v_count           integer;
  v_name            text collate "C";
  v_key             text collate "C";
  v_cost            bigint;
  v_idempotency_key text collate "C";
  v_policy          policies;
  v_now             timestamptz := clock();
  v_take            bigint;
  v_level           bigint;
  v_refilled_at     timestamptz;
  v_retry_us        bigint;
  v_reset_us        bigint;
  v_due_at          timestamptz;
  v_expires_at      timestamptz;
  v_replayed        boolean;
  v_first           idempotency_keys;
begin
  select p.* into v_policy from policies as p where p.name = acquire_in_order.policies[1];
  v_alike := (idempotency_keys is null
              and policies[1] collate "C" = all (acquire_in_order.policies)
              and keys[1] collate "C" = all (keys)
              and costs[1] = all (costs)) is true;
  if idempotency_keys is null and found and not v_alike and 0 < all (costs) then
    replayed := false;
    begin
      if v_policy.durable then
        {{ template "all_or_none" "buckets" }}
      else
        {{ template "all_or_none" "ephemeral_buckets" }}
      end if;
    exception when sqlstate 'RL000' then
      null;  -- nothing is taken or locked
    end;
    if v_together = cardinality(acquire_in_order.policies) then
      return;
    end if;
  end if;

  for v_run in
    select policies[1] collate "C" as policy, keys[1] collate "C" as key, costs[1] as cost, null as idempotency_key,
           array(select generate_series(1::bigint, cardinality(acquire_in_order.policies))) as requests
     where v_alike
    union all
   (select c.policy, c.key, c.cost, c.idempotency_key, array_agg(c.request order by c.request)
      from (select b.*, count(*) filter (where b.starts) over (partition by b.policy, b.key order by b.request) as run
              from (select a.*,
                           a.idempotency_key is not null
                           or lag(a.idempotency_key) over bucket is not null
                           or lag(a.cost) over bucket is distinct from a.cost as starts
                      from (select u.policy collate "C" as policy, u.key collate "C" as key, u.cost,
                                   u.idempotency_key collate "C" as idempotency_key, u.request
                              from unnest(acquire_in_order.policies, keys, costs, idempotency_keys)
                                   with ordinality as u (policy, key, cost, idempotency_key, request)
                             where not v_alike) as a
                    window bucket as (partition by a.policy, a.key order by a.request)) as b) as c
     group by c.policy, c.key, c.run, c.cost, c.idempotency_key
     order by c.policy, c.key, c.run)
  loop
    v_name            := v_run.policy;
    v_key             := v_run.key;
    v_cost            := v_run.cost;
    v_idempotency_key := case when v_cost > 0 then v_run.idempotency_key end;
    v_position        := 0;
    if v_policy.name is distinct from v_name then
      select p.* into v_policy from policies as p where p.name = v_name;
    end if;
    if v_policy.id is null or not acceptable(v_name, v_key, v_cost, v_run.idempotency_key) then
      return query
        select r.request, null::boolean, null::bigint, null::interval, null::interval, null::bigint, null::boolean, e.*
          from unnest(v_run.requests) as r (request)
         cross join refusal(v_name, v_key, v_cost, v_run.idempotency_key, null) as e;
      continue;
    end if;

    while v_position < cardinality(v_run.requests) loop
      v_take := case
        when v_cost between 1 and v_policy.capacity then
          microtokens(v_cost * least(cardinality(v_run.requests) - v_position, v_policy.capacity / v_cost))
        else 0
      end;
      v_replayed := false;
      if v_policy.durable then
        {{ template "decide.sql" (dict "buckets" "buckets" "keys" "idempotency_keys" "newest" true) }}
      else
        {{ template "decide.sql" (dict "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys" "newest" true) }}
      end if;

      if v_replayed and v_first.cost <> v_cost then
        return query
          select v_run.requests[1], null::boolean, null::bigint, null::interval, null::interval, null::bigint, null::boolean, e.*
            from refusal(v_name, v_key, v_cost, v_idempotency_key, v_first) as e;
        exit;
      end if;
      if v_replayed then
        v_level    := microtokens(v_first.remaining);
        v_retry_us := 0;
        v_reset_us := microseconds(v_first.reset_after)::bigint;
      end if;
      allowed     := coalesce(v_retry_us = 0, false);
      retry_after := duration(v_retry_us);
      capacity    := case when v_replayed then v_first.capacity else v_policy.capacity end;
      replayed    := v_replayed;

      -- A grant is answered by the level it left; what of the run did not fit goes round again.
      v_step  := case when allowed and not v_replayed and v_take > 0 then microtokens(v_cost) else 0 end;
      v_count := case when v_step > 0 then (v_take / v_step)::integer else cardinality(v_run.requests) - v_position end;
      if v_count = 1 then
        request     := v_run.requests[v_position + 1];
        remaining   := whole_tokens(v_level);
        reset_after := duration(v_reset_us);
        return next;
      else
        return query
          select d.request, acquire_in_order.allowed, whole_tokens(d.level), acquire_in_order.retry_after,
                 duration(d.reset_us), acquire_in_order.capacity, acquire_in_order.replayed, null, null, null, null
            from (select l.request, l.level,
                         case
                           when v_step = 0 then v_reset_us
                           else wait_for(microtokens(v_policy.capacity), l.level, v_refilled_at, v_now,
                                         v_policy.every_us, v_policy.tick_us, v_policy.tick_gain)
                         end as reset_us
                    from (select v_run.requests[v_position + n] as request, v_level + (v_count - n) * v_step as level
                            from generate_series(1, v_count) as n
                          offset 0) as l
                  offset 0) as d;
      end if;
      v_position := v_position + v_count;
    end loop;
  end loop;
end;
$$;
comment on function ratelimit.acquire_in_order(text[], text[], bigint[], text[]) is
  'Decides many requests and answers them in the order it took the buckets.';

-- Decides many requests in one call, as if each were acquired on its own, one after another at one
-- instant, in the order given; row n answers request n. A request that ratelimit_acquire would
-- refuse (unknown policy, bad argument, another cost under its idempotency key) has the error in
-- its row and no decision; the others are decided all the same.
--
-- policies and keys are equally long, and so are costs and idempotency_keys unless null: then every
-- cost is 1, and no request has a key.
--
-- Locks:  as ratelimit_acquire, in the order of policy and key, so that calls never deadlock with
--         each other.
-- Writes: as ratelimit_acquire, and row versions that are undone when a bucket changed under it.
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
  if v_costs is null then
    v_costs := array_fill(1::bigint, array[v_length]);
  end if;
  perform check_length('keys', cardinality(ratelimit_acquire_many.keys), v_length);
  perform check_length('costs', cardinality(v_costs), v_length);
  if ratelimit_acquire_many.idempotency_keys is not null then
    perform check_length('idempotency_keys', cardinality(ratelimit_acquire_many.idempotency_keys), v_length);
  end if;
  return query
    select a.*
      from acquire_in_order(ratelimit_acquire_many.policies, ratelimit_acquire_many.keys, v_costs,
                            ratelimit_acquire_many.idempotency_keys) as a
     order by a.request;
end;
$$;
comment on function ratelimit_acquire_many(text[], text[], bigint[], text[]) is
  'Decide many requests in one call, in the order given, each with its own decision or error.';

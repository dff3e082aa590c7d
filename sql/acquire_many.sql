{{- /* Takes from every bucket all that is asked of it, or nothing where it has less than the cheapest; returns no
       row, and is to be undone, when neither is so, a bucket was changed meanwhile, an idempotency key is
       known or bad, or it waited for a bucket until v_stale_at. The arguments are the names of the tables; keys is empty when no request has such a key. */ -}}
{{ define "all_or_none" -}}
{{ if .keys }}v_expires_at := v_now + duration(v_policy.remember_us);
        {{ end }}return query
      with found as materialized (
        select w.*, b.row_id, b.version, b.level, b.refilled_at,
               refilled_level(b.level, b.refilled_at, v_now,
                              v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) as level_now
          from (select a.key, sum(a.cost) as total, min(a.cost) as cheapest,
                       array_agg(a.request) as requests, array_agg(a.total) as totals
                  from (select u.key collate "C" as key, u.cost::integer as cost, u.request,
                               sum(u.cost::integer)  -- of bigints it would be numeric
                                 over (order by u.key collate "C", u.request rows unbounded preceding) as total
                          from unnest(keys, costs) with ordinality as u (key, cost, request)) as a
                 group by a.key
                 order by a.key) as w
         cross join lateral (select b.ctid as row_id, b.xmin as version, b.level, b.refilled_at
                               from {{ .buckets }} as b
                              {{ template "newest.sql" (dict "policy_id" "v_policy.id" "key" "w.key") }}) as b
      ), clear as materialized (
        select count(*) filter (where f.level_now / 1000000 >= f.total) as granting
          from found as f
        having sum(cardinality(f.requests)) = cardinality(keys)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update {{ .buckets }} as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
          from found as f
         where f.level_now / 1000000 >= f.total
           and exists (select from clear)
           and b.ctid = f.row_id
           and b.xmin = f.version
        returning f.requests, f.totals, b.level, b.refilled_at
      ), granted as (
        select g.request, g.level,
               wait_below(v_policy.full_level, g.level, microseconds(v_now - g.refilled_at),
                          v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, r.level + microtokens(r.last - r.total) as level, r.refilled_at
                  from (select unnest(t.requests) as request, unnest(t.totals) as total,
                               t.totals[cardinality(t.totals)] as last, t.level, t.refilled_at
                          from taken as t) as r
                offset 0) as g
      ), denied as (
        select d.request, d.level_now as level,
               case
                 when d.cost <= v_policy.capacity then
                   wait_for(microtokens(d.cost), d.level, d.refilled_at, v_now,
                            v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
               end as retry_us,
               wait_for(v_policy.full_level, d.level, d.refilled_at, v_now,
                        v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, costs[r.request] as cost, r.level, r.refilled_at, r.level_now
                  from (select unnest(f.requests) as request, f.level, f.refilled_at, f.level_now
                          from found as f
                         where f.level_now / 1000000 < f.cheapest
                           and exists (select from clear)) as r
                offset 0) as d
      ){{ if .keys }}, remembered as (
        insert into {{ .keys }} as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        select v_policy.id, keys[g.request], idempotency_keys[g.request], costs[g.request],
               whole_tokens(g.level), duration(g.reset_us), v_policy.capacity, v_expires_at
          from granted as g
         where is_name(idempotency_keys[g.request])
        {{ template "remember_anew" . }}
        returning 1
      ){{ end }}
      select requests[a.request], a.allowed, whole_tokens(a.level), duration(a.retry_us), duration(a.reset_us),
             v_policy.capacity, false, null::text, null::text, null::text, null::text
        from (select g.request, true as allowed, g.level, 0::bigint as retry_us, g.reset_us
                from granted as g
              union all
              select d.request, false, d.level, d.retry_us, d.reset_us
                from denied as d
              offset 0) as a
       where (select count(*) = (select c.granting from clear as c) and clock() < v_stale_at from taken)
         {{- if .keys }}
         and (select count(idempotency_keys[g.request]) from granted as g) = (select count(*) from remembered)
         and not exists (select from denied as d
                          where not is_name(idempotency_keys[d.request]))
         and not exists (select from denied as d
                          cross join lateral (select k.expires_at
                                                from {{ .keys }} as k
                                               where k.policy_id       = v_policy.id
                                                 and k.key             = keys[d.request] collate "C"
                                                 and k.idempotency_key = idempotency_keys[d.request] collate "C"
                                              offset 0) as k
                          where k.expires_at > v_now)
         {{- end }};
{{- end -}}
-- Decides requests policy by policy and bucket by bucket, in one order for all callers, so that calls
-- cannot deadlock.
--
-- The common case is one statement for a policy: every bucket has a row, each grants all that is asked of
-- it or nothing, and no idempotency key was seen before. It reads first and takes only when that is so,
-- because what is left over would have to be locked out of order; so it is undone as well when a bucket it
-- waited for was changed or removed, or when a key turns out to be known, at the price of a subtransaction.
-- Answers are as of an instant before that statement. A statement that waited so long for a bucket that
-- they would be stale, 100 ms or a millisecond for each request, is undone too: a bucket may have
-- refilled meanwhile, and a denial must be true when it is given.
-- It joins in the order of its input only while it has no other way: hence the settings. Everything else
-- goes through the steps of ratelimit_acquire, where equal requests without a key that follow each other on
-- a bucket are one run, taken in one update; on a busy key that is often the whole call.
create or replace function ratelimit.acquire_in_order(
    policy text, keys text[], costs bigint[], idempotency_keys text[], requests bigint[])
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
  v_alike           boolean;  -- they are one run
  v_run             record;
  v_position        integer;  -- the requests of the run answered so far
  v_step            bigint;   -- microtokens between two grants of a run
  v_count           integer;
  v_elapsed_us      numeric;
  v_name            text collate "C" := acquire_in_order.policy;
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
  v_round           integer;
  v_replayed        boolean;
  v_first           idempotency_keys;
  v_stale_at        timestamptz := v_now + greatest(interval '100 milliseconds', cardinality(keys) * interval '1 millisecond');
begin
  select p.* into v_policy from policies as p where p.name = v_name;
  v_alike := (idempotency_keys is null and keys[1] collate "C" = all (keys) and costs[1] = all (costs)) is true;
  if found and not v_alike
     and 0 < all (costs) and 2147483647 > all (costs)  -- sums that are quick to work out
     and current_setting('transaction_read_only') = 'off' then  -- an update that takes nothing would fail, too
    begin
      if v_policy.durable and idempotency_keys is null then
        {{ template "all_or_none" (dict "buckets" "buckets" "keys" "") }}
      elsif v_policy.durable then
        {{ template "all_or_none" (dict "buckets" "buckets" "keys" "idempotency_keys") }}
      elsif idempotency_keys is null then
        {{ template "all_or_none" (dict "buckets" "ephemeral_buckets" "keys" "") }}
      else
        {{ template "all_or_none" (dict "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys") }}
      end if;
      if found then
        return;
      end if;
      raise exception sqlstate 'RL000';
    exception when sqlstate 'RL000' or cardinality_violation then  -- the same idempotency key twice
      v_now := clock();  -- nothing is taken or locked, but it may have waited
    end;
  end if;

  for v_run in
    select keys[1] collate "C" as key, costs[1] as cost, null as idempotency_key, requests as requests
     where v_alike
    union all
   (select c.key, c.cost, c.idempotency_key, array_agg(requests[c.request] order by c.request)
      from (select b.*, count(*) filter (where b.starts) over (partition by b.key order by b.request) as run
              from (select a.*,
                           a.idempotency_key is not null
                           or lag(a.idempotency_key) over bucket is not null
                           or lag(a.cost) over bucket is distinct from a.cost as starts
                      from (select u.key collate "C" as key, u.cost, u.idempotency_key collate "C" as idempotency_key,
                                   u.request
                              from unnest(keys, costs, idempotency_keys)
                                   with ordinality as u (key, cost, idempotency_key, request)
                             where not v_alike) as a
                    window bucket as (partition by a.key order by a.request)) as b) as c
     group by c.key, c.run, c.cost, c.idempotency_key
     order by c.key, c.run)
  loop
    v_key             := v_run.key;
    v_cost            := v_run.cost;
    v_idempotency_key := case when v_cost > 0 then v_run.idempotency_key end;
    v_position        := 0;
    if v_policy.id is null
       or not acceptable(v_key, v_cost)
       or not is_name(v_run.idempotency_key) then
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
      v_round    := null;
      v_replayed := null;
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
      capacity := v_policy.capacity;
      replayed := coalesce(v_replayed, false);
      if replayed then
        v_take     := 0;
        v_level    := microtokens(v_first.remaining);
        v_retry_us := 0;
        v_reset_us := microseconds(v_first.reset_after)::bigint;
        capacity   := v_first.capacity;
      elsif v_take > 0 then
        v_retry_us := 0;
      end if;
      allowed     := coalesce(v_retry_us = 0, false);
      retry_after := duration(v_retry_us);

      -- A grant is answered by the level it left; what of the run did not fit goes round again.
      v_step  := case when v_take > 0 then microtokens(v_cost) else 0 end;
      v_count := case when v_step > 0 then (v_take / v_step)::integer else cardinality(v_run.requests) - v_position end;
      if v_count = 1 then
        request     := v_run.requests[v_position + 1];
        remaining   := whole_tokens(v_level);
        reset_after := duration(v_reset_us);
        return next;
      else
        v_elapsed_us := microseconds(v_now - v_refilled_at);
        return query
          select d.request, acquire_in_order.allowed, whole_tokens(d.level), acquire_in_order.retry_after,
                 duration(d.reset_us), acquire_in_order.capacity, acquire_in_order.replayed, null, null, null, null
            from (select l.request, l.level,
                         case
                           when v_step = 0 then v_reset_us
                           else wait_below(v_policy.full_level, l.level, v_elapsed_us,
                                           v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
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
comment on function ratelimit.acquire_in_order(text, text[], bigint[], text[], bigint[]) is
  'Decides requests for one policy, and answers them in the order it took the buckets.';

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
-- Writes: as ratelimit_acquire, and row versions that are undone when a bucket changed under it or an
--         idempotency key was known.
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
  if idempotency_keys is not null and not (is_list(keys) and is_list(idempotency_keys)) then  -- both are subscripted
    keys             := array(select unnest(keys));
    idempotency_keys := array(select unnest(ratelimit_acquire_many.idempotency_keys));
  end if;

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

-- Decides the requests for one policy, bucket by bucket in the order of key, so that all calls lock buckets in one
-- order. Element n of keys, costs and idempotency_keys is the request with the number requests[n]. Rows come back
-- in the order of buckets.
--
-- The fast path, include/all_or_none.sql, is one statement. It decides when every bucket has a row, and covers all
-- its requests or fails even the cheapest. It reads all buckets before it takes from any, because a bucket that it
-- could not decide would have to be locked later, out of order. Its file lists what else makes it give up. Then it
-- is rolled back, and the ordered path decides. The rollback needs a subtransaction, which begins with every fast
-- path, also with one that succeeds. The fast path is not tried if the policy is unknown, if all requests for the
-- policy are equal and none has an idempotency key, or if a cost is not from 1 to 2147483646. It is not tried in a
-- read-only transaction either, where its update would fail also for requests that write nothing.
--
-- All answers of the fast path are as of one instant, read before its statement. They are accepted if they are less
-- than 100 ms old after the updates, or less than 1 ms for each request if that is longer. In the ordered path, a
-- denial is as old as the waits for later buckets, because all rows are returned at the end. A grant and a look-up
-- of an idempotency key are by the clock from before the waits for earlier buckets. Either way, times count from the
-- instant of the decision. So retry_after is never too short, but the tokens may be there sooner.
--
-- The ordered path goes through the steps of ratelimit_acquire, run by run. A run is equal requests without an
-- idempotency key that follow each other on one bucket; any other request is a run of its own. If the bucket covers
-- the whole run, one update takes for all of it. If the bucket covers a part, the update takes nothing, the bucket
-- is read, and a second update takes for the part. On a busy key, a run is often the whole call. Such a call skips
-- the fast path.
--
-- Locks and writes: as ratelimit_acquire_many.
create or replace function ratelimit.acquire_in_order(
    policy text, keys text[], costs bigint[], idempotency_keys text[], requests bigint[])
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean,
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan  -- no plan is better for some arguments than for others, and planning is slow
  set enable_seqscan = off    -- as in ratelimit_acquire
  set enable_hashjoin = off   -- nested loops alone keep the order of key, in which buckets are locked
  set enable_mergejoin = off  -- likewise
  set jit = off               -- the statements take less time than compiling them
as $$
declare
  {{ template "locals_of_decide" "" }}
  v_name            text collate "C" := acquire_in_order.policy;
  v_alike           boolean;      -- the whole call is one run
  v_stale_at        timestamptz;  -- an answer of the fast path is too old from here on
  v_answered        boolean;      -- the fast path returned the rows
  v_run             record;       -- key, cost, idempotency_key, and the numbers of its requests
  v_position        integer;      -- requests of the run that are answered
  v_count           integer;      -- requests that one pass of the loop over a run answers
  v_step            bigint;       -- microtokens between two grants of a pass; 0 when the pass takes nothing
  v_elapsed_us      numeric;      -- microseconds from v_refilled_at to v_now
begin
  v_now      := clock();
  v_stale_at := v_now + greatest(interval '100 milliseconds', cardinality(keys) * interval '1 millisecond');
  v_alike    := (idempotency_keys is null and keys[1] collate "C" = all (keys) and costs[1] = all (costs)) is true;
  select p.* into v_policy from policies as p where p.name = v_name;
  if found and not v_alike
     and 0 < all (costs) and 2147483647 > all (costs)  -- as integers their sums are bigint; sums of bigints are numeric, and slow
     and current_setting('transaction_read_only') = 'off' then  -- there an UPDATE fails even if it would take nothing
    begin
      if v_policy.durable and idempotency_keys is null then
        {{ template "include/all_or_none.sql" (dict "buckets" "buckets" "keys" "") }}
      elsif v_policy.durable then
        {{ template "include/all_or_none.sql" (dict "buckets" "buckets" "keys" "idempotency_keys") }}
      elsif idempotency_keys is null then
        {{ template "include/all_or_none.sql" (dict "buckets" "ephemeral_buckets" "keys" "") }}
      else
        {{ template "include/all_or_none.sql" (dict "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys") }}
      end if;
      if v_answered then
        return;
      end if;
      raise exception sqlstate 'RL000';  -- rolls back to the begin above; caught below, so no caller sees it
    exception when sqlstate 'RL000' or cardinality_violation then
      v_now := clock();  -- the fast path may have waited
    end;
  end if;

  -- The ordered path. starts marks a request that begins a run: it or the request before it has an idempotency key,
  -- or their costs differ. run counts the starts up to a request, and so numbers the runs of a bucket from 1. Run 0
  -- is requests at the beginning of a bucket whose cost is null; they are refused.
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
      v_wanted := case
        when v_cost between 1 and v_policy.capacity then
          microtokens(v_cost * least(cardinality(v_run.requests) - v_position, v_policy.capacity / v_cost))
        else 0
      end;
      v_round    := null;
      v_replayed := null;
      if v_policy.durable then
        {{ template "include/decide.sql" (dict "buckets" "buckets" "keys" "idempotency_keys" "newest" true) }}
      else
        {{ template "include/decide.sql" (dict "buckets" "ephemeral_buckets" "keys" "ephemeral_idempotency_keys" "newest" true) }}
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
        v_taken    := 0;
        v_level    := microtokens(v_first.remaining);
        v_retry_us := 0;
        v_reset_us := microseconds(v_first.reset_after)::bigint;
        capacity   := v_first.capacity;
      elsif v_taken > 0 then
        v_retry_us := 0;
      end if;
      allowed     := coalesce(v_retry_us = 0, false);
      retry_after := duration(v_retry_us);

      -- Each grant is answered with the level that it left. Requests that the bucket did not cover are left to
      -- the next pass, which takes for them or denies them all.
      v_step  := case when v_taken > 0 then microtokens(v_cost) else 0 end;
      v_count := case when v_step > 0 then (v_taken / v_step)::integer else cardinality(v_run.requests) - v_position end;
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
                           else {{ template "wait_below" (dict "target" "v_policy.full_level" "level" "l.level" "elapsed_us" "v_elapsed_us") }}
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
  'Decides the requests for one policy, and answers them in the order of their buckets.';

-- The fast path of requests about many buckets of one policy. It charges them in one lean statement, and
-- does not look first. Elements that it does not charge are left to decide_left.
--
-- Elements for the same bucket are summed: it charges a bucket that covers the sum, and so grants all its elements. It leaves
-- alone a bucket that covers less, one without a row, one with an element that is not about 1 to 2147483647 tokens, and one that
-- another session changed while the statement waited for it. Before 15.15
-- PostgreSQL rechecks the condition against the new version of the row, and charges that if it covers the sum; later releases
-- skip the row. Both are correct here.
--
-- While an old snapshot is held, the index keeps an entry for each page that has versions of a bucket's row. These entries are in the
-- order of the pages, and the newest version is nearly always on the last page. So the index is read backwards, up to the first
-- version that is visible. With key = ... the planner would drop the order by.
--
-- demands has the sums. If it is null, all elements of the batch are about this policy, and the update sums them, which costs less
-- than to pass sums. row_ids is parallel to demands, and has the row ids of the buckets if the caller knows them. A bucket that was
-- changed since is left alone, too. By now its row id may be that of another bucket, so the policy and the key are compared.
--
-- places is null if no bucket was charged, and capacities if all buckets have that of the policy.
--
-- Locks:  the bucket rows that it charges, and those that it has waited for, in the order of key. Under the settings of
--         acquire_batch the planner has no other choice: a row found by ctid is read on the inside of a nested loop, and the
--         outside comes sorted.
-- Writes: these rows.
create or replace function ratelimit.take_from_buckets(
    in  policy ratelimit.policies, in keys text[], in costs bigint[], in demands ratelimit.demand[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql volatile
as $$
declare
  v_policy     alias for policy;
  v_now        alias for now;
  v_tick_us    bigint := policy.tick_us::bigint;
  v_shared     ratelimit.charged[];  -- buckets of several elements
  v_bucket     ratelimit.charged;
  v_place      bigint;
  v_level      bigint;    -- the bucket after the element
  v_elapsed_us bigint;
begin
  -- 1. Quotas, overrides and large numbers go another way.
  if policy.special or policy.fill_ticks is null then
    if demands is null then
      demands := array(select row(a.*)::demand from demands_of_batch(keys, costs) as a);
    end if;
    if policy.kind = 'quota' then
      select t.* into places, remaining, reset_us, capacities from take_quotas_from_buckets(policy, costs, demands, row_ids, v_now) as t;
    else
      select t.* into places, remaining, reset_us, capacities from take_any_from_buckets(policy, costs, demands, row_ids, v_now) as t;
    end if;
    return;
  end if;

  -- 2. Charge. Most buckets cover by their stored level, which is cheaper to tell.
  if demands is null then
    with taken as (
      update buckets as b
         set level       = level_by_ticks(b.level, b.refilled_at, v_now, v_policy.rate_full, v_policy.rate_gain, v_policy.rate_per, v_policy.fill_ticks, v_tick_us) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
             room        = null
        from demands_of_batch(keys, costs) as u
       where b.ctid = (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1)
         and (least(b.level, v_policy.rate_full) >= u.wanted
           or b.level > v_policy.rate_floor
              and level_by_ticks(b.level, b.refilled_at, v_now, v_policy.rate_full, v_policy.rate_gain, v_policy.rate_per, v_policy.fill_ticks, v_tick_us) >= u.wanted)
      returning u.places, u.size, u.wanted, b.level, b.refilled_at
    )
    select array_agg(t.places[1]) filter (where t.size = 1), array_agg(t.level / 1000000) filter (where t.size = 1),
           array_agg(wait_by_ticks(v_policy.rate_full, t.level, case when t.refilled_at = v_now then 0 else microseconds(v_now - t.refilled_at)::bigint end,
                                      v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up, v_tick_us)) filter (where t.size = 1),
           array_agg(row(t.places, t.wanted, t.level, t.refilled_at)::charged) filter (where t.size > 1)
      into places, remaining, reset_us, v_shared
      from taken as t;
  else
    with taken as (
      update buckets as b
         set level       = level_by_ticks(b.level, b.refilled_at, v_now, v_policy.rate_full, v_policy.rate_gain, v_policy.rate_per, v_policy.fill_ticks, v_tick_us) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
             room        = null
        from unnest(demands, row_ids) as u (key, wanted, places, size, row_id)
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1))
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and (least(b.level, v_policy.rate_full) >= u.wanted
           or b.level > v_policy.rate_floor
              and level_by_ticks(b.level, b.refilled_at, v_now, v_policy.rate_full, v_policy.rate_gain, v_policy.rate_per, v_policy.fill_ticks, v_tick_us) >= u.wanted)
      returning u.places, u.size, u.wanted, b.level, b.refilled_at
    )
    select array_agg(t.places[1]) filter (where t.size = 1), array_agg(t.level / 1000000) filter (where t.size = 1),
           array_agg(wait_by_ticks(v_policy.rate_full, t.level, case when t.refilled_at = v_now then 0 else microseconds(v_now - t.refilled_at)::bigint end,
                                      v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up, v_tick_us)) filter (where t.size = 1),
           array_agg(row(t.places, t.wanted, t.level, t.refilled_at)::charged) filter (where t.size > 1)
      into places, remaining, reset_us, v_shared
      from taken as t;
  end if;

  -- 3. Elements that share a bucket are answered one after another.
  if v_shared is not null then
    foreach v_bucket in array v_shared loop
      v_level      := v_bucket.level + v_bucket.wanted;
      v_elapsed_us := microseconds(v_now - v_bucket.refilled_at)::bigint;
      foreach v_place in array v_bucket.places loop
        v_level   := v_level - microtokens(costs[v_place]);
        places    := places || v_place;
        remaining := remaining || v_level / 1000000;
        reset_us  := reset_us || wait_by_ticks(v_policy.rate_full, v_level, v_elapsed_us, v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up, v_tick_us);
      end loop;
    end loop;
  end if;
end;
$$;
comment on function ratelimit.take_from_buckets(ratelimit.policies, text[], bigint[], ratelimit.demand[], tid[], timestamptz) is
  'Charges the buckets of one policy that cover all that is asked of them, and answers their elements.';

-- As take_from_buckets, whatever the numbers of the policy and its overrides are; it costs more for a bucket. Nothing is
-- charged if the policy has changed since it was read: it and its overrides, which this reads, are as of one instant.
create or replace function ratelimit.take_any_from_buckets(
    in  policy ratelimit.policies, in costs bigint[], in demands ratelimit.demand[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  with taken as (
      update buckets as b
         set level       = refilled(b.level, b.refilled_at, v_now, u.p) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, (u.p).tick),
             room        = null
        from (select u.*, coalesce((u.n).policy, v_policy) as p, (u.n).ends_at, (u.n).after
                from (select u.*, (select numbers_by(v_policy, o, v_now) from overrides as o where o.policy_id = v_policy.id and o.key = u.key collate "C") as n
                        from unnest(demands, row_ids) as u (key, wanted, places, size, row_id)
                       where (select p = v_policy from policies as p where p.id = v_policy.id)
                      offset 0) as u
              offset 0) as u
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1))
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and (least(b.level, (u.p).capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, u.p) >= u.wanted)
      returning u.*, b.level, b.refilled_at
    )
    select array_agg(u.place), array_agg(whole_tokens(u.level)),
           array_agg(case
                       when u.ends_at is null then long_wait((u.p).full_level, u.level, microseconds(v_now - u.refilled_at), u.p)
                       else wait_past_end(null, u.level, u.refilled_at, v_now, u.p, u.ends_at, null, u.after)
                     end),
           array_agg((u.p).capacity)
      into places, remaining, reset_us, capacities
      from (select e.place, t.p, t.ends_at, t.after, t.refilled_at,
                   t.level + t.wanted - microtokens(sum(costs[e.place]::integer) over (partition by t.places[1] order by e.place)) as level
              from taken as t
             cross join lateral unnest(t.places) as e (place)) as u;
end;
$$;
comment on function ratelimit.take_any_from_buckets(ratelimit.policies, bigint[], ratelimit.demand[], tid[], timestamptz) is
  'Does what take_from_buckets does, for a policy with overrides or large numbers.';

-- For requests of several elements. row_ids is null if a bucket does not cover what is asked of it. That of a quota never does: its
-- stored level is minus the tokens used. contended is a guess that another session changes or locks a bucket: xmax is set, and is
-- not the lock of the transaction that wrote this row. A lock that was rolled back leaves it set, too.
create or replace function ratelimit.covered_in_buckets(
    in  policy ratelimit.policies, in demands ratelimit.demand[], in now timestamptz,
    out row_ids tid[], out contended boolean)
  language plpgsql stable
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  if v_policy.overridden then
    select case when bool_and(b.covers is true) then array_agg(b.ctid) end, bool_or(b.contended)
      into row_ids, contended
      from (select u.*, coalesce((select with_override(v_policy, o, v_now) from overrides as o
                                   where o.policy_id = v_policy.id and o.key = u.key collate "C"), v_policy) as p
              from unnest(demands) as u (key, wanted, places, size)
            offset 0) as u
      left join lateral (select b.ctid, b.xmax <> 0 and b.xmax <> b.xmin as contended,
                                least(b.level, (u.p).capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, u.p) >= u.wanted as covers
                           from buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on true;
  else
    select case when bool_and(b.covers is true) then array_agg(b.ctid) end, bool_or(b.contended)
      into row_ids, contended
      from unnest(demands) as u (key, wanted, places, size)
      left join lateral (select b.ctid, b.xmax <> 0 and b.xmax <> b.xmin as contended,
                                least(b.level, v_policy.capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, v_policy) >= u.wanted as covers
                           from buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on true;
  end if;
end;
$$;
comment on function ratelimit.covered_in_buckets(ratelimit.policies, ratelimit.demand[], timestamptz) is
  'The row ids of the buckets of one policy if all cover what is asked of them, and whether other sessions are at them.';

-- For requests of several elements, of which others may be waiting for the same bucket: the update would not charge a bucket that
-- it waited for. This waits first, and the update no longer needs to. The answer is null if a bucket has no row: one that is
-- created later would be locked after higher keys.
create or replace function ratelimit.lock_demanded_buckets(policy ratelimit.policies, demands ratelimit.demand[])
  returns tid[] language plpgsql volatile
as $$
declare
  v_policy  alias for policy;
  v_row_ids tid[];
begin
  select case when bool_and(b.ctid is not null) then array_agg(b.ctid) end
    into v_row_ids
    from unnest(demands) as u (key, wanted, places, size)
    left join lateral (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1
                           for update) as b on true;
  return v_row_ids;
end;
$$;
comment on function ratelimit.lock_demanded_buckets(ratelimit.policies, ratelimit.demand[]) is
  'Locks the buckets of one policy, in order, and answers with their row ids.';

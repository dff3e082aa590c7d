-- What ratelimit_peek answers about buckets of one policy that refills. places are the requests about it. The answer has those that
-- have no bad argument.
--
-- The functions run under the settings of ratelimit_peek_many. Locks and writes nothing.
create or replace function ratelimit.peeked_in_buckets(policy ratelimit.policies, keys text[], costs bigint[], places bigint[], now timestamptz)
  returns ratelimit.packed language plpgsql stable
as $$
declare
  v_policy     alias for policy;
  v_now        alias for now;
  v_tick       interval := policy.tick;  -- these, down to v_ticks, are the small numbers of arithmetic.sql
  v_tick_us    bigint   := policy.tick_us::bigint;
  v_full_level bigint   := policy.full_level::bigint;
  v_divisor    numeric  := gcd(policy.tick_gain, policy.every_us);
  v_gain       bigint   := div(policy.tick_gain, v_divisor)::bigint;
  v_per        bigint   := div(policy.every_us, v_divisor)::bigint;
  v_fill_ticks double precision := policy.full_level::double precision * v_per / nullif(v_gain, 0);
  v_ticks      bigint;
  v_seen       ratelimit.packed;
begin
  if v_policy.overridden
     or (policy.full_level::double precision * (2 * v_per + 1) + v_gain < 9e18 and (v_fill_ticks + 1) * v_tick_us < 4.7e14) is false then
    select array_agg(e.place), array_agg(case when e.level is null then (e.p).capacity else whole_tokens(refilled(e.level, e.refilled_at, v_now, e.p)) end),
           array_agg(case
                       when e.cost = 0 then 0::bigint
                       when ((e.p).calendar).ends_at is not null then wait_past_end(e.cost, e.level, e.refilled_at, v_now, e.p, v_policy)
                       when e.cost > (e.p).capacity then null
                       when e.level is null then 0::bigint
                       else wait_until(microtokens(e.cost), e.level, e.refilled_at, v_now, e.p)
                     end),
           array_agg(case
                       when ((e.p).calendar).ends_at is not null then wait_past_end(null, e.level, e.refilled_at, v_now, e.p, v_policy)
                       when e.level is null then 0::bigint
                       else wait_until((e.p).full_level, e.level, e.refilled_at, v_now, e.p)
                     end),
           array_agg((e.p).capacity)
      into v_seen.elements, v_seen.remaining, v_seen.retry_after_us, v_seen.reset_after_us, v_seen.capacity
      from (select u.*, b.level, b.refilled_at
              from (select u.*, coalesce((select with_override(v_policy, o) from overrides as o
                                           where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy) as p
                      from (select n.place, keys[n.place] as key, costs[n.place] as cost from unnest(places) as n (place)) as u
                     where acceptable(u.key, u.cost)
                    offset 0) as u
              left join lateral (select b.level, b.refilled_at
                                   from buckets as b
                                  where b.policy_id = v_policy.id
                                    and b.key      >= u.key collate "C"
                                    and b.key      <= u.key collate "C"
                                  order by b.key desc
                                  limit 1) as b on true
            offset 0) as e;
    return v_seen;
  end if;
  v_ticks := floor(2 * v_fill_ticks + 1)::bigint;
  select array_agg(e.place), array_agg(whole_tokens(e.level_now)),
         array_agg(case
                     when e.cost = 0 or e.cost <= v_policy.capacity and e.level_now >= microtokens(e.cost) then 0
                     when e.cost > v_policy.capacity then null
                     when e.level <= -v_full_level then wait_until(microtokens(e.cost), e.level, e.refilled_at, v_now, v_policy)
                     else wait_below_small(microtokens(e.cost), e.level, e.elapsed_us, v_gain, v_per, v_tick_us)
                   end),
         array_agg(case
                     when e.level_now >= v_full_level then 0
                     when e.level <= -v_full_level then wait_until(v_policy.full_level, e.level, e.refilled_at, v_now, v_policy)
                     else wait_below_small(v_full_level, e.level, e.elapsed_us, v_gain, v_per, v_tick_us)
                   end)
    into v_seen.elements, v_seen.remaining, v_seen.retry_after_us, v_seen.reset_after_us
    from (select u.*, b.level, b.refilled_at,
                 case
                   when v_now >= b.refilled_at then (date_part('epoch', v_now - b.refilled_at) * 1000000)::bigint
                   else microseconds(v_now - b.refilled_at)::bigint  -- the clock may be set back by centuries, which double precision does not count exactly
                 end as elapsed_us,
                 case
                   when b.level is null then v_full_level
                   when b.level <= -v_full_level then refilled(b.level, b.refilled_at, v_now, v_policy)
                   else refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick)
                 end as level_now
            from (select n.place, keys[n.place] as key, costs[n.place] as cost from unnest(places) as n (place)) as u
            left join lateral (select b.level, b.refilled_at
                                 from buckets as b
                                where b.policy_id = v_policy.id
                                  and b.key      >= u.key collate "C"
                                  and b.key      <= u.key collate "C"
                                order by b.key desc
                                limit 1) as b on true
           where acceptable(u.key, u.cost)
          offset 0) as e;
  v_seen.capacity := array_fill(v_policy.capacity, array[coalesce(cardinality(v_seen.elements), 0)]);
  return v_seen;
end;
$$;
comment on function ratelimit.peeked_in_buckets(ratelimit.policies, text[], bigint[], bigint[], timestamptz) is
  'What buckets of one policy hold, and whether they cover the costs of requests.';

-- The denials of a batch that one read shows: of single requests without an idempotency key, about the buckets of one policy.
-- A bucket that does not cover the least of what is asked of it denies all of it, and is read once for that. A bucket that covers
-- something is left to decide_in_order, and so is one without a row, and one with an element that is not about 1 to 2147483647 tokens.
--
-- places are the elements to look at, of all policies. The answer has the elements that are denied.
--
-- Locks and writes nothing.
create or replace function ratelimit.denied_in_buckets(
    policy ratelimit.policies, policies text[], keys text[], costs bigint[], places bigint[], now timestamptz)
  returns ratelimit.packed language plpgsql stable
as $$
declare
  v_policy     alias for policy;
  v_now        alias for now;
  v_tick_us    bigint := policy.tick_us::bigint;
  v_denied     ratelimit.packed;
begin
  if policy.special or policy.fill_ticks is null then
    return denied_in_any_buckets(v_policy, policies, keys, costs, places, v_now);
  end if;

  select array_agg(e.place), array_agg(e.remaining),
         array_agg(case
                     when e.cost = e.smallest then e.retry_us
                     when e.cost <= v_policy.capacity then wait_by_ticks(microtokens(e.cost), e.level, e.elapsed_us, v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up, v_tick_us)
                   end),
         array_agg(e.reset_us)
    into v_denied.elements, v_denied.remaining, v_denied.retry_after_us, v_denied.reset_after_us
    from (select unnest(d.elements) as place, unnest(d.charges) as cost, d.*
            from (select b.*, whole_tokens(b.level_now) as remaining,
                         case
                           when b.smallest <= v_policy.capacity then wait_by_ticks(microtokens(b.smallest), b.level, b.elapsed_us, v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up, v_tick_us)
                         end as retry_us,
                         case
                           when b.level_now < v_policy.rate_full then wait_by_ticks(v_policy.rate_full, b.level, b.elapsed_us, v_policy.rate_gain, v_policy.rate_per, v_policy.rate_up, v_tick_us)
                           else 0
                         end as reset_us
                    from (select u.*, b.level, microseconds(v_now - b.refilled_at)::bigint as elapsed_us,
                                 level_by_ticks(b.level, b.refilled_at, v_now, v_policy.rate_full, v_policy.rate_gain, v_policy.rate_per, v_policy.fill_ticks, v_tick_us) as level_now
                            from demands_of_places(v_policy.name, policies, keys, costs, places) as u
                           cross join lateral (select b.level, b.refilled_at
                                                 from buckets as b
                                                where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b
                          offset 0) as b
                   where b.smallest > 0
                     and b.level > v_policy.rate_floor
                     and b.level_now < microtokens(b.smallest)
                  offset 0) as d) as e;
  v_denied.capacity := array_fill(v_policy.capacity, array[coalesce(cardinality(v_denied.elements), 0)]);
  return v_denied;
end;
$$;
comment on function ratelimit.denied_in_buckets(ratelimit.policies, text[], text[], bigint[], bigint[], timestamptz) is
  'The single requests of a batch that the buckets of one policy plainly deny.';

-- As denied_in_buckets, whatever the numbers of the policy and its overrides are; it costs more for a bucket.
create or replace function ratelimit.denied_in_any_buckets(
    policy ratelimit.policies, policies text[], keys text[], costs bigint[], places bigint[], now timestamptz)
  returns ratelimit.packed language plpgsql stable
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_denied ratelimit.packed;
begin
  select array_agg(e.place), array_agg(whole_tokens(e.level_now)),
         array_agg(case
                     when e.ends_at is not null then wait_past_end(e.cost, e.level, e.refilled_at, v_now, e.p, e.ends_at, null, e.after)
                     when e.cost <= (e.p).capacity then wait_until(microtokens(e.cost), e.level, e.refilled_at, v_now, e.p)
                   end),
         array_agg(case
                     when e.ends_at is null then wait_until((e.p).full_level, e.level, e.refilled_at, v_now, e.p)
                     else wait_past_end(null, e.level, e.refilled_at, v_now, e.p, e.ends_at, null, e.after)
                   end),
         array_agg((e.p).capacity)
    into v_denied.elements, v_denied.remaining, v_denied.retry_after_us, v_denied.reset_after_us, v_denied.capacity
    from (select unnest(b.elements) as place, unnest(b.charges) as cost, b.*
            from (select u.*, b.level, b.refilled_at, refilled(b.level, b.refilled_at, v_now, u.p) as level_now
                    from (select u.*, coalesce((u.n).policy, v_policy) as p, (u.n).ends_at, (u.n).after
                            from (select u.*, (select numbers_by(v_policy, o, v_now) from overrides as o where o.policy_id = v_policy.id and o.key = u.key collate "C") as n
                                    from demands_of_places(v_policy.name, policies, keys, costs, places) as u
                                  offset 0) as u
                          offset 0) as u
                   cross join lateral (select b.level, b.refilled_at
                                         from buckets as b
                                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b
                  offset 0) as b
           where b.smallest > 0
             and b.level_now < microtokens(b.smallest)
          offset 0) as e;
  return v_denied;
end;
$$;
comment on function ratelimit.denied_in_any_buckets(ratelimit.policies, text[], text[], bigint[], bigint[], timestamptz) is
  'Does what denied_in_buckets does, for a policy with overrides or large numbers.';

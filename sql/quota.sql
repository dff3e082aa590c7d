-- Takes from the bucket of a quota, for ratelimit_acquire, ratelimit_reserve and ratelimit_acquire_up_to: the whole tokens that there are, up to
-- at_most, or none if there are fewer than at_least. The steps are those of ratelimit_acquire_up_to; with a history it closes periods, too.
-- A period that has not begun lends nothing, so to reserve is to acquire. calendar.sql says what the level of a row is.
create or replace function ratelimit.take_quota_of_buckets(
    policy ratelimit.policies, key text, at_most bigint, at_least bigint, idempotency_key text)
  returns ratelimit.partial_decision language plpgsql volatile
as $$
declare
  v_key             text collate "C" := key;
  v_idempotency_key text collate "C" := idempotency_key;
  v_now             timestamptz := clock();
  v_capacity        bigint;                        -- that applies to the key
  v_ends_at         timestamptz;                   -- when a part of its override ends; null: none does
  v_turns           ratelimit.turns;
  v_quota           ratelimit.policies;            -- with the numbers of the key, once the bucket was looked at
  v_numbers         ratelimit.numbers;
  v_taken           bigint := at_most;
  v_wanted          bigint;
  v_level           bigint;       -- as the row has it
  v_refilled_at     timestamptz;  -- when the row was written
  v_held            bigint;       -- microtokens in the bucket
  v_retry_us        bigint;
  v_reset_us        bigint;
  v_has_row         boolean;      -- a bucket without a row is full
  v_first           ratelimit.idempotency_keys;
  v_rounds          integer;
  v_override        ratelimit.overrides;
begin
  if policy.overridden then
    v_override := o from overrides as o where o.policy_id = policy.id and o.key = v_key;
  end if;
  if v_override.key is null then
    v_capacity := policy.capacity;
    v_turns    := turning(policy.period, policy.months, policy.time_zone, policy.anchor, v_now);
  else
    v_ends_at  := case when v_override.expires_at > v_now then v_override.expires_at end;
    v_capacity := coalesce(case when v_ends_at is not null then v_override.ending_capacity end, v_override.capacity, policy.capacity);
    v_turns    := turning(policy.period, policy.months, coalesce(v_override.time_zone, policy.time_zone), coalesce(v_override.anchor, policy.anchor), v_now);
  end if;

  -- 1. The idempotency key.
  if v_idempotency_key is not null then
    if (at_most > 0 and is_name(v_idempotency_key)) is not true then
      perform check_request(policy.name, v_key, at_most, v_idempotency_key);  -- raises 22023
      v_idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
    v_first := k from idempotency_keys as k
                where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
    if v_first.expires_at > v_now then
      return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
    end if;
  end if;

  loop
    -- 2. The update. A period that is over and has a history is closed first, by step 3b.
    if v_taken between 1 and v_capacity and current_setting('transaction_read_only') = 'off' then
      v_wanted := microtokens(v_taken);
      if policy.history is null then
        update buckets as b
           set level       = used_level(b.level, b.refilled_at, v_turns.turned_at) - v_wanted,
               refilled_at = greatest(b.refilled_at, v_now),
               room        = null
         where b.policy_id = policy.id
           and b.key       = v_key
           and used_level(b.level, b.refilled_at, v_turns.turned_at) >= v_wanted - microtokens(v_capacity)
           and (v_taken = at_most or b.level = v_level and b.refilled_at = v_refilled_at)  -- fewer only from the bucket as it was read
        returning b.level, b.refilled_at into v_level, v_refilled_at;
      else
        update buckets as b
           set level       = b.level - v_wanted,
               refilled_at = greatest(b.refilled_at, v_now),
               room        = null
         where b.policy_id    = policy.id
           and b.key          = v_key
           and b.refilled_at >= v_turns.turned_at
           and b.level       >= v_wanted - microtokens(v_capacity)
           and (v_taken = at_most or b.level = v_level and b.refilled_at = v_refilled_at)
        returning b.level, b.refilled_at into v_level, v_refilled_at;
      end if;
      exit when found;
    end if;

    -- 3. The bucket, as of now: the update may have waited.
    v_now      := clock();
    policy     := policy_now(policy);
    v_numbers  := numbers_of_key(policy, v_key, v_now);
    v_quota    := v_numbers.policy;
    v_capacity := v_quota.capacity;
    v_ends_at  := v_numbers.ends_at;
    v_turns    := v_numbers.turns;
    select b.level, b.refilled_at into v_level, v_refilled_at
      from buckets as b
     where b.policy_id = policy.id
       and b.key       = v_key;
    v_has_row := found;
    v_held    := microtokens(v_capacity) + coalesce(used_level(v_level, v_refilled_at, v_turns.turned_at), 0);
    v_taken   := least(at_most, whole_tokens(v_held));

    -- 3a. Too few tokens.
    if at_most = 0 or v_taken < at_least then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, v_ends_at, v_turns, v_numbers.after);
      v_retry_us := case
                      when at_most = 0 then 0
                      when v_ends_at is not null then wait_past_end(at_least, v_level, v_refilled_at, v_now, v_quota, v_ends_at, v_turns, v_numbers.after)
                      when at_least <= v_capacity then v_reset_us  -- the next turn
                    end;
      if v_idempotency_key is not null then
        v_first := k from idempotency_keys as k
                    where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
        end if;
      end if;
      if policy.shadow and at_most > 0 then
        return (true, whole_tokens(v_held), interval '0', duration(v_reset_us), v_capacity, false, true, at_most)::partial_decision;
      end if;
      return (coalesce(v_retry_us = 0, false), whole_tokens(v_held), duration(v_retry_us), duration(v_reset_us), v_capacity, false, false, 0)::partial_decision;
    end if;

    -- 3b. A period to close, or no row. The insert may wait for a session that creates the same one.
    if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
    if policy.history is not null and v_refilled_at < v_turns.turned_at then
      perform close_period(policy.id, v_key, v_now);
      v_level       := 0;  -- as closed
      v_refilled_at := v_now;
    elsif not v_has_row then
      v_wanted      := microtokens(v_taken);
      v_level       := -v_wanted;
      v_refilled_at := v_now;
      insert into buckets (policy_id, key, level, refilled_at, due_at, counts_from)
      values (policy.id, v_key, v_level, v_refilled_at, v_turns.turns_at, case when policy.history is not null then v_turns.turned_at end)
      on conflict on constraint buckets_pkey do nothing;
      exit when found;
    end if;

    -- Again. Each round but the first is due to another session.
    v_rounds := next_round(v_rounds, policy.name, v_key);  -- raises 40001
  end loop;
  if v_refilled_at = v_now and (v_turns.turns_at < v_ends_at) is not false then
    v_reset_us := least(microseconds(v_turns.turns_at - v_now), longest_wait())::bigint;
  else
    if v_has_row is null then
      v_quota := case when v_override.key is null then policy else with_override(policy, v_override, v_now) end;
      v_numbers.after := with_override(policy, v_override, 'infinity');
    end if;
    v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, v_ends_at, v_turns, v_numbers.after);
  end if;
  v_held := microtokens(v_capacity) + v_level;

  -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
  if v_idempotency_key is not null then
    insert into idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    values (policy.id, v_key, v_idempotency_key, v_taken,
            tokens_above_debt(v_held), duration(v_reset_us), v_capacity, v_now + duration(policy.remember_us), v_now)
    on conflict on constraint idempotency_keys_pkey do update
           set (cost, remaining, reset_after, capacity, expires_at, ready_at, settled, taken, granted_at)
             = (excluded.cost, excluded.remaining, excluded.reset_after, excluded.capacity, excluded.expires_at, excluded.ready_at,
                excluded.settled, excluded.taken, excluded.granted_at)
         where k.expires_at <= v_now;
    if not found then
      update buckets as b
         set level = b.level + v_wanted
       where b.policy_id = policy.id
         and b.key       = v_key;
      v_first := k from idempotency_keys as k
                  where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
    end if;
  end if;
  return (true, tokens_above_debt(v_held), interval '0', duration(v_reset_us), v_capacity, false, false,
          case when policy.shadow then at_most else v_taken end)::partial_decision;  -- as grant_of and partial_of
end;
$$;
comment on function ratelimit.take_quota_of_buckets(ratelimit.policies, text, bigint, bigint, text) is
  'The steps of ratelimit_acquire, ratelimit_reserve and ratelimit_acquire_up_to for a quota.';

-- Does what take_from_buckets does, for a quota. With a history it closes the periods that are over, as usage.sql describes.
create or replace function ratelimit.take_quotas_from_buckets(
    in  policy ratelimit.policies, in costs bigint[], in demands ratelimit.demand[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_turns  ratelimit.turns := turns_of(policy, now);
begin
  if policy.history is not null then
    with taken as (
      update buckets as b
         set level       = case when u.is_over then 0 else b.level end - u.wanted,
             refilled_at = greatest(b.refilled_at, v_now),
             counts_from = case when u.is_over then (u.turns).turned_at else b.counts_from end,
             room        = null
        from (select u.key, u.wanted, u.places, u.p, u.ends_at, u.after, u.turns, r.ctid as seen, r.level as seen_level, r.refilled_at as seen_at,
                     r.counts_from as seen_from, r.refilled_at < (u.turns).turned_at as is_over
                from (select u.key, u.wanted, u.places, coalesce((u.n).policy, v_policy) as p, (u.n).ends_at, (u.n).after,
                             coalesce((u.n).turns, v_turns) as turns
                        from (select u.*, case when v_policy.overridden then numbers_of_key(v_policy, u.key, v_now) end as n
                                from unnest(demands) as u (key, wanted, places, size)
                               where (select p = v_policy from policies as p where p.id = v_policy.id)
                              offset 0) as u
                      offset 0) as u
               cross join lateral (select b.ctid, b.level, b.refilled_at, b.counts_from
                                     from buckets as b
                                    where b.policy_id = v_policy.id
                                      and b.key      >= u.key collate "C"
                                      and b.key      <= u.key collate "C"
                                    order by b.key desc
                                    limit 1) as r
              offset 0) as u
       where b.ctid = u.seen
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key
         and case
               when u.is_over then b.level = u.seen_level and b.refilled_at = u.seen_at and microtokens((u.p).capacity) >= u.wanted
               else b.level >= u.wanted - microtokens((u.p).capacity)
             end
      returning u.key, u.wanted, u.places, u.p, u.ends_at, u.after, u.turns, u.seen_level, u.seen_at, u.seen_from, u.is_over, b.level, b.refilled_at
    ), closed as (
      insert into usage as c (policy_id, key, began, ended, expires_at, used)
      select v_policy.id, t.key, t.began, t.ended, kept_until(t.ended, t.p), t.used
        from (select t.key, t.p, period_began(t.seen_from, t.turns, t.last) as began, greatest((t.turns).turns_at, (t.last).ended) as ended,
                     -t.seen_level / 1000000 as used
                from (select t.key, t.p, t.seen_from, t.seen_level, turns_of(t.p, t.seen_at) as turns,
                             (select u from usage as u where u.policy_id = v_policy.id and u.key = t.key order by u.began desc limit 1) as last
                        from taken as t
                       where t.is_over and t.seen_level < 0 and v_policy.history <> interval '0'
                      offset 0) as t
              offset 0) as t
      on conflict on constraint usage_pkey do update set used = c.used + excluded.used
    )
    select array_agg(u.place), array_agg(whole_tokens(microtokens((u.p).capacity) + u.level)),
           array_agg(wait_past_end(null, u.level, u.refilled_at, v_now, u.p, u.ends_at, u.turns, u.after)),
           array_agg((u.p).capacity)
      into places, remaining, reset_us, capacities
      from (select e.place, t.p, t.ends_at, t.after, t.turns, t.refilled_at,
                   t.level + t.wanted - microtokens(sum(costs[e.place]::integer) over (partition by t.places[1] order by e.place)) as level
              from taken as t
             cross join lateral unnest(t.places) as e (place)) as u;
    return;
  end if;
  with taken as (
      update buckets as b
         set level       = used_level(b.level, b.refilled_at, (u.turns).turned_at) - u.wanted,
             refilled_at = greatest(b.refilled_at, v_now),
             room        = null
        from (select u.*, coalesce((u.n).policy, v_policy) as p, (u.n).ends_at, (u.n).after, coalesce((u.n).turns, v_turns) as turns
                from (select u.*, case when v_policy.overridden then numbers_of_key(v_policy, u.key, v_now) end as n
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
         and used_level(b.level, b.refilled_at, (u.turns).turned_at) >= u.wanted - microtokens((u.p).capacity)
      returning u.*, b.level, b.refilled_at
    )
    select array_agg(u.place), array_agg(whole_tokens(microtokens((u.p).capacity) + u.level)),
           array_agg(wait_past_end(null, u.level, u.refilled_at, v_now, u.p, u.ends_at, u.turns, u.after)),
           array_agg((u.p).capacity)
      into places, remaining, reset_us, capacities
      from (select e.place, t.p, t.ends_at, t.after, t.turns, t.refilled_at,
                   t.level + t.wanted - microtokens(sum(costs[e.place]::integer) over (partition by t.places[1] order by e.place)) as level
              from taken as t
             cross join lateral unnest(t.places) as e (place)) as u;
end;
$$;
comment on function ratelimit.take_quotas_from_buckets(ratelimit.policies, bigint[], ratelimit.demand[], tid[], timestamptz) is
  'Charges the buckets of one quota that cover all that is asked of them, and answers their elements.';

create or replace function ratelimit.refund_quota_of_buckets(policy ratelimit.policies, key text, amount bigint)
  returns ratelimit.decision language plpgsql volatile
as $$
declare
  v_key         text collate "C" := key;
  v_now         timestamptz := clock();
  v_numbers     ratelimit.numbers  := numbers_of_key(policy, v_key, v_now);
  v_quota       ratelimit.policies := v_numbers.policy;
  v_turns       ratelimit.turns    := v_numbers.turns;
  v_given       bigint := microtokens(least(amount, 9000000000000));  -- more may be used than the capacity is by now
  v_level       bigint;
  v_refilled_at timestamptz;
  v_reset_us    bigint;
  v_turned_at   timestamptz;  -- with a history: when the period began that runs
begin
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  if v_quota.history is not null then
    v_turned_at := close_period(policy.id, v_key, v_now);
  end if;
  update buckets as b
     set level       = least(used_level(b.level, b.refilled_at, v_turns.turned_at), -v_given) + v_given,
         refilled_at = greatest(b.refilled_at, v_now),
         room        = null,
         due_at      = least(b.due_at, v_now)  -- as in ratelimit_refund
   where b.policy_id = policy.id
     and b.key       = v_key
     and (b.refilled_at < v_turned_at) is not true
  returning b.level, b.refilled_at into v_level, v_refilled_at;
  v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, v_numbers.ends_at, v_turns, v_numbers.after);
  return answer_of(microtokens(v_quota.capacity) + coalesce(v_level, 0), 0, v_reset_us, v_quota.capacity);
end;
$$;
comment on function ratelimit.refund_quota_of_buckets(ratelimit.policies, text, bigint) is
  'The steps of ratelimit_refund for a quota.';

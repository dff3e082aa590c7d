-- The functions of which the text is that of another one. Generated from the other files, which have the reasons: make psql.
--
-- First what the functions about durable policies do, on the unlogged tables of ephemeral ones. Then ratelimit_acquire and ratelimit_peek
-- for functions of this package, which do not depend on the schema of the public ones.

create or replace function ratelimit.take_quota_of_ephemeral_buckets(
    policy ratelimit.policies, key text, at_most bigint, at_least bigint, idempotency_key text)
  returns ratelimit.partial_decision language plpgsql volatile
as $$
declare
  v_key             text collate "C" := key;
  v_idempotency_key text collate "C" := idempotency_key;
  v_now             timestamptz := clock();
  v_capacity        bigint;              -- these two apply to the key
  v_calendar        ratelimit.calendar;
  v_quota           ratelimit.policies;  -- with the numbers of the key, once the bucket was looked at
  v_taken           bigint := at_most;
  v_wanted          bigint;
  v_level           bigint;       -- as the row has it
  v_refilled_at     timestamptz;  -- when the row was written
  v_held            bigint;       -- microtokens in the bucket
  v_retry_us        bigint;
  v_reset_us        bigint;
  v_has_row         boolean;      -- a bucket without a row is full
  v_first           ratelimit.idempotency_keys;
  v_answer          ratelimit.decision;
  v_rounds          integer;
  v_override        ratelimit.overrides;
begin
  if (policy.calendar).overridden then
    select o.* into v_override from overrides as o where o.policy_id = policy.id and o.key = v_key and o.expires_at > v_now;
  end if;
  if v_override.key is null then
    v_capacity := policy.capacity;
    v_calendar := turning(policy.calendar, v_now);
  else
    v_capacity := v_override.capacity;
    v_calendar := turning(with_calendar(policy.calendar, v_override.calendar, v_override.expires_at), v_now);
  end if;

  -- 1. The idempotency key.
  if v_idempotency_key is not null then
    select k.* into v_first
      from ephemeral_idempotency_keys as k
     where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
    if v_first.expires_at > v_now then
      return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
    end if;
  end if;

  loop
    -- 2. The update.
    if v_taken between 1 and v_capacity then
      v_wanted := microtokens(v_taken);
      update ephemeral_buckets as b
         set level       = used_level(b.level, b.refilled_at, v_calendar.turned_at) - v_wanted,
             refilled_at = greatest(b.refilled_at, v_now),
             room        = null
       where b.policy_id = policy.id
         and b.key       = v_key
         and used_level(b.level, b.refilled_at, v_calendar.turned_at) >= v_wanted - microtokens(v_capacity)
         and (v_taken = at_most or b.level = v_level and b.refilled_at = v_refilled_at)  -- fewer only from the bucket as it was read
      returning b.level, b.refilled_at into v_level, v_refilled_at;
      exit when found;
    end if;

    -- 3. The bucket, as of now: the update may have waited.
    v_now      := clock();
    policy     := own_numbers(policy);
    v_quota    := quota_of_key(policy, v_key, v_now);
    v_capacity := v_quota.capacity;
    v_calendar := v_quota.calendar;
    select b.level, b.refilled_at into v_level, v_refilled_at
      from ephemeral_buckets as b
     where b.policy_id = policy.id
       and b.key       = v_key;
    v_has_row := found;
    v_held    := microtokens(v_capacity) + coalesce(used_level(v_level, v_refilled_at, v_calendar.turned_at), 0);
    v_taken   := least(at_most, whole_tokens(v_held));

    -- 3a. Too few tokens.
    if at_most = 0 or v_taken < at_least then
      v_retry_us := case when at_most = 0 then 0
                         else wait_past_end(at_least, v_level, v_refilled_at, v_now, v_quota, policy) end;
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, policy);
      if v_idempotency_key is not null then
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
        end if;
      end if;
      if policy.shadow and at_most > 0 then
        v_answer := shadow_of(v_held, v_reset_us, v_capacity);
        return partial_of(v_answer, at_most);
      end if;
      v_answer := answer_of(v_held, v_retry_us, v_reset_us, v_capacity);
      return partial_of(v_answer, 0);
    end if;

    -- 3b. No row. The insert may wait for a session that creates the same one.
    if not v_has_row then
      v_wanted      := microtokens(v_taken);
      v_level       := -v_wanted;
      v_refilled_at := v_now;
      insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
      values (policy.id, v_key, v_level, v_refilled_at, v_calendar.turns_at)
      on conflict on constraint ephemeral_buckets_pkey do nothing;
      exit when found;
    end if;

    -- Again. Each round but the first is due to another session.
    v_rounds := coalesce(v_rounds, 0) + 1;
    if v_rounds = 1000 then
      perform too_many_rounds(policy.name, v_key);  -- raises 40001
    end if;
  end loop;
  if v_refilled_at = v_now and v_calendar.turns_at < v_calendar.ends_at then
    v_reset_us := microseconds(v_calendar.turns_at - v_now)::bigint;
  else
    if v_has_row is null then
      v_quota := case when v_override.key is null then policy else with_override(policy, v_override) end;
    end if;
    v_quota.calendar := v_calendar;
    v_reset_us       := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, policy);
  end if;
  v_held := microtokens(v_capacity) + v_level;

  -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
  if v_idempotency_key is not null then
    insert into ephemeral_idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    values (policy.id, v_key, v_idempotency_key, v_taken,
            tokens_above_debt(v_held), duration(v_reset_us), v_capacity, v_now + duration(policy.remember_us), v_now)
    on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
    if not found then
      update ephemeral_buckets as b
         set level = b.level + v_wanted
       where b.policy_id = policy.id
         and b.key       = v_key;
      select k.* into v_first
        from ephemeral_idempotency_keys as k
       where k.policy_id = policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      return replayed_partial(v_first, at_least, at_most, v_now, policy.shadow);
    end if;
  end if;
  return (true, tokens_above_debt(v_held), interval '0', duration(v_reset_us), v_capacity, false, false,
          case when policy.shadow then at_most else v_taken end)::partial_decision;  -- as grant_of and partial_of
end;
$$;
comment on function ratelimit.take_quota_of_ephemeral_buckets(ratelimit.policies, text, bigint, bigint, text) is
  'The steps of ratelimit_acquire, ratelimit_reserve and ratelimit_acquire_up_to for a quota.';

create or replace function ratelimit.take_quotas_from_ephemeral_buckets(
    in  policy ratelimit.policies, in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_quota  ratelimit.policies := policy;
begin
  v_quota.calendar := turning(policy.calendar, v_now);
  with taken as (
      update ephemeral_buckets as b
         set level       = used_level(b.level, b.refilled_at, ((u.p).calendar).turned_at) - u.wanted,
             refilled_at = greatest(b.refilled_at, v_now),
             room        = null
        from (select u.*, case when (v_policy.calendar).overridden then quota_of_key(v_policy, u.key, v_now) else v_quota end as p
                from unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
               where (select p = v_policy from policies as p where p.id = v_policy.id)
              offset 0) as u
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1))
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and used_level(b.level, b.refilled_at, ((u.p).calendar).turned_at) >= u.wanted - microtokens((u.p).capacity)
      returning u.*, b.level, b.refilled_at
    )
    select array_agg(u.place), array_agg(whole_tokens(microtokens((u.p).capacity) + u.level)),
           array_agg(wait_past_end(null, u.level, u.refilled_at, v_now, u.p, v_policy)),
           array_agg((u.p).capacity)
      into places, remaining, reset_us, capacities
      from (select e.place, t.p, t.refilled_at,
                   t.level + t.wanted - microtokens(sum(costs[e.place]::integer) over (partition by t.places[1] order by e.place)) as level
              from taken as t
             cross join lateral unnest(t.places) as e (place)) as u;
end;
$$;
comment on function ratelimit.take_quotas_from_ephemeral_buckets(ratelimit.policies, bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Charges the buckets of one quota that cover all that is asked of them, and answers their elements.';

create or replace function ratelimit.refund_quota_of_ephemeral_buckets(policy ratelimit.policies, key text, amount bigint)
  returns ratelimit.decision language plpgsql volatile
as $$
declare
  v_key         text collate "C" := key;
  v_now         timestamptz := clock();
  v_quota       ratelimit.policies := quota_of_key(policy, v_key, v_now);
  v_given       bigint := microtokens(least(amount, 9000000000000));  -- more may be used than the capacity is by now
  v_level       bigint;
  v_refilled_at timestamptz;
  v_reset_us    bigint;
begin
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  update ephemeral_buckets as b
     set level       = least(used_level(b.level, b.refilled_at, (v_quota.calendar).turned_at), -v_given) + v_given,
         refilled_at = greatest(b.refilled_at, v_now),
         room        = null,
         due_at      = least(b.due_at, v_now)  -- as in ratelimit_refund
   where b.policy_id = policy.id
     and b.key       = v_key
  returning b.level, b.refilled_at into v_level, v_refilled_at;
  v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_quota, policy);
  return answer_of(microtokens(v_quota.capacity) + coalesce(v_level, 0), 0, v_reset_us, v_quota.capacity);
end;
$$;
comment on function ratelimit.refund_quota_of_ephemeral_buckets(ratelimit.policies, text, bigint) is
  'The steps of ratelimit_refund for a quota.';

create or replace function ratelimit.look_at_ephemeral_slots(
    in policy ratelimit.policies, in key text, in now timestamptz, in cost bigint, in holder text,
    out capacity bigint, out lease interval, out held bigint, out retry_us bigint, out reset_us bigint, out holds boolean, out shadow boolean)
  language plpgsql stable
as $$
declare
  v_key          text collate "C" := key;
  v_now          alias for now;
  v_cost         alias for cost;
  v_holder       text collate "C" := holder;  -- null: nobody is asked for
  v_numbers      ratelimit.policies := numbers_again(policy, key, now);
  v_ends_at      timestamptz;  -- of the override; null if it has no end
  v_own_capacity bigint;       -- from then on
  v_last         timestamptz;
  v_first        timestamptz;
begin
  capacity := v_numbers.capacity;
  lease    := (v_numbers.calendar).lease;
  shadow   := v_numbers.shadow;
  if isfinite((v_numbers.calendar).ends_at) then
    v_ends_at      := (v_numbers.calendar).ends_at;
    v_own_capacity := (own_numbers(v_numbers)).capacity;
  end if;
  select coalesce(sum(l.cost), 0), max(l.ends_at), coalesce(bool_or(l.holder = v_holder), false)
    into held, v_last, holds
    from ephemeral_leases as l
   where l.policy_id = policy.id and l.key = v_key and l.ends_at > v_now;
  reset_us := coalesce(microseconds(v_last - v_now), 0)::bigint;
  if v_cost = 0 or v_cost <= capacity - held then
    retry_us := 0;
    return;
  end if;
  select min(u.at)
    into v_first
    from (select e.at, coalesce(sum(e.cost) over (order by e.at desc groups between unbounded preceding and 1 preceding), 0) as held
            from (select l.ends_at, l.cost
                    from ephemeral_leases as l
                   where l.policy_id = policy.id and l.key = v_key and l.ends_at > v_now
                  union all
                  select v_ends_at, 0 where v_ends_at is not null) as e (at, cost)) as u
   where v_cost <= case when u.at >= v_ends_at then v_own_capacity else look_at_ephemeral_slots.capacity end - u.held;
  if v_first is not null then
    retry_us := least(microseconds(v_first - v_now), longest_wait())::bigint;
  end if;
end;
$$;
comment on function ratelimit.look_at_ephemeral_slots(ratelimit.policies, text, timestamptz, bigint, text) is
  'The capacity and the lease that apply to a key of slots, what is held of it and whether by a holder, and the waits for a cost and until nobody holds.';

create or replace function ratelimit.take_from_ephemeral_buckets(
    in  policy ratelimit.policies, in keys text[], in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql volatile
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
  v_shared     ratelimit.charged[];  -- buckets of several elements
  v_bucket     ratelimit.charged;
  v_place      bigint;
  v_level      bigint;    -- the bucket after the element
  v_elapsed_us bigint;
begin
  -- 1. Are the numbers small?
  if policy.overridden
     or (policy.full_level::double precision * (2 * v_per + 1) + v_gain < 9e18 and (v_fill_ticks + 1) * v_tick_us < 4.7e14) is false then
    if asked is null then
      asked := array(select row(a.*)::asked from asked_of(keys, costs) as a);
    end if;
    if (policy.calendar).period is not null then
      select t.* into places, remaining, reset_us, capacities from take_quotas_from_ephemeral_buckets(policy, costs, asked, row_ids, v_now) as t;
    else
      select t.* into places, remaining, reset_us, capacities from take_any_from_ephemeral_buckets(policy, costs, asked, row_ids, v_now) as t;
    end if;
    return;
  end if;
  v_ticks := floor(2 * v_fill_ticks + 1)::bigint;

  -- 2. Charge. Most buckets cover by their stored level, which is cheaper to tell.
  if asked is null then
    with taken as (
      update ephemeral_buckets as b
         set level       = refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, v_tick),
             room        = null
        from asked_of(keys, costs) as u
       where b.ctid = (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1)
         and (least(b.level, v_full_level) >= u.wanted
           or b.level > -v_full_level
              and refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) >= u.wanted)
      returning u.places, u.size, u.wanted, b.level, b.refilled_at
    )
    select array_agg(t.places[1]) filter (where t.size = 1), array_agg(t.level / 1000000) filter (where t.size = 1),
           array_agg(wait_below_small(v_full_level, t.level, case when t.refilled_at = v_now then 0 else microseconds(v_now - t.refilled_at)::bigint end,
                                      v_gain, v_per, v_tick_us)) filter (where t.size = 1),
           array_agg(row(t.places, t.wanted, t.level, t.refilled_at)::charged) filter (where t.size > 1)
      into places, remaining, reset_us, v_shared
      from taken as t;
  else
    with taken as (
      update ephemeral_buckets as b
         set level       = refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, v_tick),
             room        = null
        from unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1))
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and (least(b.level, v_full_level) >= u.wanted
           or b.level > -v_full_level
              and refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) >= u.wanted)
      returning u.places, u.size, u.wanted, b.level, b.refilled_at
    )
    select array_agg(t.places[1]) filter (where t.size = 1), array_agg(t.level / 1000000) filter (where t.size = 1),
           array_agg(wait_below_small(v_full_level, t.level, case when t.refilled_at = v_now then 0 else microseconds(v_now - t.refilled_at)::bigint end,
                                      v_gain, v_per, v_tick_us)) filter (where t.size = 1),
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
        reset_us  := reset_us || wait_below_small(v_full_level, v_level, v_elapsed_us, v_gain, v_per, v_tick_us);
      end loop;
    end loop;
  end if;
end;
$$;
comment on function ratelimit.take_from_ephemeral_buckets(ratelimit.policies, text[], bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Charges the buckets of one policy that cover all that is asked of them, and answers their elements.';

create or replace function ratelimit.take_any_from_ephemeral_buckets(
    in  policy ratelimit.policies, in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  with taken as (
      update ephemeral_buckets as b
         set level       = refilled(b.level, b.refilled_at, v_now, u.p) - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, (u.p).tick),
             room        = null
        from (select u.*, coalesce((select with_override(v_policy, o) from overrides as o
                                     where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy) as p
                from unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
               where (select p = v_policy from policies as p where p.id = v_policy.id)
              offset 0) as u
       where b.ctid = coalesce(u.row_id, (select b.ctid
                         from ephemeral_buckets as b
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
                       when ((u.p).calendar).ends_at is null then short_wait((u.p).full_level, u.level, microseconds(v_now - u.refilled_at), u.p)
                       else wait_past_end(null, u.level, u.refilled_at, v_now, u.p, v_policy)
                     end),
           array_agg((u.p).capacity)
      into places, remaining, reset_us, capacities
      from (select e.place, t.p, t.refilled_at,
                   t.level + t.wanted - microtokens(sum(costs[e.place]::integer) over (partition by t.places[1] order by e.place)) as level
              from taken as t
             cross join lateral unnest(t.places) as e (place)) as u;
end;
$$;
comment on function ratelimit.take_any_from_ephemeral_buckets(ratelimit.policies, bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Does what take_from_ephemeral_buckets does, for a policy with overrides or large numbers.';

create or replace function ratelimit.take_up_to_from_ephemeral_buckets(
    in  policy ratelimit.policies, in asked ratelimit.asked[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[], out taken bigint[])
  language plpgsql volatile
as $$
declare
  v_policy  alias for policy;
  v_now     alias for now;
  v_numbers ratelimit.policies := with_turns(policy, now);
  v_others  boolean := coalesce((policy.calendar).overridden, policy.overridden);  -- some key has other numbers
begin
  with lent as (
      update ephemeral_buckets as b
         set level       = stored_level(u.held - microtokens(u.taken), u.p),
             refilled_at = refilled_until(u.refilled_at, v_now, (u.p).tick),
             room        = null
        from (select u.*, b.*, least(u.wanted, b.held) / 1000000 as taken
                from (select u.places[1] as place, u.key, u.wanted,
                             case
                               when not v_others then v_numbers
                               when (v_policy.calendar).period is not null then quota_of_key(v_policy, u.key, v_now)
                               else coalesce((select with_override(v_policy, o) from overrides as o
                                               where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy)
                             end as p
                        from unnest(asked) as u (key, wanted, places, size)
                       where u.size = 1
                         and (not v_policy.overridden or (select p = v_policy from policies as p where p.id = v_policy.id))
                      offset 0) as u
               cross join lateral (select b.ctid as row_id, b.level, b.refilled_at, level_now(b.level, b.refilled_at, v_now, u.p) as held
                                     from ephemeral_buckets as b
                                    where b.policy_id = v_policy.id
                                      and b.key      >= u.key collate "C"
                                      and b.key      <= u.key collate "C"
                                    order by b.key desc
                                    limit 1) as b
               where b.held >= 1000000
              offset 0) as u
       where b.ctid = u.row_id
         and b.level = u.level
         and b.refilled_at = u.refilled_at
      returning u.place, u.p, u.held / 1000000 - u.taken as remaining, case when v_policy.shadow then u.wanted / 1000000 else u.taken end as taken,
                b.level, b.refilled_at
    )
    select array_agg(t.place), array_agg(t.remaining),
           array_agg(case
                       when ((t.p).calendar).ends_at is null then short_wait((t.p).full_level, t.level, microseconds(v_now - t.refilled_at), t.p)
                       else wait_past_end(null, t.level, t.refilled_at, v_now, t.p, v_policy)
                     end),
           array_agg((t.p).capacity), array_agg(t.taken)
      into places, remaining, reset_us, capacities, taken
      from lent as t;
end;
$$;
comment on function ratelimit.take_up_to_from_ephemeral_buckets(ratelimit.policies, ratelimit.asked[], timestamptz) is
  'Charges the buckets of one policy that have a token with all they have, up to what is asked, and answers their elements.';

create or replace function ratelimit.covered_in_ephemeral_buckets(
    in  policy ratelimit.policies, in asked ratelimit.asked[], in now timestamptz,
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
      from (select u.*, coalesce((select with_override(v_policy, o) from overrides as o
                                   where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy) as p
              from unnest(asked) as u (key, wanted, places, size)
            offset 0) as u
      left join lateral (select b.ctid, b.xmax <> 0 and b.xmax <> b.xmin as contended,
                                least(b.level, (u.p).capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, u.p) >= u.wanted as covers
                           from ephemeral_buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on true;
  else
    select case when bool_and(b.covers is true) then array_agg(b.ctid) end, bool_or(b.contended)
      into row_ids, contended
      from unnest(asked) as u (key, wanted, places, size)
      left join lateral (select b.ctid, b.xmax <> 0 and b.xmax <> b.xmin as contended,
                                least(b.level, v_policy.capacity * 1000000) >= u.wanted or refilled(b.level, b.refilled_at, v_now, v_policy) >= u.wanted as covers
                           from ephemeral_buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on true;
  end if;
end;
$$;
comment on function ratelimit.covered_in_ephemeral_buckets(ratelimit.policies, ratelimit.asked[], timestamptz) is
  'The row ids of the buckets of one policy if all cover what is asked of them, and whether other sessions are at them.';

create or replace function ratelimit.lock_asked_of_ephemeral_buckets(policy ratelimit.policies, asked ratelimit.asked[])
  returns tid[] language plpgsql volatile
as $$
declare
  v_policy  alias for policy;
  v_row_ids tid[];
begin
  select case when bool_and(b.ctid is not null) then array_agg(b.ctid) end
    into v_row_ids
    from unnest(asked) as u (key, wanted, places, size)
    left join lateral (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1
                           for update) as b on true;
  return v_row_ids;
end;
$$;
comment on function ratelimit.lock_asked_of_ephemeral_buckets(ratelimit.policies, ratelimit.asked[]) is
  'Locks the buckets of one policy, in order, and answers with their row ids.';

create or replace function ratelimit.denied_in_ephemeral_buckets(
    policy ratelimit.policies, policies text[], keys text[], costs bigint[], places bigint[], now timestamptz)
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
  v_denied     ratelimit.packed;
begin
  if policy.overridden
     or (policy.full_level::double precision * (2 * v_per + 1) + v_gain < 9e18 and (v_fill_ticks + 1) * v_tick_us < 4.7e14) is false then
    return denied_in_any_ephemeral_buckets(v_policy, policies, keys, costs, places, v_now);
  end if;
  v_ticks := floor(2 * v_fill_ticks + 1)::bigint;

  select array_agg(e.place), array_agg(e.remaining),
         array_agg(case
                     when e.cost = e.smallest then e.retry_us
                     when e.cost <= v_policy.capacity then wait_below_small(microtokens(e.cost), e.level, e.elapsed_us, v_gain, v_per, v_tick_us)
                   end),
         array_agg(e.reset_us)
    into v_denied.elements, v_denied.remaining, v_denied.retry_after_us, v_denied.reset_after_us
    from (select unnest(d.elements) as place, unnest(d.charges) as cost, d.*
            from (select b.*, whole_tokens(b.level_now) as remaining,
                         case
                           when b.smallest <= v_policy.capacity then wait_below_small(microtokens(b.smallest), b.level, b.elapsed_us, v_gain, v_per, v_tick_us)
                         end as retry_us,
                         case
                           when b.level_now < v_full_level then wait_below_small(v_full_level, b.level, b.elapsed_us, v_gain, v_per, v_tick_us)
                           else 0
                         end as reset_us
                    from (select u.*, b.level, microseconds(v_now - b.refilled_at)::bigint as elapsed_us,
                                 refilled_level_small(b.level, b.refilled_at, v_now, v_full_level, v_gain, v_per, v_ticks, v_tick_us, v_tick) as level_now
                            from sought(v_policy.name, policies, keys, costs, places) as u
                           cross join lateral (select b.level, b.refilled_at
                                                 from ephemeral_buckets as b
                                                where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b
                          offset 0) as b
                   where b.smallest > 0
                     and b.level > -v_full_level
                     and b.level_now < microtokens(b.smallest)
                  offset 0) as d) as e;
  v_denied.capacity := array_fill(v_policy.capacity, array[coalesce(cardinality(v_denied.elements), 0)]);
  return v_denied;
end;
$$;
comment on function ratelimit.denied_in_ephemeral_buckets(ratelimit.policies, text[], text[], bigint[], bigint[], timestamptz) is
  'The single requests of a batch that the buckets of one policy plainly deny.';

create or replace function ratelimit.denied_in_any_ephemeral_buckets(
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
                     when ((e.p).calendar).ends_at is not null then wait_past_end(e.cost, e.level, e.refilled_at, v_now, e.p, v_policy)
                     when e.cost <= (e.p).capacity then wait_until(microtokens(e.cost), e.level, e.refilled_at, v_now, e.p)
                   end),
         array_agg(case
                     when ((e.p).calendar).ends_at is null then wait_until((e.p).full_level, e.level, e.refilled_at, v_now, e.p)
                     else wait_past_end(null, e.level, e.refilled_at, v_now, e.p, v_policy)
                   end),
         array_agg((e.p).capacity)
    into v_denied.elements, v_denied.remaining, v_denied.retry_after_us, v_denied.reset_after_us, v_denied.capacity
    from (select unnest(b.elements) as place, unnest(b.charges) as cost, b.*
            from (select u.*, b.level, b.refilled_at, refilled(b.level, b.refilled_at, v_now, u.p) as level_now
                    from (select u.*, coalesce((select with_override(v_policy, o) from overrides as o
                                                 where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy) as p
                            from sought(v_policy.name, policies, keys, costs, places) as u
                          offset 0) as u
                   cross join lateral (select b.level, b.refilled_at
                                         from ephemeral_buckets as b
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
comment on function ratelimit.denied_in_any_ephemeral_buckets(ratelimit.policies, text[], text[], bigint[], bigint[], timestamptz) is
  'Does what denied_in_ephemeral_buckets does, for a policy with overrides or large numbers.';

create or replace function ratelimit.remember_ephemeral_idempotency_keys(
    policy ratelimit.policies, keys text[], idempotency_keys text[], costs bigint[], now timestamptz, new boolean,
    places bigint[], remaining bigint[], capacities bigint[], reset_us bigint[])
  returns boolean language plpgsql volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_all    alias for idempotency_keys;
  v_stored bigint;
begin
  if new then
    insert into ephemeral_idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    select v_policy.id, keys[g.place], v_all[g.place], costs[g.place],
           g.remaining, duration(g.reset_us), g.capacity, v_now + duration(v_policy.remember_us),
           case when (v_policy.calendar).period is not null then v_now end
      from unnest(places, remember_ephemeral_idempotency_keys.remaining, capacities, reset_us) as g (place, remaining, capacity, reset_us)
     where is_name(v_all[g.place]);
  else
    insert into ephemeral_idempotency_keys as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    select v_policy.id, keys[g.place], v_all[g.place], costs[g.place],
           g.remaining, duration(g.reset_us), g.capacity, v_now + duration(v_policy.remember_us),
           case when (v_policy.calendar).period is not null then v_now end
      from unnest(places, remember_ephemeral_idempotency_keys.remaining, capacities, reset_us) as g (place, remaining, capacity, reset_us)
     where is_name(v_all[g.place])
    on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
  end if;
  get diagnostics v_stored = row_count;
  return v_stored = (select count(v_all[u.place]) from unnest(places) as u (place));
end;
$$;
comment on function ratelimit.remember_ephemeral_idempotency_keys(ratelimit.policies, text[], text[], bigint[], timestamptz, boolean, bigint[], bigint[], bigint[], bigint[]) is
  'Stores the idempotency keys of granted elements; false if one of them is live already, or is no valid key.';

create or replace function ratelimit.rows_of_ephemeral_buckets(
    in policy ratelimit.policies, in keys text[], in created boolean[], in now timestamptz,
    out numbers ratelimit.policies[], out levels bigint[], out refilled_at timestamptz[], out levels_now bigint[], out has_row boolean[])
  language plpgsql stable
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  if (v_policy.calendar).period is not null then
    select array_agg(filling(u.p, b.refilled_at) order by u.n), array_agg(microtokens((u.p).capacity) + coalesce(b.level, 0) order by u.n),
           array_agg(coalesce(b.refilled_at, v_now) order by u.n),
           array_agg(coalesce(level_now(b.level, b.refilled_at, v_now, u.p), microtokens((u.p).capacity)) order by u.n),
           array_agg(b.level is not null order by u.n)
      into numbers, levels, refilled_at, levels_now, has_row
      from (select u.key, u.created, u.n, quota_of_key(v_policy, u.key, v_now) as p
              from unnest(keys, created) with ordinality as u (key, created, n)
            offset 0) as u
      left join lateral (select b.level, b.refilled_at
                           from ephemeral_buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on u.created is not true;
    return;
  end if;
  select array_agg(u.p order by u.n), array_agg(coalesce(b.level, microtokens(greatest((u.p).capacity, v_policy.capacity))) order by u.n),
         array_agg(coalesce(b.refilled_at, v_now) order by u.n),
         array_agg(case when b.level is null then microtokens((u.p).capacity) else refilled(b.level, b.refilled_at, v_now, u.p) end order by u.n),
         array_agg(b.level is not null order by u.n)
    into numbers, levels, refilled_at, levels_now, has_row
    from (select u.key, u.created, u.n, case when v_policy.overridden then
                                     coalesce((select with_override(v_policy, o) from overrides as o
                                                where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy)
                                   else v_policy end as p
            from unnest(keys, created) with ordinality as u (key, created, n)
          offset 0) as u
    left join lateral (select b.level, b.refilled_at
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on u.created is not true;
end;
$$;
comment on function ratelimit.rows_of_ephemeral_buckets(ratelimit.policies, text[], boolean[], timestamptz) is
  'The buckets of one policy as they are now, and the numbers that apply to each.';

create or replace function ratelimit.live_ephemeral_idempotency_keys(
    policy_id bigint, keys text[], from_bucket integer, to_bucket integer, buckets integer[], charges bigint[], idempotency_keys text[], now timestamptz)
  returns table (place integer, granted ratelimit.idempotency_keys) language sql stable
as $$
  select u.place::integer, k.granted
    from unnest(buckets, charges, idempotency_keys) with ordinality as u (bucket, charge, idempotency_key, place)
   cross join lateral (select row(k.*)::ratelimit.idempotency_keys as granted, k.expires_at
                         from ratelimit.ephemeral_idempotency_keys as k
                        where k.policy_id       = live_ephemeral_idempotency_keys.policy_id
                          and k.key             = keys[u.bucket] collate "C"
                          and k.idempotency_key = u.idempotency_key collate "C"
                       offset 0) as k
   where u.bucket between from_bucket and to_bucket
     and u.charge > 0
     and k.expires_at > now
$$;
comment on function ratelimit.live_ephemeral_idempotency_keys(bigint, text[], integer, integer, integer[], bigint[], text[], timestamptz) is
  'The grants that live idempotency keys of a batch remember, by the number of the element.';

create or replace function ratelimit.lock_ephemeral_buckets(policy_id bigint, keys text[], wanted boolean[], numbers ratelimit.policies[], now timestamptz)
  returns boolean[] language plpgsql volatile
as $$
declare
  v_policy_id alias for policy_id;
  v_key       text collate "C";
  v_created   boolean[] := array_fill(false, array[cardinality(keys)]);
begin
  for v_n in 1..cardinality(keys) loop
    continue when not wanted[v_n];
    v_key := keys[v_n];
    loop
      perform from ephemeral_buckets as b  -- by its newest row version, as in take.sql
        where b.policy_id = v_policy_id
          and b.key      >= v_key
          and b.key      <= v_key
        order by b.key desc
        limit 1
          for update;
      exit when found;
      insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
      values (v_policy_id, v_key, stored_level(microtokens(numbers[v_n].capacity), numbers[v_n]), now, now)  -- due at once, as in ratelimit_charge
      on conflict on constraint ephemeral_buckets_pkey do nothing;
      v_created[v_n] := found;
      exit when found;
    end loop;
  end loop;
  return v_created;
end;
$$;
comment on function ratelimit.lock_ephemeral_buckets(bigint, text[], boolean[], ratelimit.policies[], timestamptz) is
  'Locks the wanted buckets of one policy, in order, and answers which rows it has created.';

create or replace function ratelimit.create_ephemeral_buckets(
    policy_id bigint, keys text[], wanted boolean[], has_row boolean[], levels bigint[], refilled_at timestamptz[], numbers ratelimit.policies[])
  returns bigint language plpgsql volatile
as $$
declare
  v_created bigint;
begin
  insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
  select create_ephemeral_buckets.policy_id, u.key, u.level, u.refilled_at, due_after(u.reset_us, u.refilled_at)
    from (select u.*, short_wait((u.p).full_level, u.level, 0, u.p) as reset_us
            from (select u.*, numbers[u.n] as p
                    from unnest(keys, wanted, has_row, levels, create_ephemeral_buckets.refilled_at)
                         with ordinality as u (key, wanted, has_row, level, refilled_at, n)
                   where u.wanted and not u.has_row
                  offset 0) as u
          offset 0) as u
   order by u.key collate "C"
  on conflict on constraint ephemeral_buckets_pkey do nothing;
  get diagnostics v_created = row_count;
  return v_created;
end;
$$;
comment on function ratelimit.create_ephemeral_buckets(bigint, text[], boolean[], boolean[], bigint[], timestamptz[], ratelimit.policies[]) is
  'Creates the rows of the wanted buckets of one policy that have none, and answers how many.';

create or replace function ratelimit.write_ephemeral_buckets(
    policy ratelimit.policies, keys text[], wanted boolean[], created boolean[], levels bigint[], refilled_at timestamptz[])
  returns bigint language plpgsql volatile
as $$
declare
  v_policy  alias for policy;
  v_written bigint;
begin
  for v_n in 1..cardinality(keys) loop
    continue when wanted[v_n] or not created[v_n];
    delete from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = keys[v_n] collate "C";
  end loop;
  update ephemeral_buckets as b
     set level = u.level, refilled_at = u.refilled_at, room = null
    from unnest(keys, wanted, levels, write_ephemeral_buckets.refilled_at) as u (key, wanted, level, refilled_at)
   where u.wanted
     and b.ctid = (select b.ctid
                         from ephemeral_buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1);
  get diagnostics v_written = row_count;
  return v_written;
end;
$$;
comment on function ratelimit.write_ephemeral_buckets(ratelimit.policies, text[], boolean[], boolean[], bigint[], timestamptz[]) is
  'Writes the wanted buckets of one policy, which are locked, and answers how many.';

create or replace function ratelimit.peeked_in_ephemeral_buckets(policy ratelimit.policies, keys text[], costs bigint[], places bigint[], now timestamptz)
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
                                   from ephemeral_buckets as b
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
                                 from ephemeral_buckets as b
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
comment on function ratelimit.peeked_in_ephemeral_buckets(ratelimit.policies, text[], bigint[], bigint[], timestamptz) is
  'What buckets of one policy hold, and whether they cover the costs of requests.';

create or replace function ratelimit.acquire_ephemeral(v_policy ratelimit.policies, key text, cost bigint, idempotency_key text)
  returns ratelimit.decision language plpgsql volatile
as $$
  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_wanted          bigint;       -- cost in microtokens; 0 if nothing can be taken
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_retry_us        bigint;       -- microseconds until the bucket holds cost; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_rounds          integer;
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return decision_of(take_quota_of_ephemeral_buckets(v_policy, v_key, v_cost, v_cost, v_idempotency_key));
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;

    -- 1. The idempotency key. Its expiry is compared after the row is found: in WHERE, a planner without statistics might
    --    choose the index of expires_at.
    if v_idempotency_key is not null then
      select k.* into v_first
        from ephemeral_idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update.
      if v_wanted > 0 then
        update ephemeral_buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null  -- what a new row has more, so that its page has room for this version
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             case
               when v_wanted > 0 then wait_until(v_wanted, b.level, b.refilled_at, v_now, v_policy)
               when v_cost = 0 then 0
             end,
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
        into v_level, v_retry_us, v_reset_us
        from ephemeral_buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_wanted   := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
        v_level    := microtokens(v_policy.capacity);
        v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
        v_reset_us := 0;
      end if;

      -- 3a. Too few tokens.
      if v_wanted = 0 or v_retry_us is distinct from 0 then
        if (v_policy.calendar).ends_at is not null then
          select b.level, b.retry_us, b.reset_us into v_level, v_retry_us, v_reset_us from look_past_end(v_policy, v_key, v_now, v_cost) as b;
          continue when v_wanted > 0 and v_retry_us = 0;  -- another session gave tokens back
        end if;
        if v_idempotency_key is not null then
          select k.* into v_first
            from ephemeral_idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return answer_again(v_first, v_cost, v_now, v_policy.shadow);
          end if;
        end if;
        if v_policy.shadow and v_retry_us is distinct from 0 then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
        return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
      end if;

      -- 3b. No row. The insert may wait for a session that creates the same one.
      if not v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint ephemeral_buckets_pkey do nothing;
        exit when found;
      end if;

      -- 3c. Again. Each repetition but the first is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us))
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update ephemeral_buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;
    return grant_of(v_level, v_reset_us, v_policy.capacity);
  end;
$$;
comment on function ratelimit.acquire_ephemeral(ratelimit.policies, text, bigint, text) is 'The steps of ratelimit_acquire for an ephemeral policy.';

create or replace function ratelimit.charge_ephemeral(v_policy ratelimit.policies, key text, cost bigint, idempotency_key text)
  returns ratelimit.decision language plpgsql volatile
as $$
  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_level           bigint;       -- microtokens in the bucket
    v_stored          bigint;       -- what the row of a quota has for that
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_held            bigint;       -- what the bucket held before the charge
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the charge that is remembered under the idempotency key
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).lease is not null then
        perform refuse_slots(v_policy.name);  -- raises 22023
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    if v_cost = 0 then
      select n.level, n.reset_us into v_level, v_reset_us from bucket_now(v_policy, v_key, v_now) as n;
      return spent_of(v_level, v_reset_us, v_policy.capacity, false);
    end if;

    loop
      -- 1. The idempotency key.
      if v_idempotency_key is not null then
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if v_first.expires_at > v_now then
          if v_first.cost <> v_cost then
            perform refuse_repeat(v_first, v_cost);  -- raises RL002
          end if;
          return replay_of(v_first);
        end if;
      end if;

      -- 2. The bucket.
      loop
        select b.level, b.refilled_at into v_level, v_refilled_at
          from ephemeral_buckets as b
         where b.policy_id = v_policy.id
           and b.key       = v_key
           for update;
        v_has_row := found;
        v_now     := clock();  -- the lock may have waited
        if v_policy.overridden or not v_has_row then
          v_policy := numbers_again(v_policy, v_key, v_now);
          if (v_policy.calendar).period is not null then
            v_level := level_now(v_level, v_refilled_at, v_now, v_policy);
          end if;
        end if;
        exit when v_has_row;
        v_level       := microtokens(v_policy.capacity);
        v_refilled_at := v_now;
        insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, stored_level(v_level, v_policy), v_refilled_at, v_now)  -- due at once: clean-up will postpone it
        on conflict on constraint ephemeral_buckets_pkey do nothing;
        v_has_row := found;
        exit when v_has_row;
      end loop;

      -- 3. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
      v_held        := refilled(v_level, v_refilled_at, v_now, v_policy);
      v_level       := moved_level(v_held, -microtokens(v_cost), v_policy.full_level, floor_level(v_policy.gain, v_policy.every_us));
      v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
      v_reset_us    := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
      if (v_policy.calendar).ends_at is not null then
        if (v_policy.calendar).period is not null then
          v_level  := greatest(v_level, lowest_level_of_quota(v_policy.capacity));
          v_stored := v_level - microtokens(v_policy.capacity);
        end if;
        v_reset_us := wait_past_end(null, coalesce(v_stored, v_level), v_refilled_at, v_now, v_policy, own_numbers(v_policy));
      end if;
      exit when v_idempotency_key is null;
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, taken, remaining, reset_after, capacity, expires_at, granted_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost, nullif(v_held - v_level, microtokens(v_cost)),
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us),
              case when (v_policy.calendar).period is not null then v_now end)
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      exit when found;
    end loop;

    -- 4. The level.
    update ephemeral_buckets as b
       set level = coalesce(v_stored, v_level), refilled_at = v_refilled_at, room = null
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  end;
$$;
comment on function ratelimit.charge_ephemeral(ratelimit.policies, text, bigint, text) is 'The steps of ratelimit_charge for an ephemeral policy.';

create or replace function ratelimit.settle_ephemeral(v_policy ratelimit.policies, key text, idempotency_key text, cost bigint)
  returns ratelimit.decision language plpgsql volatile
as $$
  declare
    v_key             text collate "C" := key;
    v_idempotency_key text collate "C" := idempotency_key;
    v_cost            alias for cost;
    v_now             timestamptz := clock();
    v_level           bigint;       -- microtokens in the bucket
    v_stored          bigint;       -- what the row of a quota has for that
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_paused_until    timestamptz;  -- as of ratelimit_pause
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_back            bigint;       -- microtokens that the settlement gives back; below zero: that it takes
    v_first           ratelimit.idempotency_keys;  -- the grant
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).lease is not null then
        perform refuse_slots(v_policy.name);  -- raises 22023
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    loop
      -- 1. The grant. A shadow policy looks for it again after the bucket was read: a grant that was committed meanwhile is in the
      --    level that was read, and so must be found.
      select k.* into v_first
        from ephemeral_idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if (v_first.expires_at > v_now) is not true then
        if not v_policy.shadow then
          perform no_grant(v_policy.name, v_idempotency_key);  -- raises RL003
        end if;
        select n.level, n.reset_us into v_level, v_reset_us from bucket_now(v_policy, v_key, v_now) as n;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        if (v_first.expires_at > v_now) is not true then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
      end if;
      if v_first.settled is not null then
        if v_first.settled <> v_cost then
          perform another_cost(format('%L was settled with cost %s and is settled again with cost %s.', v_idempotency_key, v_first.settled, v_cost),
                               'The first settlement stands: charge or refund the difference.');
        end if;
        select n.level, n.reset_us into v_level, v_reset_us from bucket_now(v_policy, v_key, v_now) as n;
        return spent_of(v_level, v_reset_us, v_policy.capacity, true);
      end if;
      v_back := coalesce(v_first.taken, microtokens(v_first.cost)) - microtokens(v_cost);

      -- 2. The bucket.
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
      loop
        select b.level, b.refilled_at, b.paused_until into v_level, v_refilled_at, v_paused_until
          from ephemeral_buckets as b
         where b.policy_id = v_policy.id
           and b.key       = v_key
           for update;
        v_has_row := found;
        v_now     := clock();  -- the lock may have waited
        if v_policy.overridden or not v_has_row then
          v_policy := numbers_again(v_policy, v_key, v_now);
          if (v_policy.calendar).period is not null then
            v_level := level_now(v_level, v_refilled_at, v_now, v_policy);
            if v_back > 0 and v_first.granted_at < (v_policy.calendar).turned_at then
              v_back := 0;  -- the period of the grant is over
            end if;
          end if;
        end if;
        exit when v_has_row;
        v_level       := microtokens(v_policy.capacity);
        v_refilled_at := v_now;
        insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, stored_level(v_level, v_policy), v_refilled_at, v_now)  -- due at once: clean-up will postpone it
        on conflict on constraint ephemeral_buckets_pkey do nothing;
        v_has_row := found;
        exit when v_has_row;
      end loop;

      -- 3. The mark, if the grant is still as it was read.
      update ephemeral_idempotency_keys as k
         set settled = v_cost
       where k.policy_id       = v_policy.id
         and k.key             = v_key
         and k.idempotency_key = v_idempotency_key
         and k.settled is null
         and k.cost            = v_first.cost
         and k.expires_at      = v_first.expires_at
         and k.expires_at      > v_now;
      exit when found;
    end loop;

    -- 4. The level.
    v_level       := moved_level(refilled(v_level, v_refilled_at, v_now, v_policy), v_back,
                                 case when v_back > 0 and v_paused_until > v_now then 0 else v_policy.full_level end, floor_level(v_policy.gain, v_policy.every_us));
    v_refilled_at := refilled_until(v_refilled_at, v_now, v_policy.tick);
    v_reset_us    := wait_until(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy);
    if (v_policy.calendar).ends_at is not null then
      if (v_policy.calendar).period is not null then
        v_level  := greatest(v_level, lowest_level_of_quota(v_policy.capacity));
        v_stored := v_level - microtokens(v_policy.capacity);
      end if;
      v_reset_us := wait_past_end(null, coalesce(v_stored, v_level), v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;
    update ephemeral_buckets as b
       set level = coalesce(v_stored, v_level), refilled_at = v_refilled_at, room = null
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    return spent_of(v_level, v_reset_us, v_policy.capacity, false);
  end;
$$;
comment on function ratelimit.settle_ephemeral(ratelimit.policies, text, text, bigint) is 'The steps of ratelimit_settle for an ephemeral policy.';

create or replace function ratelimit.reserve_ephemeral(v_policy ratelimit.policies, key text, max_wait interval, cost bigint, idempotency_key text)
  returns ratelimit.reservation language plpgsql volatile
as $$
  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_until           timestamptz;  -- when the wait must be over
    v_wanted          bigint;       -- cost in microtokens; 0 if nothing can be taken
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_seen_level      bigint;       -- the row as it was read
    v_seen_at         timestamptz;  -- likewise
    v_wait_us         bigint;       -- microseconds until the debt is paid that cost would leave; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_ready_at        timestamptz;  -- when the grant holds; null: at once
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_rounds          integer;
    v_override        ratelimit.overrides;
    v_own             ratelimit.policies;  -- the policy without the numbers of the override
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return reservation_by(take_quota_of_ephemeral_buckets(v_policy, v_key, v_cost, v_cost, v_idempotency_key));
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_own    := v_policy;
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;

    -- 1. The idempotency key.
    if v_idempotency_key is not null then
      select k.* into v_first
        from ephemeral_idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update. max_wait counts without days, which may have 23 or 25 hours. The update rounds the refill down to whole
      --    microtokens, so the debt may be paid a microtoken later than the bucket as it was would have covered the cost: the
      --    bucket counts for one less. That the debt ends above the floor shows in the stored level.
      --    Where an override ends within max_wait, step 3c decides.
      v_until := v_now + date_part('epoch', max_wait) * interval '1 second';
      if v_wanted > 0 and ((v_policy.calendar).ends_at <= v_until) is not true then
        update ephemeral_buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level - 1, b.refilled_at, v_until, v_policy) >= v_wanted
           and b.level     >= v_wanted - deepest_debt()
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy),
             b.level, b.refilled_at
        into v_level, v_reset_us, v_seen_level, v_seen_at
        from ephemeral_buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_wanted   := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
        v_level    := microtokens(v_policy.capacity);
        v_reset_us := 0;
      end if;
      v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
      v_wait_us     := case
                         when v_cost = 0 then 0::bigint
                         when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), v_level, v_refilled_at, v_now, v_policy)
                       end;
      if (v_policy.calendar).ends_at is not null then
        v_own      := own_numbers(v_policy);
        v_reset_us := wait_past_end(null, v_seen_level, v_seen_at, v_now, v_policy, v_own);
        if v_wanted = 0 or not v_has_row then
          v_wait_us := case when v_cost = 0 then 0 else wait_past_end(v_cost, v_seen_level, v_seen_at, v_now, v_policy, v_own) end;
        else  -- as the row will be stored
          v_wait_us := wait_past_end(v_cost, v_level, v_refilled_at, v_now, v_policy, v_own);
        end if;
      end if;

      -- 3a. Too long to wait, or too deep a debt.
      if v_wanted = 0
         or (v_wait_us <= microseconds(max_wait)
             and (v_wait_us = 0 or v_level::numeric - v_wanted >= floor_level(v_policy.gain, v_policy.every_us))) is not true then
        if v_idempotency_key is not null then
          select k.* into v_first
            from ephemeral_idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
          end if;
        end if;
        return reservation_of(v_cost = 0, v_level, v_wait_us, v_reset_us, v_policy.capacity, v_policy.shadow);
      end if;

      -- 3b. No row. The insert may wait for a session that creates the same one.
      v_level := v_level - v_wanted;
      if not v_has_row then
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint ephemeral_buckets_pkey do nothing;
        exit when found;

      -- 3c. From the bucket as it was read.
      else
        update ephemeral_buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- Again. Each round is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, v_own);
      if v_level < 0 then
        v_ready_at := v_now + duration(wait_past_end(0, v_level, v_refilled_at, v_now, v_policy, v_own));
      end if;
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      if v_level < 0 then
        v_ready_at := coalesce(v_ready_at, v_refilled_at + duration(short_wait(0, v_level, 0, v_policy)));
      end if;
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, ready_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              whole_tokens(v_level), duration(v_reset_us), v_policy.capacity,
              coalesce(v_ready_at, v_now) + duration(v_policy.remember_us), v_ready_at)
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update ephemeral_buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return replayed_reservation(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    -- The update may have waited, so the clock is read again: nobody waits longer than until the debt is paid.
    if v_level < 0 then
      if (v_policy.calendar).ends_at is not null then
        return waiting_of(v_level, greatest(0, microseconds(v_ready_at - clock()))::double precision, v_reset_us, v_policy.capacity, v_policy.shadow);
      end if;
      return waiting_of(v_level, greatest(0, time_below(0, v_level, microseconds(clock() - v_refilled_at), v_policy.every_us, v_policy.tick_us,
                                                         v_policy.tick_gain, v_policy.round_up))::double precision,
                        v_reset_us, v_policy.capacity, v_policy.shadow);
    end if;
    return reserved_of(v_level, v_reset_us, v_policy.capacity);
  end;
$$;
comment on function ratelimit.reserve_ephemeral(ratelimit.policies, text, interval, bigint, text) is 'The steps of ratelimit_reserve for an ephemeral policy.';

create or replace function ratelimit.acquire_up_to_ephemeral(v_policy ratelimit.policies, key text, at_most bigint, at_least bigint, idempotency_key text)
  returns ratelimit.partial_decision language plpgsql volatile
as $$
  declare
    v_key             text collate "C" := key;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_taken           bigint := at_most;
    v_wanted          bigint;       -- the tokens to take in microtokens; 0 if at_most never fits
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_seen_level      bigint;       -- the row as it was read
    v_seen_at         timestamptz;  -- likewise
    v_retry_us        bigint;       -- microseconds until the bucket holds at_least; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_answer          ratelimit.decision;
    v_rounds          integer;
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return take_quota_of_ephemeral_buckets(v_policy, v_key, at_most, at_least, v_idempotency_key);
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when at_most <= v_policy.capacity then microtokens(at_most) else 0 end;

    -- 1. The idempotency key.
    if v_idempotency_key is not null then
      select k.* into v_first
        from ephemeral_idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update, for all of at_most. It is worth one try.
      if v_wanted > 0 and v_rounds is null then
        update ephemeral_buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             case when at_least <= v_policy.capacity then wait_until(microtokens(at_least), b.level, b.refilled_at, v_now, v_policy) end,
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy),
             b.level, b.refilled_at
        into v_level, v_retry_us, v_reset_us, v_seen_level, v_seen_at
        from ephemeral_buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_level    := microtokens(v_policy.capacity);
        v_retry_us := case when at_least <= v_policy.capacity then 0::bigint end;
        v_reset_us := 0;
      end if;

      -- 3a. Too few tokens.
      if v_retry_us is distinct from 0 then
        if (v_policy.calendar).ends_at is not null then
          v_retry_us := wait_past_end(at_least, v_seen_level, v_seen_at, v_now, v_policy, own_numbers(v_policy));
          v_reset_us := wait_past_end(null, v_seen_level, v_seen_at, v_now, v_policy, own_numbers(v_policy));
        end if;
        if v_idempotency_key is not null then
          select k.* into v_first
            from ephemeral_idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
          end if;
        end if;
        if v_policy.shadow then
          v_answer := shadow_of(v_level, v_reset_us, v_policy.capacity);
          return partial_of(v_answer, at_most);
        end if;
        v_answer := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        return partial_of(v_answer, 0);
      end if;
      v_taken  := least(at_most, whole_tokens(v_level));
      v_wanted := microtokens(v_taken);

      -- 3b. No row. The insert may wait for a session that creates the same one.
      v_level := v_level - v_wanted;
      if not v_has_row then
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint ephemeral_buckets_pkey do nothing;
        exit when found;

      -- 3c. From the bucket as it was read.
      else
        v_refilled_at := refilled_until(v_seen_at, v_now, v_policy.tick);
        update ephemeral_buckets as b
           set level = v_level, refilled_at = v_refilled_at, room = null
         where b.policy_id   = v_policy.id
           and b.key         = v_key
           and b.level       = v_seen_level
           and b.refilled_at = v_seen_at;
        exit when found;
      end if;

      -- Again. Each round is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      insert into ephemeral_idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_taken,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us))
      on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update ephemeral_buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return replayed_partial(v_first, at_least, at_most, v_now, v_policy.shadow);
      end if;
    end if;
    v_answer := grant_of(v_level, v_reset_us, v_policy.capacity);
    return partial_of(v_answer, case when v_policy.shadow then at_most else v_taken end);
  end;
$$;
comment on function ratelimit.acquire_up_to_ephemeral(ratelimit.policies, text, bigint, bigint, text) is 'The steps of ratelimit_acquire_up_to for an ephemeral policy.';

create or replace function ratelimit.pause_ephemeral(v_policy ratelimit.policies, key text, pause_for interval)
  returns ratelimit.decision language plpgsql volatile
as $$
  declare
    v_key         text collate "C" := key;
    v_now         timestamptz;
    v_until       timestamptz;  -- the end of the pause
    v_level       bigint;       -- microtokens in the bucket
    v_refilled_at timestamptz;  -- when the bucket held v_level
    v_own         ratelimit.policies;  -- the policy without the numbers of an override
  begin
    if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
    loop
      select b.level, b.refilled_at, b.paused_until into v_level, v_refilled_at, v_until
        from ephemeral_buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key
         for update;
      v_now    := clock();  -- the lock may have waited
      v_policy := numbers_again(v_policy, v_key, v_now);
      if v_policy.refill = 0 then
        perform refuse_pause(v_policy.name, v_key);  -- raises 22023
      end if;
      exit when v_level is not null;
      v_level       := microtokens(v_policy.capacity);
      v_refilled_at := v_now;
      insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
      values (v_policy.id, v_key, v_level, v_refilled_at, v_now)  -- due at once: clean-up will postpone it
      on conflict on constraint ephemeral_buckets_pkey do nothing;
      exit when found;
    end loop;
    v_until := greatest(v_until, v_now + duration(microseconds(pause_for)::bigint));  -- a day is 24 hours
    v_own   := own_numbers(v_policy);
    if (v_policy.calendar).ends_at <= v_until then
      v_level       := refilled(v_level, v_refilled_at, v_now, v_policy);
      v_level       := refilled(v_level, refilled_until(v_refilled_at, v_now, v_policy.tick), v_until, v_own);
      v_refilled_at := greatest(v_refilled_at, v_until);
    else
      v_level       := refilled(v_level, v_refilled_at, v_until, v_policy);
      v_refilled_at := refilled_until(v_refilled_at, v_until, v_policy.tick);
    end if;
    v_level := least(v_level, 0);
    update ephemeral_buckets as b
       set level = v_level, refilled_at = v_refilled_at, room = null, paused_until = v_until
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    return answer_of(v_level, wait_past_end(1, v_level, v_refilled_at, v_now, v_policy, v_own),
                     wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, v_own), v_policy.capacity);
  end;
$$;
comment on function ratelimit.pause_ephemeral(ratelimit.policies, text, interval) is 'The steps of ratelimit_pause for an ephemeral policy.';

create or replace function ratelimit.hold_ephemeral(v_policy ratelimit.policies, key text, holder text, cost bigint)
  returns ratelimit.hold language plpgsql volatile
as $$
  declare
    v_key          text collate "C" := key;
    v_holder       text collate "C" := holder;
    v_cost         alias for cost;
    v_now          timestamptz := clock();
    v_seen_at      timestamptz;  -- the clock by which the leases were read
    v_changes      bigint;       -- of the key; null: it has no row
    v_held         bigint;       -- by leases that have not ended
    v_until        timestamptz;  -- no lease ends before
    v_ended        boolean;      -- some lease has
    v_own_cost     integer;      -- of the holder's lease
    v_own_end      timestamptz;  -- likewise
    v_renewed      boolean;
    v_next_changes bigint;
    v_ends_at      timestamptz;
    v_lease_us     bigint;
    v_retry_us     bigint;       -- microseconds until the cost fits; null: never
    v_look         record;
    v_written      boolean;
    v_rounds       integer;
    v_override     ratelimit.overrides;
  begin
    if (v_policy.calendar).overridden then
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;

    loop
      -- 1. The row of the key, and the holder's lease.
      select s.changes, s.held, s.counted_until
        into v_changes, v_held, v_until
        from ephemeral_slots as s
       where s.policy_id = v_policy.id and s.key = v_key;
      select l.cost, l.ends_at
        into v_own_cost, v_own_end
        from ephemeral_leases as l
       where l.policy_id = v_policy.id and l.key = v_key and l.holder = v_holder;
      v_ended := false;
      if v_changes is null then
        v_held := 0;
      elsif v_until <= v_now or v_retry_us = 0 then
        select coalesce(sum(l.cost) filter (where l.ends_at > v_now), 0),
               min(l.ends_at) filter (where l.ends_at > v_now),
               count(*) filter (where l.ends_at <= v_now) > 0
          into v_held, v_until, v_ended
          from ephemeral_leases as l
         where l.policy_id = v_policy.id and l.key = v_key;
      end if;
      v_renewed  := (v_own_end > v_now) is true;
      v_lease_us := microseconds((v_policy.calendar).lease)::bigint;
      if v_renewed and v_own_cost <> v_cost then
        perform held_with_another_cost(v_holder, v_own_cost, v_cost);  -- raises RL002
      end if;

      -- 2. A denial. By the time of this look there may be more, or the holder may hold.
      if not v_renewed and v_cost > v_policy.capacity - v_held then
        select l.* into v_look from look_at_ephemeral_slots(v_policy, v_key, v_now, v_cost, v_holder) as l;
        v_retry_us := case when v_look.holds then 0 else v_look.retry_us end;
        if v_retry_us is distinct from 0 and v_look.shadow then
          return (true, v_look.capacity - v_look.held, interval '0', duration(microseconds(v_look.lease)::bigint), v_look.capacity,
                  false, true)::ratelimit.hold;
        elsif v_retry_us is distinct from 0 then
          return (false, v_look.capacity - v_look.held, duration(v_retry_us), interval '0', v_look.capacity, false, false)::ratelimit.hold;
        end if;

      -- 3. The row of the key.
      else
        v_ends_at := v_now + duration(v_lease_us);
        if not v_renewed then
          v_held := v_held + v_cost;
        end if;
        if v_changes is null then
          v_next_changes := microseconds(v_now - timestamptz 'epoch')::bigint;
          insert into ephemeral_slots (policy_id, key, changes, held, counted_until, due_at)
          values (v_policy.id, v_key, v_next_changes, v_held, v_ends_at, v_now)  -- due at once: clean-up will postpone it
          on conflict on constraint ephemeral_slots_pkey do nothing;
        else
          update ephemeral_slots as s
             set changes       = v_changes + 1,
                 held          = v_held,
                 counted_until = least(v_until, v_ends_at),
                 due_at        = least(s.due_at, v_ends_at)
           where s.policy_id = v_policy.id
             and s.key       = v_key
             and s.changes   = v_changes;
        end if;
        v_written := found;
        v_seen_at := v_now;
        v_now     := clock();  -- it may have waited; if the clock went back, leases may be live that had ended
        exit when v_written and v_now >= v_seen_at and (v_until > v_now and (v_policy.calendar).ends_at > v_now) is not false;

        -- 4. The lock. A row that was written counts a lease that this call may not grant any more.
        if v_written then
          update ephemeral_slots as s
             set counted_until = '-infinity'
           where s.policy_id = v_policy.id
             and s.key       = v_key;
        else
          perform s.changes from ephemeral_slots as s
            where s.policy_id = v_policy.id
              and s.key       = v_key
              for update;
        end if;
      end if;
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
      v_now    := clock();
      v_policy := numbers_again(v_policy, v_key, v_now);
    end loop;

    -- 5. The lease.
    v_ends_at := v_now + duration(v_lease_us);
    if v_ended then
      delete from ephemeral_leases as l
       where l.policy_id = v_policy.id
         and l.key       = v_key
         and l.ends_at  <= v_now;
    end if;
    if v_renewed then
      update ephemeral_leases as l
         set ends_at = v_ends_at
       where l.policy_id = v_policy.id
         and l.key       = v_key
         and l.holder    = v_holder;
    else
      insert into ephemeral_leases (policy_id, key, holder, cost, ends_at)
      values (v_policy.id, v_key, v_holder, v_cost, v_ends_at);
    end if;
    return (true, v_policy.capacity - v_held, interval '0', duration(v_lease_us), v_policy.capacity, v_renewed, false)::ratelimit.hold;
  end;
$$;
comment on function ratelimit.hold_ephemeral(ratelimit.policies, text, text, bigint) is 'The steps of ratelimit_hold for an ephemeral policy.';

create or replace function ratelimit.renew_ephemeral(v_policy ratelimit.policies, key text, holder text)
  returns interval language plpgsql volatile
as $$
  declare
    v_key      text collate "C" := key;
    v_holder   text collate "C" := holder;
    v_now      timestamptz := clock();
    v_ends_at  timestamptz;
    v_earlier  timestamptz;  -- the end of the lease by the clock and the numbers before the wait
    v_lease_us bigint;
    v_locked   boolean;
    v_override ratelimit.overrides;
  begin
    if (v_policy.calendar).overridden then
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_lease_us := microseconds((v_policy.calendar).lease)::bigint;

    -- 1. Has it a lease?
    perform l.cost from ephemeral_leases as l
      where l.policy_id = v_policy.id
        and l.key       = v_key
        and l.holder    = v_holder;
    if found then
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006

      -- 2. The row of the key.
      v_earlier := v_now + duration(v_lease_us);
      update ephemeral_slots as s
         set changes       = s.changes + 1,
             counted_until = least(s.counted_until, v_earlier),
             due_at        = least(s.due_at, v_earlier)
       where s.policy_id = v_policy.id
         and s.key       = v_key;
      v_locked := found;  -- or clean-up has removed the row, and with it the lease

      -- 3. The lease, by the clock and the numbers of now.
      v_now := clock();
      if (v_policy.calendar).ends_at <= v_now then
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_lease_us := microseconds((v_policy.calendar).lease)::bigint;
      end if;
      v_ends_at := v_now + duration(v_lease_us);
      if v_ends_at < v_earlier then  -- the clock went back, or an override with a longer lease has ended
        update ephemeral_slots as s
           set counted_until = '-infinity'
         where s.policy_id = v_policy.id
           and s.key       = v_key;
      end if;
      update ephemeral_leases as l
         set ends_at = v_ends_at
       where v_locked
         and l.policy_id = v_policy.id
         and l.key       = v_key
         and l.holder    = v_holder
         and l.ends_at   > v_now;
    end if;
    return case when found or v_policy.shadow then duration(v_lease_us) end;
  end;
$$;
comment on function ratelimit.renew_ephemeral(ratelimit.policies, text, text) is 'The steps of ratelimit_renew for an ephemeral policy.';

create or replace function ratelimit.release_ephemeral(v_policy ratelimit.policies, key text, holder text)
  returns boolean language plpgsql volatile
as $$
  declare
    v_key      text collate "C" := key;
    v_holder   text collate "C" := holder;
    v_now      timestamptz := clock();
    v_cost     integer;
    v_released integer;  -- the cost of the lease that is deleted; null if none is
  begin
    -- 1. Has it a lease? One that has ended may have been renewed by a session that has not committed yet.
    select l.cost
      into v_cost
      from ephemeral_leases as l
     where l.policy_id = v_policy.id
       and l.key       = v_key
       and l.holder    = v_holder;
    if not found then
      return false;
    end if;
    if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006

    -- 2. The row of the key.
    update ephemeral_slots as s
       set changes = s.changes + 1,
           held    = s.held - v_cost,
           due_at  = least(s.due_at, v_now)  -- nobody may hold now: clean-up looks at it in five minutes or later
     where s.policy_id = v_policy.id
       and s.key       = v_key;
    if not found then
      return false;  -- clean-up has removed the row, and with it the lease
    end if;

    -- 3. The lease, by the clock of now.
    v_now := clock();
    delete from ephemeral_leases as l
     where l.policy_id = v_policy.id
       and l.key       = v_key
       and l.holder    = v_holder
       and l.ends_at   > v_now
    returning l.cost into v_released;
    if v_released is distinct from v_cost then  -- the lease has ended, or was another one by then
      update ephemeral_slots as s
         set counted_until = '-infinity'
       where s.policy_id = v_policy.id
         and s.key       = v_key;
    end if;
    return v_released is not null;
  end;
$$;
comment on function ratelimit.release_ephemeral(ratelimit.policies, text, text) is 'The steps of ratelimit_release for an ephemeral policy.';

create or replace function ratelimit.acquire(v_policy ratelimit.policies, key text, cost bigint, idempotency_key text)
  returns ratelimit.decision language plpgsql volatile
as $$
begin
  if not v_policy.durable then
    return acquire_ephemeral(v_policy, key, cost, idempotency_key);
  end if;
  declare
    v_key             text collate "C" := key;
    v_cost            alias for cost;
    v_idempotency_key text collate "C" := idempotency_key;
    v_now             timestamptz := clock();
    v_wanted          bigint;       -- cost in microtokens; 0 if nothing can be taken
    v_level           bigint;       -- microtokens in the bucket
    v_refilled_at     timestamptz;  -- when the bucket held v_level
    v_retry_us        bigint;       -- microseconds until the bucket holds cost; null: never
    v_reset_us        bigint;       -- microseconds until the bucket is full; null: never
    v_has_row         boolean;      -- a bucket without a row is full
    v_first           ratelimit.idempotency_keys;  -- the grant that is remembered under the idempotency key
    v_rounds          integer;
    v_override        ratelimit.overrides;
  begin
    if v_policy.overridden then
      if (v_policy.calendar).ends_at is not null then  -- no bucket that refills
        if (v_policy.calendar).lease is not null then
          perform refuse_slots(v_policy.name);  -- raises 22023
        end if;
        return decision_of(take_quota_of_buckets(v_policy, v_key, v_cost, v_cost, v_idempotency_key));
      end if;
      select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
      if found then
        v_policy := with_override(v_policy, v_override);
      end if;
    end if;
    v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;

    -- 1. The idempotency key. Its expiry is compared after the row is found: in WHERE, a planner without statistics might
    --    choose the index of expires_at.
    if v_idempotency_key is not null then
      select k.* into v_first
        from idempotency_keys as k
       where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
      if v_first.expires_at > v_now then
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;

    loop
      -- 2. The update.
      if v_wanted > 0 then
        update buckets as b
           set level       = refilled(b.level, b.refilled_at, v_now, v_policy) - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null  -- what a new row has more, so that its page has room for this version
         where b.policy_id = v_policy.id
           and b.key       = v_key
           and refilled(b.level, b.refilled_at, v_now, v_policy) >= v_wanted
        returning b.level, b.refilled_at into v_level, v_refilled_at;
        exit when found;
      end if;

      -- 3. The bucket, as of now: the update may have waited.
      v_now := clock();
      if v_policy.overridden then
        v_policy := numbers_again(v_policy, v_key, v_now);
        v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
      end if;
      select refilled(b.level, b.refilled_at, v_now, v_policy),
             case
               when v_wanted > 0 then wait_until(v_wanted, b.level, b.refilled_at, v_now, v_policy)
               when v_cost = 0 then 0
             end,
             wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
        into v_level, v_retry_us, v_reset_us
        from buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key;
      v_has_row := found;
      if not v_has_row then  -- full, by the newest numbers
        v_policy   := numbers_again(v_policy, v_key, v_now);
        v_wanted   := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
        v_level    := microtokens(v_policy.capacity);
        v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
        v_reset_us := 0;
      end if;

      -- 3a. Too few tokens.
      if v_wanted = 0 or v_retry_us is distinct from 0 then
        if (v_policy.calendar).ends_at is not null then
          select b.level, b.retry_us, b.reset_us into v_level, v_retry_us, v_reset_us from look_past_end(v_policy, v_key, v_now, v_cost) as b;
          continue when v_wanted > 0 and v_retry_us = 0;  -- another session gave tokens back
        end if;
        if v_idempotency_key is not null then
          select k.* into v_first
            from idempotency_keys as k
           where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
          if v_first.expires_at > v_now then
            return answer_again(v_first, v_cost, v_now, v_policy.shadow);
          end if;
        end if;
        if v_policy.shadow and v_retry_us is distinct from 0 then
          return shadow_of(v_level, v_reset_us, v_policy.capacity);
        end if;
        return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
      end if;

      -- 3b. No row. The insert may wait for a session that creates the same one.
      if not v_has_row then
        v_level       := v_level - v_wanted;
        v_refilled_at := v_now;
        v_reset_us    := short_wait(v_policy.full_level, v_level, 0, v_policy);
        insert into buckets (policy_id, key, level, refilled_at, due_at)
        values (v_policy.id, v_key, v_level, v_refilled_at, due_after(v_reset_us, v_now))
        on conflict on constraint buckets_pkey do nothing;
        exit when found;
      end if;

      -- 3c. Again. Each repetition but the first is due to another session.
      v_rounds := coalesce(v_rounds, 0) + 1;
      if v_rounds = 1000 then
        perform too_many_rounds(v_policy.name, v_key);  -- raises 40001
      end if;
    end loop;
    v_reset_us := short_wait(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy);

    if (v_policy.calendar).ends_at is not null then
      v_reset_us := wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, own_numbers(v_policy));
    end if;

    -- 4. The idempotency key is remembered: an expired one is overwritten, and one that is live is left alone.
    if v_idempotency_key is not null then
      insert into idempotency_keys as k
             (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
      values (v_policy.id, v_key, v_idempotency_key, v_cost,
              tokens_above_debt(v_level), duration(v_reset_us), v_policy.capacity, v_now + duration(v_policy.remember_us))
      on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at,
               ready_at    = excluded.ready_at,
               settled     = excluded.settled,
               taken       = excluded.taken,
               granted_at  = excluded.granted_at
         where k.expires_at <= v_now;
      if not found then
        update buckets as b
           set level = b.level + v_wanted
         where b.policy_id = v_policy.id
           and b.key       = v_key;
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id = v_policy.id and k.key = v_key and k.idempotency_key = v_idempotency_key;
        return answer_again(v_first, v_cost, v_now, v_policy.shadow);
      end if;
    end if;
    return grant_of(v_level, v_reset_us, v_policy.capacity);
  end;
end;
$$;
comment on function ratelimit.acquire(ratelimit.policies, text, bigint, text) is 'The steps of ratelimit_acquire, for the guards.';

create or replace function ratelimit.peek(policy text, key text, cost bigint)
  returns ratelimit.decision language plpgsql stable
as $$
declare
  v_policy   ratelimit.policies;
  v_override ratelimit.overrides;
  v_key      text collate "C" := key;
  v_cost     alias for cost;
  v_now      timestamptz := clock();
  v_level    bigint;  -- microtokens in the bucket
  v_retry_us bigint;  -- microseconds until the bucket holds cost; null: never
  v_reset_us bigint;  -- microseconds until the bucket is full; null: never
begin
  if not acceptable(key, cost) then
    perform check_request(policy, key, cost, null);  -- raises 22023
  end if;
  select p.* into v_policy from policies as p where p.name = policy collate "C";
  if not found then
    perform check_name('policy', policy);
    perform refuse_unknown(policy);
  end if;
  if v_policy.overridden then
    select o.* into v_override from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > v_now;
    if found then
      v_policy := with_override(v_policy, v_override);
    end if;
    if (v_policy.calendar).lease is not null then
      return peek_slots(v_policy, v_key, v_cost, v_now);
    end if;
  end if;
  if (v_policy.calendar).ends_at is not null then
    select b.level, b.retry_us, b.reset_us into v_level, v_retry_us, v_reset_us from look_past_end(v_policy, v_key, v_now, v_cost) as b;
  elsif v_policy.durable then
    select refilled(b.level, b.refilled_at, v_now, v_policy),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy)
           end,
           wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
      into v_level, v_retry_us, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
  else
    select refilled(b.level, b.refilled_at, v_now, v_policy),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_until(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy)
           end,
           wait_until(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy)
      into v_level, v_retry_us, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
  end if;
  if not found then  -- full
    v_level    := microtokens(v_policy.capacity);
    v_retry_us := case when v_cost <= v_policy.capacity or v_cost = 0 then 0::bigint end;
    v_reset_us := 0;
  end if;
  return answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit.peek(text, text, bigint) is 'What ratelimit_peek does, for the guards.';

-- The steps of decide_in_order on the rows of buckets and idempotency_keys. Each function is about the buckets of one
-- policy. keys are the keys of these buckets, in order, and the arrays after it are parallel to it. live_idempotency_keys has others.

-- Reads the buckets: numbers, the policy with the numbers that apply to the key; ends_at, when a part of these ends, null: none does;
-- turns, of a quota; after, what applies after ends_at; levels, as stored (of a quota with the capacity added), and refilled_at;
-- levels_now; has_row. A bucket whose row the caller has just created stands for one without, which is full by numbers and after.
create or replace function ratelimit.rows_of_buckets(
    in policy ratelimit.policies, in keys text[], in created boolean[], in now timestamptz,
    out numbers ratelimit.policies[], out ends_at timestamptz[], out turns ratelimit.turns[], out after ratelimit.policies[], out levels bigint[], out refilled_at timestamptz[], out levels_now bigint[], out has_row boolean[])
  language plpgsql stable
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
begin
  if v_policy.kind = 'quota' then
    select array_agg(filling(u.p, u.turns, b.refilled_at) order by u.n), array_agg(u.ends_at order by u.n), array_agg(u.turns order by u.n), array_agg(u.after order by u.n),
           array_agg(microtokens((u.p).capacity) + coalesce(b.level, 0) order by u.n),
           array_agg(coalesce(b.refilled_at, v_now) order by u.n),
           array_agg(coalesce(level_now(b.level, b.refilled_at, v_now, u.p, u.turns), microtokens((u.p).capacity)) order by u.n),
           array_agg(b.level is not null order by u.n)
      into numbers, ends_at, turns, after, levels, refilled_at, levels_now, has_row
      from (select u.key, u.created, u.n, (u.numbers).policy as p, (u.numbers).ends_at, (u.numbers).turns, (u.numbers).after
              from (select u.*, numbers_of_key(v_policy, u.key, v_now) as numbers
                      from unnest(keys, created) with ordinality as u (key, created, n)
                    offset 0) as u
            offset 0) as u
      left join lateral (select b.level, b.refilled_at
                           from buckets as b
                          where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on u.created is not true;
    return;
  end if;
  select array_agg(u.p order by u.n), array_agg(u.ends_at order by u.n), array_agg(u.after order by u.n),
         array_agg(coalesce(b.level, microtokens(greatest((u.p).capacity, (u.after).capacity))) order by u.n),
         array_agg(coalesce(b.refilled_at, v_now) order by u.n),
         array_agg(case when b.level is null then microtokens((u.p).capacity) else refilled(b.level, b.refilled_at, v_now, u.p) end order by u.n),
         array_agg(b.level is not null order by u.n)
    into numbers, ends_at, after, levels, refilled_at, levels_now, has_row
    from (select u.key, u.created, u.n, coalesce((u.numbers).policy, v_policy) as p, (u.numbers).ends_at, (u.numbers).after
            from (select u.*, case when v_policy.overridden then
                                (select numbers_by(v_policy, o, v_now) from overrides as o where o.policy_id = v_policy.id and o.key = u.key collate "C")
                              end as numbers
                    from unnest(keys, created) with ordinality as u (key, created, n)
                  offset 0) as u
          offset 0) as u
    left join lateral (select b.level, b.refilled_at
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1) as b on u.created is not true;
end;
$$;
comment on function ratelimit.rows_of_buckets(ratelimit.policies, text[], boolean[], timestamptz) is
  'The buckets of one policy as they are now, and the numbers that apply to each.';

-- Reads the idempotency keys that are live, of the elements on the buckets from_bucket to to_bucket. expires_at is compared after the
-- row is found, as in ratelimit_acquire. The function is inlined.
create or replace function ratelimit.live_idempotency_keys(
    policy_id bigint, keys text[], from_bucket integer, to_bucket integer, buckets integer[], charges bigint[], idempotency_keys text[], now timestamptz)
  returns table (place integer, granted ratelimit.idempotency_keys) language sql stable
as $$
  select u.place::integer, k.granted
    from unnest(buckets, charges, idempotency_keys) with ordinality as u (bucket, charge, idempotency_key, place)
   cross join lateral (select row(k.*)::ratelimit.idempotency_keys as granted, k.expires_at
                         from ratelimit.idempotency_keys as k
                        where k.policy_id       = live_idempotency_keys.policy_id
                          and k.key             = keys[u.bucket] collate "C"
                          and k.idempotency_key = u.idempotency_key collate "C"
                       offset 0) as k
   where u.bucket between from_bucket and to_bucket
     and u.charge > 0
     and k.expires_at > now
$$;
comment on function ratelimit.live_idempotency_keys(bigint, text[], integer, integer, integer[], bigint[], text[], timestamptz) is
  'The grants that live idempotency keys of a batch remember, by the number of the element.';

-- Locks the buckets that are wanted, in order, and answers which of their rows it has created: a bucket without a row gets one, which
-- is full.
create or replace function ratelimit.lock_buckets(policy_id bigint, keys text[], wanted boolean[], numbers ratelimit.policies[], now timestamptz)
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
      perform from buckets as b  -- by its newest row version, as in take.sql
        where b.policy_id = v_policy_id
          and b.key      >= v_key
          and b.key      <= v_key
        order by b.key desc
        limit 1
          for update;
      exit when found;
      insert into buckets (policy_id, key, level, refilled_at, due_at, counts_from)
      values (v_policy_id, v_key, stored_level(microtokens(numbers[v_n].capacity), numbers[v_n]), now, now,  -- due at once, as in ratelimit_charge
              counts_from(numbers[v_n], now))
      on conflict on constraint buckets_pkey do nothing;
      v_created[v_n] := found;
      exit when found;
    end loop;
  end loop;
  return v_created;
end;
$$;
comment on function ratelimit.lock_buckets(bigint, text[], boolean[], ratelimit.policies[], timestamptz) is
  'Locks the wanted buckets of one policy, in order, and answers which rows it has created.';

-- Creates the rows of the buckets that are wanted and have none, and answers how many.
create or replace function ratelimit.create_buckets(
    policy_id bigint, keys text[], wanted boolean[], has_row boolean[], levels bigint[], refilled_at timestamptz[], numbers ratelimit.policies[])
  returns bigint language plpgsql volatile
as $$
declare
  v_created bigint;
begin
  insert into buckets (policy_id, key, level, refilled_at, due_at, counts_from)
  select create_buckets.policy_id, u.key, u.level, u.refilled_at, due_after(u.reset_us, u.refilled_at), counts_from(u.p, u.refilled_at)
    from (select u.*, long_wait((u.p).full_level, u.level, 0, u.p) as reset_us
            from (select u.*, numbers[u.n] as p
                    from unnest(keys, wanted, has_row, levels, create_buckets.refilled_at)
                         with ordinality as u (key, wanted, has_row, level, refilled_at, n)
                   where u.wanted and not u.has_row
                  offset 0) as u
          offset 0) as u
   order by u.key collate "C"
  on conflict on constraint buckets_pkey do nothing;
  get diagnostics v_created = row_count;
  return v_created;
end;
$$;
comment on function ratelimit.create_buckets(bigint, text[], boolean[], boolean[], bigint[], timestamptz[], ratelimit.policies[]) is
  'Creates the rows of the wanted buckets of one policy that have none, and answers how many.';

-- Writes the locked buckets that are wanted, and answers how many. It removes the rows that lock_buckets has created for
-- buckets that are not wanted.
create or replace function ratelimit.write_buckets(
    policy ratelimit.policies, keys text[], wanted boolean[], created boolean[], levels bigint[], refilled_at timestamptz[])
  returns bigint language plpgsql volatile
as $$
declare
  v_policy  alias for policy;
  v_written bigint;
begin
  for v_n in 1..cardinality(keys) loop
    continue when wanted[v_n] or not created[v_n];
    delete from buckets as b where b.policy_id = v_policy.id and b.key = keys[v_n] collate "C";
  end loop;
  update buckets as b
     set level = u.level, refilled_at = u.refilled_at, room = null
    from unnest(keys, wanted, levels, write_buckets.refilled_at) as u (key, wanted, level, refilled_at)
   where u.wanted
     and b.ctid = (select b.ctid
                         from buckets as b
                        where b.policy_id = v_policy.id
                           and b.key      >= u.key collate "C"
                           and b.key      <= u.key collate "C"
                         order by b.key desc
                         limit 1);
  get diagnostics v_written = row_count;
  return v_written;
end;
$$;
comment on function ratelimit.write_buckets(ratelimit.policies, text[], boolean[], boolean[], bigint[], timestamptz[]) is
  'Writes the wanted buckets of one policy, which are locked, and answers how many.';

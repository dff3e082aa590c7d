-- Decides the requests of a batch one after another, as of one instant. It reads no table and writes none: its arguments have all
-- that it needs, and its answer has the buckets and idempotency keys as they are to be stored.
--
-- Parallel to the elements: requests, the number of its request; idempotency_keys, null for none; charges, buckets, same, twins and
-- bad, as of number_buckets; known, the grant that a live idempotency key remembers. Parallel to the buckets: numbers, ends_at, turns,
-- after, levels, refilled_at and levels_now, as of look_at_buckets. levels and refilled_at are answered as they are to be stored.
--
-- wanted tells the buckets that are charged. The answers are parallel to the elements: remaining, retry_us, reset_us, capacities,
-- replayed and shadowed; granted tells of its request whether it is granted, null: refused; charged, whether a bucket is charged for
-- it; fits, whether its bucket allows it; kept, whether its grant is to be remembered. refused are the elements that have an error,
-- one for each request; known has the grant that a repeat differs from.
--
-- The steps for each request:
--   1. Each element is refused, replayed, or it fits or not. Of several errors the first counts, in this order: an argument out of
--      range or a policy of slots, an unknown policy, another cost under the idempotency key, a grant that was settled.
--   2. If all but those of shadow policies fit, the buckets are charged. The next request sees them so.
-- Then the answers are worked out, from the buckets as they were after each request.
create or replace function ratelimit.decide(
    in    requests bigint[], in idempotency_keys text[], in charges bigint[], in buckets integer[], in same integer[], in twins integer[], in bad boolean[],
    inout known ratelimit.idempotency_keys[], in numbers ratelimit.policies[], in ends_at timestamptz[], in turns ratelimit.turns[], in after ratelimit.policies[], inout levels bigint[], inout refilled_at timestamptz[],
    in    levels_now bigint[], in now timestamptz,
    out wanted boolean[], out remaining bigint[], out retry_us bigint[], out reset_us bigint[], out capacities bigint[],
    out replayed boolean[], out shadowed boolean[], out granted boolean[], out charged boolean[], out fits boolean[], out kept boolean[],
    out refused integer[])
  language plpgsql immutable
as $$
declare
  v_count      integer := cardinality(requests);
  v_none       constant boolean[] := array_fill(null::boolean, array[v_count]);
  v_start      integer;        -- the first element of a request
  v_end        integer := 0;   -- the last
  v_b          integer;        -- the bucket of an element
  v_earlier    integer;        -- an element of an earlier request
  v_errors     integer[];      -- by kind of error: the first element that has it
  v_granted    boolean;
  v_charged    boolean;
  v_then_level bigint[]      := array_fill(null::bigint, array[v_count]);       -- parallel to the elements: what the bucket held after the request, ...
  v_then_at    timestamptz[] := array_fill(null::timestamptz, array[v_count]);  -- ... and when
begin
  replayed := v_none;
  shadowed := v_none;
  granted  := v_none;
  charged  := v_none;
  fits     := v_none;
  kept     := array_fill(false, array[v_count]);
  wanted   := array_fill(false, array[cardinality(levels)]);
  while v_end < v_count loop
    v_start   := v_end + 1;
    v_end     := v_start;
    v_granted := true;
    v_charged := false;
    v_errors  := '{}';
    while requests[v_end + 1] = requests[v_start] loop
      v_end := v_end + 1;
    end loop;

    -- 1. Each element.
    for v_i in v_start..v_end loop
      v_b := buckets[v_i];
      if bad[v_i] or numbers[v_b].kind = 'slots' then
        v_errors[1] := coalesce(v_errors[1], v_i);
        continue;
      elsif numbers[v_b].id is null then
        v_errors[2] := coalesce(v_errors[2], v_i);
        continue;
      end if;
      if charges[v_i] > 0 and twins[v_i] is not null and known[v_i] is null then
        -- Granted and remembered by an earlier request of this call? Its twin may have been denied, and a twin of that granted.
        v_earlier := twins[v_i];
        while v_earlier is not null and not kept[v_earlier] loop
          v_earlier := twins[v_earlier];
        end loop;
        if v_earlier is not null and charges[v_earlier] <> charges[v_i] then
          known[v_i] := row(null, charges[v_earlier], null, null, null, null, null, idempotency_keys[v_i], null, null, null, null)::ratelimit.idempotency_keys;
        elsif v_earlier is not null then
          replayed[v_i]     := true;
          v_then_level[v_i] := v_then_level[v_earlier];
          v_then_at[v_i]    := v_then_at[v_earlier];
          fits[v_i]         := true;
          continue;
        end if;
      end if;
      if known[v_i].cost <> charges[v_i] then
        v_errors[3] := coalesce(v_errors[3], v_i);
        continue;
      elsif known[v_i].settled is not null then
        v_errors[4] := coalesce(v_errors[4], v_i);
        continue;
      end if;
      replayed[v_i] := known[v_i].cost is not null;
      if replayed[v_i] then
        fits[v_i] := left_us(known[v_i], now) = 0;  -- a reserved grant may have to wait
      else
        fits[v_i] := charges[v_i] = 0
                     or case when charges[v_i] <= numbers[v_b].capacity then microtokens(charges[v_i]) <= levels_now[v_b] else false end;
      end if;
      v_granted := v_granted and (fits[v_i] or numbers[v_b].shadow);
    end loop;
    if v_errors <> '{}' then
      refused := refused || coalesce(v_errors[1], v_errors[2], v_errors[3], v_errors[4]);
      for v_i in v_start..v_end loop
        fits[v_i] := null;
      end loop;
      continue;
    end if;

    -- 2. The buckets.
    for v_i in v_start..v_end loop
      v_b := buckets[v_i];
      if v_granted and fits[v_i] and not replayed[v_i] and charges[v_i] > 0 then
        v_charged := true;
        if same[v_i] = v_i then
          if not wanted[v_b] then
            wanted[v_b]      := true;
            refilled_at[v_b] := refilled_until(refilled_at[v_b], now, numbers[v_b].tick);
          end if;
          levels_now[v_b] := levels_now[v_b] - microtokens(charges[v_i]);
          levels[v_b]     := levels_now[v_b];
        end if;
        kept[v_i] := idempotency_keys[v_i] is not null;
      end if;
      shadowed[v_i] := not fits[v_i] and numbers[v_b].shadow;
      if v_then_level[v_i] is null then
        v_then_level[v_i] := levels[v_b];
        v_then_at[v_i]    := refilled_at[v_b];
      end if;
    end loop;
    for v_i in v_start..v_end loop
      granted[v_i] := v_granted;
      charged[v_i] := v_charged;
    end loop;
  end loop;

  -- The answers.
  select array_agg(a.remaining order by a.place), array_agg(a.retry_us order by a.place),
         array_agg(a.reset_us order by a.place), array_agg(a.capacity order by a.place)
    into remaining, retry_us, reset_us, capacities
    from (select e.place,
                 case
                   when (e.known).cost is not null then (e.known).remaining
                   else whole_tokens(refilled(e.level, e.refilled_at, decide.now, e.p))
                 end as remaining,
                 case
                   when e.fits or (e.p).shadow then 0
                   when (e.known).cost is not null then left_us(e.known, decide.now)
                   when e.is_special then wait_past_end(e.charge, stored_level(e.level, e.p), e.refilled_at, decide.now, e.p, ends_at[e.bucket], turns[e.bucket], after[e.bucket])
                   when e.charge <= (e.p).capacity then wait_until(microtokens(e.charge), e.level, e.refilled_at, decide.now, e.p)
                 end as retry_us,
                 case
                   when (e.known).cost is not null then microseconds((e.known).reset_after)::bigint
                   when e.is_special then wait_past_end(null, stored_level(e.level, e.p), e.refilled_at, decide.now, e.p, ends_at[e.bucket], turns[e.bucket], after[e.bucket])
                   else wait_until((e.p).full_level, e.level, e.refilled_at, decide.now, e.p)
                 end as reset_us,
                 coalesce((e.known).capacity, (e.p).capacity) as capacity
            from (select u.*, numbers[u.bucket] as p, decide.known[u.place] as known, numbers[u.bucket].kind = 'quota' or ends_at[u.bucket] is not null as is_special
                    from unnest(decide.buckets, charges, decide.fits, v_then_level, v_then_at)
                         with ordinality as u (bucket, charge, fits, level, refilled_at, place)
                  offset 0) as e) as a;
  if after is not null then
    retry_us := waits_of_all(requests, charges, buckets, replayed, numbers, ends_at, after, granted, v_then_level, v_then_at, now, retry_us);
  end if;
end;
$$;
comment on function ratelimit.decide(bigint[], text[], bigint[], integer[], integer[], integer[], boolean[], ratelimit.idempotency_keys[], ratelimit.policies[], timestamptz[], ratelimit.turns[], ratelimit.policies[], bigint[], timestamptz[], bigint[], timestamptz) is
  'Decides the requests of a batch one after another, from buckets and idempotency keys as they were read.';

-- retry_us, where overrides end: the longest wait of a denied request is to be the first instant at which all its elements fit. An
-- element may fit until its override ends, and then no more. While there is one whose override is over by the longest wait, it waits
-- by what applies then.
create or replace function ratelimit.waits_of_all(
    requests bigint[], charges bigint[], buckets integer[], replayed boolean[], numbers ratelimit.policies[],
    ends_at timestamptz[], after ratelimit.policies[], granted boolean[], levels bigint[], refilled_at timestamptz[], now timestamptz, retry_us bigint[])
  returns bigint[] language plpgsql immutable
as $$
declare
  v_count   integer := cardinality(requests);
  v_start   integer;       -- the first element of a request
  v_end     integer := 0;  -- the last
  v_policy  ratelimit.policies;
  v_left_us bigint[];      -- parallel to the elements: microseconds until the numbers end; null: they do not, or do not count any more
  v_longest bigint;
  v_over    boolean;       -- an override is over by then
begin
  for v_i in 1..v_count loop
    v_policy := numbers[buckets[v_i]];
    if ends_at[buckets[v_i]] is not null and replayed[v_i] is false and charges[v_i] > 0 and not v_policy.shadow then
      v_left_us[v_i] := time_until(ends_at[buckets[v_i]], now);
    end if;
  end loop;
  while v_left_us is not null and v_end < v_count loop
    v_start := v_end + 1;
    v_end   := v_start;
    while requests[v_end + 1] = requests[v_start] loop
      v_end := v_end + 1;
    end loop;
    while granted[v_start] is false loop
      select case when count(u.wait_us) = count(*) then max(u.wait_us) end into v_longest from unnest(retry_us[v_start:v_end]) as u (wait_us);
      v_over := false;
      for v_i in v_start..v_end loop
        continue when (v_left_us[v_i] <= v_longest) is not true;
        v_over         := true;
        v_left_us[v_i] := null;
        retry_us[v_i]  := wait_after_end(charges[v_i], stored_level(levels[v_i], numbers[buckets[v_i]]), refilled_at[v_i], now, ends_at[buckets[v_i]], after[buckets[v_i]]);
      end loop;
      exit when not v_over;
    end loop;
  end loop;
  return retry_us;
end;
$$;
comment on function ratelimit.waits_of_all(bigint[], bigint[], integer[], boolean[], ratelimit.policies[], timestamptz[], ratelimit.policies[], boolean[], bigint[], timestamptz[], timestamptz, bigint[]) is
  'The waits of the elements of a batch, where an override may end before all elements of a request fit.';

-- Reads everything that the requests of a batch are decided by: policies, overrides, buckets and idempotency keys.
--
-- The function is STABLE, so all of it is as of one snapshot. If a second statement read the idempotency keys, it could find
-- one whose tokens the bucket had not lost yet. (ratelimit_acquire may read twice: it asks about one bucket, and denies.)
--
-- names, first, keys (bucket_keys), buckets (bucket_numbers) and charges are those of number_buckets. idempotency_keys are those of
-- the elements; null for none. created are the buckets whose rows the caller has just created, which stand for none.
--
-- policies is parallel to names. known is parallel to the elements: grants that live idempotency keys remember. The others
-- are parallel to the buckets, as of rows_of_buckets. after is null if no policy is special.
--
-- Locks and writes nothing.
create or replace function ratelimit.look_at_buckets(
    in  names text[], in first integer[], in keys text[], in created boolean[],
    in  buckets integer[], in charges bigint[], in idempotency_keys text[], in now timestamptz,
    out policies ratelimit.policies[], out known ratelimit.idempotency_keys[],
    out numbers ratelimit.policies[], out ends_at timestamptz[], out turns ratelimit.turns[], out after ratelimit.policies[], out levels bigint[], out refilled_at timestamptz[], out levels_now bigint[], out has_row boolean[])
  language plpgsql stable
as $$
declare
  v_policy ratelimit.policies;
  v_from   integer;
  v_to     integer;
  v_read   record;
  v_found  record;
begin
  known := array_fill(null::ratelimit.idempotency_keys, array[cardinality(buckets)]);
  for v_n in 1..cardinality(names) loop
    v_policy := p from policies as p where p.name = names[v_n] collate "C";
    policies[v_n] := v_policy;
    v_from        := first[v_n];
    v_to          := first[v_n + 1] - 1;
    if v_policy.durable is not false then  -- an unknown policy has no buckets
      v_read := rows_of_buckets(v_policy, keys[v_from:v_to], created[v_from:v_to], now);
    else
      if pg_is_in_recovery() then perform refuse_ephemeral(v_policy); end if;  -- raises 0A000
      v_read := rows_of_ephemeral_buckets(v_policy, keys[v_from:v_to], created[v_from:v_to], now);
    end if;
    if v_policy.special then
      after[v_from:v_to] := v_read.after;
    end if;
    numbers     := numbers || v_read.numbers;
    ends_at     := ends_at || v_read.ends_at;
    turns       := turns || coalesce(v_read.turns, array_fill(null::turns, array[v_to - v_from + 1]));
    levels      := levels || v_read.levels;
    refilled_at := refilled_at || v_read.refilled_at;
    levels_now  := levels_now || v_read.levels_now;
    has_row     := has_row || v_read.has_row;
    if idempotency_keys is null then
      continue;
    elsif v_policy.durable is not false then
      for v_found in
        select k.place, k.granted from live_idempotency_keys(v_policy.id, keys, v_from, v_to, buckets, charges, idempotency_keys, now) as k
      loop
        known[v_found.place] := v_found.granted;
      end loop;
    else
      for v_found in
        select k.place, k.granted from live_ephemeral_idempotency_keys(v_policy.id, keys, v_from, v_to, buckets, charges, idempotency_keys, now) as k
      loop
        known[v_found.place] := v_found.granted;
      end loop;
    end if;
  end loop;
end;
$$;
comment on function ratelimit.look_at_buckets(text[], integer[], text[], boolean[], integer[], bigint[], text[], timestamptz) is
  'The policies, buckets and idempotency keys of many requests, as of one snapshot.';

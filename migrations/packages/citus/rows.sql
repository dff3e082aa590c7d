-- Citus: what is about the buckets of one policy is about one key here. So there is one bucket, and each statement has key = ... as a
-- term of its own, with a local.
create or replace function ratelimit.rows_of_buckets(
    in policy ratelimit.policies, in keys text[], in created boolean[], in now timestamptz,
    out numbers ratelimit.policies[], out ends_at timestamptz[], out turns ratelimit.turns[], out after ratelimit.policies[], out levels bigint[], out refilled_at timestamptz[], out levels_now bigint[], out has_row boolean[])
  language plpgsql volatile
as $$
declare
  v_key         text collate "C"   := keys[1];
  v_numbers     ratelimit.numbers  := numbers_of_key(policy, v_key, now);
  v_policy      ratelimit.policies := v_numbers.policy;
  v_level       bigint;
  v_refilled_at timestamptz;
begin
  if created[1] is not true then
    select b.level, b.refilled_at into v_level, v_refilled_at from buckets as b where b.policy_id = policy.id and b.key = v_key;
  end if;
  numbers     := array[v_policy];
  ends_at     := array[v_numbers.ends_at];
  turns       := array[v_numbers.turns];
  after       := array[v_numbers.after];
  levels      := array[coalesce(v_level, microtokens(greatest(v_policy.capacity, (v_numbers.after).capacity)))];
  levels_now  := array[case when v_level is null then microtokens(v_policy.capacity) else level_now(v_level, v_refilled_at, now, v_policy, v_numbers.turns) end];
  if policy.kind = 'quota' then
    numbers := array[filling(v_policy, v_numbers.turns, v_refilled_at)];
    levels  := array[microtokens(v_policy.capacity) + coalesce(v_level, 0)];
  end if;
  refilled_at := array[coalesce(v_refilled_at, now)];
  has_row     := array[v_level is not null];
end;
$$;
comment on function ratelimit.rows_of_buckets(ratelimit.policies, text[], boolean[], timestamptz) is
  'The bucket of one policy as it is now, and the numbers that apply to it.';

create or replace function ratelimit.live_idempotency_keys(
    policy_id bigint, keys text[], from_bucket integer, to_bucket integer, buckets integer[], charges bigint[], idempotency_keys text[], now timestamptz)
  returns table (place integer, granted ratelimit.idempotency_keys) language plpgsql volatile
as $$
declare
  v_policy_id alias for policy_id;
  v_key       text collate "C" := keys[from_bucket];
  v_named     text collate "C";
begin
  for v_place in 1..cardinality(buckets) loop
    continue when (buckets[v_place] = from_bucket and charges[v_place] > 0 and idempotency_keys[v_place] is not null) is not true;
    v_named := idempotency_keys[v_place];
    select k.* into granted
      from idempotency_keys as k
     where k.policy_id = v_policy_id and k.key = v_key and k.idempotency_key = v_named;
    if granted.expires_at > now then
      place := v_place;
      return next;
    end if;
  end loop;
end;
$$;
comment on function ratelimit.live_idempotency_keys(bigint, text[], integer, integer, integer[], bigint[], text[], timestamptz) is
  'The grants that live idempotency keys of a batch remember, by the number of the element.';

create or replace function ratelimit.lock_buckets(policy_id bigint, keys text[], wanted boolean[], numbers ratelimit.policies[], now timestamptz)
  returns boolean[] language plpgsql volatile
as $$
declare
  v_policy_id alias for policy_id;
  v_key       text collate "C" := keys[1];
  v_full      bigint := stored_level(microtokens(numbers[1].capacity), numbers[1]);
  v_counts_from timestamptz := counts_from(numbers[1], now);
begin
  while wanted[1] loop
    perform b.level from buckets as b where b.policy_id = v_policy_id and b.key = v_key for update;
    exit when found;
    insert into buckets (policy_id, key, level, refilled_at, due_at, counts_from)
    values (v_policy_id, v_key, v_full, now, now, v_counts_from)
    on conflict on constraint buckets_pkey do nothing;
    if found then
      return array[true];
    end if;
  end loop;
  return array[false];
end;
$$;
comment on function ratelimit.lock_buckets(bigint, text[], boolean[], ratelimit.policies[], timestamptz) is
  'Locks the bucket of one policy if it is wanted, and answers whether it has created its row.';

create or replace function ratelimit.create_buckets(
    policy_id bigint, keys text[], wanted boolean[], has_row boolean[], levels bigint[], refilled_at timestamptz[], numbers ratelimit.policies[])
  returns bigint language plpgsql volatile
as $$
declare
  v_policy_id   alias for policy_id;
  v_key         text collate "C"   := keys[1];
  v_level       bigint             := levels[1];
  v_refilled_at timestamptz        := refilled_at[1];
  v_numbers     ratelimit.policies := numbers[1];
  v_due_at      timestamptz;
  v_counts_from timestamptz        := counts_from(numbers[1], refilled_at[1]);
begin
  if not wanted[1] or has_row[1] then
    return 0;
  end if;
  v_due_at := due_after(long_wait(v_numbers.full_level, v_level, 0, v_numbers), v_refilled_at);
  insert into buckets (policy_id, key, level, refilled_at, due_at, counts_from)
  values (v_policy_id, v_key, v_level, v_refilled_at, v_due_at, v_counts_from)
  on conflict on constraint buckets_pkey do nothing;
  return found::integer;
end;
$$;
comment on function ratelimit.create_buckets(bigint, text[], boolean[], boolean[], bigint[], timestamptz[], ratelimit.policies[]) is
  'Creates the row of the bucket of one policy if it is wanted and has none, and answers how many.';

create or replace function ratelimit.write_buckets(
    policy ratelimit.policies, keys text[], wanted boolean[], created boolean[], levels bigint[], refilled_at timestamptz[])
  returns bigint language plpgsql volatile
as $$
declare
  v_policy_id   bigint           := policy.id;
  v_key         text collate "C" := keys[1];
  v_level       bigint           := levels[1];
  v_refilled_at timestamptz      := refilled_at[1];
begin
  if wanted[1] then
    update buckets as b
       set level = v_level, refilled_at = v_refilled_at, room = null
     where b.policy_id = v_policy_id and b.key = v_key;
    return found::integer;
  elsif created[1] then
    delete from buckets as b where b.policy_id = v_policy_id and b.key = v_key;
  end if;
  return 0;
end;
$$;
comment on function ratelimit.write_buckets(ratelimit.policies, text[], boolean[], boolean[], bigint[], timestamptz[]) is
  'Writes the bucket of one policy if it is wanted, which is locked, and answers how many.';

-- It applies from the commit of the caller's transaction on. So ratelimit_reset in the same transaction starts a new plan full.
-- ratelimit_refund there does not: a call that waits for the bucket by then still clamps it to the older capacity.
create or replace function ratelimit_override(
    policy     text,
    key        text,
    capacity   bigint      default null,
    refill     bigint      default null,
    every      interval    default null,
    expires_at timestamptz default null,
    time_zone  text        default null,
    anchor     timestamp   default null,
    lease      interval    default null)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_key        text collate "C" := ratelimit_override.key;
  v_policy     policies;
  v_capacity   bigint;
  v_refill     bigint;
  v_every      interval;
  v_time_zone  text;
  v_anchor     timestamp;
  v_expires_at timestamptz := coalesce(ratelimit_override.expires_at, 'infinity');
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  perform check_numbers(coalesce(ratelimit_override.capacity, 0), 0, '1 microsecond');
  perform check_numbers(0, coalesce(ratelimit_override.refill, 0), '1 microsecond');
  perform check_numbers(0, 0, coalesce(ratelimit_override.every, '1 microsecond'));
  if num_nulls(ratelimit_override.capacity, ratelimit_override.refill, ratelimit_override.every) = 0 then
    perform check_numbers(ratelimit_override.capacity, ratelimit_override.refill, ratelimit_override.every);
  end if;
  if v_expires_at <= clock() then
    perform refuse('expires_at', v_expires_at::text, 'Pass an instant that lies ahead, or null: the override then stays until it is removed.');
  end if;
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  -- It waits for a session that changes or drops the policy, and keeps others from doing so.
  select p.* into v_policy from policies as p where p.name = ratelimit_override.policy collate "C" for key share;
  if not found then
    perform refuse_unknown(policy);
  end if;
  v_capacity := coalesce(ratelimit_override.capacity, v_policy.capacity);
  v_refill   := coalesce(ratelimit_override.refill, v_policy.refill);
  v_every    := coalesce(ratelimit_override.every, v_policy.every);
  if v_policy.kind = 'quota' then
    select o.time_zone, o.anchor into v_time_zone, v_anchor from overrides as o where o.policy_id = v_policy.id and o.key = v_key and o.expires_at > clock();
  end if;
  v_time_zone := coalesce(ratelimit_override.time_zone, v_time_zone, v_policy.time_zone);
  v_anchor    := coalesce(ratelimit_override.anchor, v_anchor, v_policy.anchor);
  if v_policy.kind = 'slots' then
    perform check_only_slots(ratelimit_override.refill, ratelimit_override.every, null, null, null, ratelimit_override.time_zone, ratelimit_override.anchor);
    perform check_lease(v_capacity, 0, coalesce(ratelimit_override.lease, v_policy.lease));
  elsif ratelimit_override.lease is not null then
    perform refuse('lease', ratelimit_override.lease::text, 'Only a policy that lends slots has a lease. Leave it out, or drop the policy and define it anew with one.');
  else
    perform check_calendar(ratelimit_override.refill, ratelimit_override.every, null, v_policy.period, ratelimit_override.time_zone, v_anchor);
    perform check_numbers(v_capacity, v_refill, v_every);
  end if;

  update policies as p set overridden = true where p.id = v_policy.id and not p.overridden;
  insert into overrides as o (policy_id, key, capacity, refill, every, stepped, expires_at, time_zone, anchor, lease)
  values (v_policy.id, v_key, v_capacity, v_refill, v_every, v_policy.stepped, v_expires_at, v_time_zone, v_anchor,
          coalesce(ratelimit_override.lease, v_policy.lease))
  on conflict on constraint overrides_pkey do update
     set capacity   = excluded.capacity,
         refill     = excluded.refill,
         every      = excluded.every,
         stepped    = excluded.stepped,
         expires_at = excluded.expires_at,
         time_zone  = excluded.time_zone,
         anchor     = excluded.anchor,
         lease      = excluded.lease;
end;
$$;
comment on function ratelimit_override(text, text, bigint, bigint, interval, timestamptz, text, timestamp, interval) is
'Gives one key of a policy numbers of its own, in place of an earlier override of the key.
The override applies to calls that begin after the transaction commits. A bucket with a row keeps its level, cut to
  the new capacity. A bucket without a row is full at the new capacity.
stepped, durable, remember, shadow and period stay the values of the policy.
Of a policy that lends slots, a key has capacity, lease and expires_at. A lease that runs keeps its end.
capacity: as in ratelimit_define_policy. null: the capacity of the policy as of this call. 0 blocks the key.
refill: as in ratelimit_define_policy. null: the refill of the policy as of this call.
every: as in ratelimit_define_policy. null: the interval of the policy as of this call.
time_zone: as in ratelimit_define_policy, for a quota only. null: that of the live override of the key, or else of the
  policy as of this call.
anchor: likewise.
lease: as in ratelimit_define_policy, for a policy that lends slots only. null: the lease of the policy as of this call.
expires_at: a time in the future, from which on the numbers of the policy apply again, counted from when the bucket was
  last written. retry_after and reset_after of the key allow for it. null: the override stays until it is removed.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the override, and the row of the policy against changes, until the transaction ends. Acquires do not wait for
  it.
Writes: the override. The first override of a policy also writes the policy.
Role: administrator.';

create or replace function ratelimit_remove_override(policy text, key text)
  returns boolean
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_key        text collate "C" := ratelimit_remove_override.key;
  v_policy     policies;
  v_expires_at timestamptz;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  v_policy := policy_named(policy);
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  delete from overrides as o
   where o.policy_id = v_policy.id
     and o.key       = v_key
  returning o.expires_at into v_expires_at;
  return coalesce(v_expires_at > clock(), false);
end;
$$;
comment on function ratelimit_remove_override(text, text) is
'Removes the override of one key, and returns true if the override had not expired.
The numbers of the policy apply to calls that begin after the transaction commits.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the override until the transaction ends.
Writes: deletes the override.
Role: administrator.';

-- The checks of ratelimit_overrides and ratelimit_status, whose own language has none.
create or replace function ratelimit.check_listing(policy text, key text, max_rows integer)
  returns void language plpgsql stable
as $$
begin
  if policy is not null then
    perform ratelimit.check_name('policy', policy);
  end if;
  if key is not null then
    perform ratelimit.check_name('key', key);
  end if;
  perform ratelimit.check_max_rows(max_rows);
  if policy is not null then
    perform ratelimit.policy_named(policy);
  end if;
end;
$$;
comment on function ratelimit.check_listing(text, text, integer) is
  'Raises 22023 for an argument out of range, and RL001 for an unknown policy.';

create or replace function ratelimit_overrides(policy text default null, key text default null, max_rows integer default 1000)
  returns table (policy text, key text, capacity bigint, refill bigint, every interval, expires_at timestamptz, time_zone text, anchor timestamp, lease interval)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $2, $3);
  select p.name, o.key, o.capacity, case when p.kind = 'tokens' then o.refill end, case when p.kind = 'tokens' then o.every end,
         nullif(o.expires_at, 'infinity'), o.time_zone, o.anchor, o.lease
    from policies as p
   cross join lateral (select o.* from overrides as o where o.policy_id = p.id and o.key = $2 collate "C"  -- through the primary key
                       union all
                       select o.* from overrides as o where o.policy_id = p.id and $2 is null) as o
   where o.expires_at > clock()
     and ($1 is null or p.name = $1 collate "C")
   order by p.name, o.key
   limit $3
$$;
comment on function ratelimit_overrides(text, text, integer) is
'Lists the overrides that have not expired, by policy and key.
policy: null lists the overrides of all policies.
key: null lists the overrides of all keys.
max_rows: 1 or more.
capacity: whole tokens, or slots.
refill: null for a quota and for slots, as every is.
expires_at: null if the override stays until it is removed.
time_zone: null unless the policy is a quota, as anchor is.
lease: null unless the policy lends slots.
Errors: 22023 for a bad argument, RL001 for an unknown policy.
Locks: nothing.
Writes: nothing.
Role: administrator.';

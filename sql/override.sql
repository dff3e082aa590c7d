-- A patch of one part of an override. It applies from the commit of the caller's transaction on. So ratelimit_reset in the same
-- transaction starts a new plan full. ratelimit_refund there does not: a call that waits for the bucket by then still clamps it to the
-- older capacity.
--
-- The row of the override is locked before it is patched. So of two patches at once both count.
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
  returns setof ratelimit.override
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_key     text collate "C" := ratelimit_override.key;
  v_ends    boolean := (ratelimit_override.expires_at <> 'infinity') is true;  -- the patch is of the part that ends
  v_sets    boolean := num_nonnulls(ratelimit_override.capacity, ratelimit_override.refill, ratelimit_override.every,
                                    ratelimit_override.time_zone, ratelimit_override.anchor, ratelimit_override.lease) > 0;
  v_policy  policies;
  v_numbers policies;   -- the policy with the part of the override that is patched
  v_now     timestamptz;
  v_by      text := changed_by();
  v_refill  bigint;
  v_every   interval;
  v_old     overrides;
  v_new     overrides;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  perform check_numbers(coalesce(ratelimit_override.capacity, 0), 0, '1 microsecond');
  perform check_numbers(0, coalesce(ratelimit_override.refill, 0), '1 microsecond');
  perform check_numbers(0, 0, coalesce(ratelimit_override.every, '1 microsecond'));
  if num_nulls(ratelimit_override.capacity, ratelimit_override.refill, ratelimit_override.every) = 0 then
    perform check_numbers(ratelimit_override.capacity, ratelimit_override.refill, ratelimit_override.every);
  end if;
  if not v_sets and not v_ends then
    perform refuse('override', 'empty', 'Pass what the key is to have of its own: capacity, refill, every, time_zone, anchor or lease.');
  elsif v_ends then
    perform refuse(g.argument, g.value, 'No calendar ends by itself. Leave expires_at out, and what ends stays as it is.')
      from (values ('time_zone', ratelimit_override.time_zone), ('anchor', ratelimit_override.anchor::text)) as g (argument, value)
     where g.value is not null;
  end if;
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  -- It waits for a session that changes or drops the policy, and keeps others from doing so.
  select p.* into v_policy from policies as p where p.name = ratelimit_override.policy collate "C" for key share;
  if not found then
    perform refuse_unknown(policy);
  end if;
  if v_policy.kind = 'slots' then
    perform check_only_slots(ratelimit_override.refill, ratelimit_override.every, null, null, null, ratelimit_override.time_zone, ratelimit_override.anchor);
  elsif ratelimit_override.lease is not null then
    perform refuse('lease', ratelimit_override.lease::text, 'Only a policy that lends slots has a lease. Leave it out, or drop the policy and define it anew with one.');
  else
    perform check_calendar(ratelimit_override.refill, ratelimit_override.every, null, v_policy.period, ratelimit_override.time_zone,
                           coalesce(ratelimit_override.anchor, v_policy.anchor));
  end if;
  update policies as p set overridden = true where p.id = v_policy.id and not p.overridden;
  if v_policy.history is not null and num_nonnulls(ratelimit_override.time_zone, ratelimit_override.anchor) > 0 then
    -- A transaction that has taken from the bucket before its own override has the same order of locks.
    perform from buckets as b where b.policy_id = v_policy.id and b.key = v_key for update;
  end if;

  loop
    select o.* into v_old from overrides as o where o.policy_id = v_policy.id and o.key = v_key for update;
    v_now := clock();  -- the lock may have waited
    if ratelimit_override.expires_at <= v_now then
      perform refuse('expires_at', ratelimit_override.expires_at::text, 'Pass an instant that lies ahead, or null for numbers that stay until the override is removed.');
    end if;
    v_new := v_old;
    if v_new.expires_at <= v_now then
      v_new.expires_at      := null;
      v_new.ending_capacity := null;
      v_new.ending_refill   := null;
      v_new.ending_every    := null;
      v_new.ending_lease    := null;
    end if;
    v_numbers := with_override(v_policy, v_new, case when v_ends then v_now else 'infinity' end);
    if num_nonnulls(ratelimit_override.refill, ratelimit_override.every) > 0 then
      v_refill := coalesce(ratelimit_override.refill, v_numbers.refill);
      v_every  := coalesce(ratelimit_override.every, v_numbers.every);
    end if;
    if v_ends then
      v_new.expires_at      := ratelimit_override.expires_at;
      v_new.ending_capacity := coalesce(ratelimit_override.capacity, v_new.ending_capacity);
      v_new.ending_refill   := coalesce(v_refill, v_new.ending_refill);
      v_new.ending_every    := coalesce(v_every, v_new.ending_every);
      v_new.ending_lease    := coalesce(ratelimit_override.lease, v_new.ending_lease);
    else
      v_new.capacity        := coalesce(ratelimit_override.capacity, v_new.capacity);
      v_new.refill          := coalesce(v_refill, v_new.refill);
      v_new.every           := coalesce(v_every, v_new.every);
      v_new.time_zone       := coalesce(ratelimit_override.time_zone, v_new.time_zone);
      v_new.anchor          := coalesce(ratelimit_override.anchor, v_new.anchor);
      v_new.lease           := coalesce(ratelimit_override.lease, v_new.lease);
      v_new.ending_capacity := case when ratelimit_override.capacity is null then v_new.ending_capacity end;
      v_new.ending_refill   := case when v_refill is null then v_new.ending_refill end;
      v_new.ending_every    := case when v_every is null then v_new.ending_every end;
      v_new.ending_lease    := case when ratelimit_override.lease is null then v_new.ending_lease end;
    end if;
    if num_nonnulls(v_new.ending_capacity, v_new.ending_refill, v_new.ending_lease) = 0 then
      if v_ends then
        perform refuse('expires_at', 'given alone', 'It moves the end of what ends, and nothing of the override of the key ends. Pass the numbers that are to end.');
      end if;
      v_new.expires_at := null;
    end if;
    v_numbers := with_override(v_policy, v_new, case when v_ends then v_now else 'infinity' end);
    if v_sets and v_policy.kind = 'slots' then
      perform check_lease(v_numbers.capacity, 0, v_numbers.lease);
    elsif v_sets then
      perform check_numbers(v_numbers.capacity, v_numbers.refill, v_numbers.every);
    end if;

    exit when v_new is not distinct from v_old;
    if v_policy.history is not null
       and (coalesce(v_new.time_zone, v_policy.time_zone), coalesce(v_new.anchor, v_policy.anchor))
           <> (coalesce(v_old.time_zone, v_policy.time_zone), coalesce(v_old.anchor, v_policy.anchor)) then
      perform change_calendar(v_policy, v_key, v_now);
    end if;
    insert into overrides as o (policy_id, key, changed_at, changed_by, capacity, refill, every, time_zone, anchor, lease,
                                expires_at, ending_capacity, ending_refill, ending_every, ending_lease)
    values (v_policy.id, v_key, v_now, v_by, v_new.capacity, v_new.refill, v_new.every, v_new.time_zone, v_new.anchor, v_new.lease,
            v_new.expires_at, v_new.ending_capacity, v_new.ending_refill, v_new.ending_every, v_new.ending_lease)
    on conflict on constraint overrides_pkey do update
       set changed_at      = excluded.changed_at,
           changed_by      = excluded.changed_by,
           capacity        = excluded.capacity,
           refill          = excluded.refill,
           every           = excluded.every,
           time_zone       = excluded.time_zone,
           anchor          = excluded.anchor,
           lease           = excluded.lease,
           expires_at      = excluded.expires_at,
           ending_capacity = excluded.ending_capacity,
           ending_refill   = excluded.ending_refill,
           ending_every    = excluded.ending_every,
           ending_lease    = excluded.ending_lease
     where v_old.key is not null;
    exit when found;  -- or another session has created it
  end loop;
  return query select o.* from listed_overrides(ratelimit_override.policy, v_key, 2, v_now) as o;
end;
$$;
comment on function ratelimit_override(text, text, bigint, bigint, interval, timestamptz, text, timestamp, interval) is
'Gives one key of a policy numbers of its own, and returns its override as ratelimit_overrides lists it.
An override has two parts. Without expires_at the call sets numbers that stay, and takes the same numbers out of the part that ends.
  With expires_at it sets numbers that end then, on top of those that stay; what ends has one end. expires_at alone moves that end.
Each number applies as the part that ends has it, else as the part that stays has it, else as the policy has it as of each request.
  Numbers of earlier calls remain. ratelimit_remove_override removes both parts.
It returns rows: beside it in a select list, another function is called once more than there are rows. Call it in FROM.
The call applies to calls that begin after the transaction commits. A bucket with a row keeps its level, cut to
  the new capacity. A bucket without a row is full at the new capacity.
stepped, durable, remember, shadow and period stay the values of the policy.
Of a policy that lends slots, a key has capacity, lease and expires_at. A lease that runs keeps its end.
capacity: as in ratelimit_define_policy. null: as it is. 0 blocks the key.
refill: as in ratelimit_define_policy. It and every are one: a call that passes one of them sets both, the other as it applies to the
  part that the call sets.
every: likewise.
time_zone: as in ratelimit_define_policy, for a quota only. null: as it is. It stays: it cannot be passed with expires_at.
anchor: likewise.
lease: as in ratelimit_define_policy, for a policy that lends slots only. null: as it is.
expires_at: a time in the future, from which on what stays applies again, counted from when the bucket was
  last written. retry_after and reset_after of the key allow for it. null or infinity: what is passed stays.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the override, and the row of the policy against changes, until the transaction ends. Acquires do not wait for
  it. Another calendar of a quota with a history locks the bucket row, too.
Writes: the override, unless it was as it is to be. The first override of a policy also writes the policy. Another calendar of a quota
  with a history closes the period that is over.
Role: administrator.';

create or replace function ratelimit_remove_override(policy text, key text)
  returns boolean
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_key     text collate "C" := ratelimit_remove_override.key;
  v_policy  policies;
  v_numbers ratelimit.numbers;
  v_old     overrides;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  v_policy := policy_named(policy);
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  v_numbers := numbers_of_key(v_policy, v_key, clock());
  if v_policy.history is not null and (v_policy.time_zone, v_policy.anchor) is distinct from ((v_numbers.policy).time_zone, (v_numbers.policy).anchor) then
    perform change_calendar(v_policy, v_key, clock());
  end if;
  delete from overrides as o
   where o.policy_id = v_policy.id
     and o.key       = v_key
  returning o.* into v_old;
  return (v_old.stays or v_old.expires_at > clock()) is true;
end;
$$;
comment on function ratelimit_remove_override(text, text) is
'Removes the override of one key, both parts of it, and returns true if a part of it had not ended.
The numbers of the policy apply to calls that begin after the transaction commits.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the override until the transaction ends. Another calendar of a quota with a history locks the bucket row, too.
Writes: deletes the override. Another calendar of a quota with a history closes the period that is over.
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

-- PL/pgSQL, because Citus does not let one SQL function that names a table call another.
create or replace function ratelimit.listed_overrides(policy text, key text, max_rows integer, now timestamptz)
  returns setof ratelimit.override language plpgsql stable
as $$
declare
  v_policy text collate "C" := policy;
  v_key    text collate "C" := key;
begin
  return query
    select p.name, o.key, part.capacity, part.refill, part.every, part.expires_at, part.time_zone, part.anchor, part.lease, o.changed_at, o.changed_by
      from policies as p
     cross join lateral (select o.* from overrides as o where o.policy_id = p.id and o.key = v_key  -- through the primary key
                         union all
                         select o.* from overrides as o where o.policy_id = p.id and v_key is null) as o
     cross join lateral (values (null, o.capacity, o.refill, o.every, o.time_zone, o.anchor, o.lease),
                                (o.expires_at, o.ending_capacity, o.ending_refill, o.ending_every, null, null, o.ending_lease))
                     as part (expires_at, capacity, refill, every, time_zone, anchor, lease)
     where num_nonnulls(part.capacity, part.refill, part.time_zone, part.anchor, part.lease) > 0
       and (part.expires_at > now) is not false
       and (v_policy is null or p.name = v_policy)
     order by p.name, o.key, part.expires_at nulls first
     limit max_rows;
end;
$$;
comment on function ratelimit.listed_overrides(text, text, integer, timestamptz) is
  'The parts of overrides that have not ended by now, at most max_rows of them.';

create or replace function ratelimit_overrides(policy text default null, key text default null, max_rows integer default 1000)
  returns setof ratelimit.override
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $2, $3);
  select * from listed_overrides($1, $2, $3, clock())
$$;
comment on function ratelimit_overrides(text, text, integer) is
'Lists the overrides, by policy and key: a row for the part that stays, and one for the part that ends, until it has ended. null is a
  number that the part leaves to what follows: to the part that stays, or to the policy.
policy: null lists the overrides of all policies.
key: null lists the overrides of all keys.
max_rows: 1 or more.
Errors: 22023 for a bad argument, RL001 for an unknown policy.
Locks: nothing.
Writes: nothing.
Role: administrator.';

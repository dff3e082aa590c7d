create or replace function ratelimit_reset(policy text, key text)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_key       text collate "C" := key;
  v_id        bigint;
  v_durable   boolean;
  v_lease     interval;
  v_history   interval;
  v_turned_at timestamptz;  -- when the period began that runs
begin
  if is_name(key) is not true then
    perform check_name('policy', policy);  -- either raises 22023
    perform check_name('key', key);
  end if;
  select p.id, p.durable, p.lease, p.history into v_id, v_durable, v_lease, v_history from policies as p where p.name = policy collate "C";
  if not found then
    perform refuse_unknown(policy);
  end if;
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  -- Where a key of slots has no row, nobody held by then, and a later lease is none that this call has locked.
  if v_lease is not null then
    if v_durable then
      update slots as s
         set counted_until = '-infinity', due_at = least(s.due_at, clock())
       where s.policy_id = v_id and s.key = v_key;
      if found then
        delete from leases as l where l.policy_id = v_id and l.key = v_key;
      end if;
    else
      update ephemeral_slots as s
         set counted_until = '-infinity', due_at = least(s.due_at, clock())
       where s.policy_id = v_id and s.key = v_key;
      if found then
        delete from ephemeral_leases as l where l.policy_id = v_id and l.key = v_key;
      end if;
    end if;
  elsif v_history is not null then
    v_turned_at := close_period(v_id, v_key, clock());
    delete from buckets as b where b.policy_id = v_id and b.key = v_key and b.refilled_at >= v_turned_at;
  elsif v_durable then
    delete from buckets as b where b.policy_id = v_id and b.key = v_key;
  else
    delete from ephemeral_buckets as b where b.policy_id = v_id and b.key = v_key;
  end if;
end;
$$;
comment on function ratelimit_reset(text, text) is
'Makes one bucket full, and so forgives its debt, or what a quota has counted in the period that runs. Of a policy that lends slots it frees all slots of the key.
Idempotency keys stay.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the row of the bucket or key, if there is one, until the transaction ends.
Writes: deletes the bucket row, or the leases of the key.
Role: administrator.';

-- One batch of ratelimit_reset_all: the buckets of the next 1000 keys after the one of the batch before it; the first passes
-- null. more is true if there may be others.
-- Each is reset as ratelimit_reset does it, which keeps the order.
--
-- Locks:  the rows of the buckets, or of the keys of slots, in the order of key, until the caller's transaction ends.
-- Writes: the buckets, or the leases.
create or replace function ratelimit.reset_batch(in policy text, inout after text, out more boolean)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy policies := policy_named(policy);
  v_after  text collate "C" := coalesce(reset_batch.after, '');
  v_key    text collate "C";
  v_keys   text[];
begin
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  if v_policy.lease is not null and v_policy.durable then
    v_keys := array(select s.key from slots as s where s.policy_id = v_policy.id and s.key > v_after order by s.key limit 1000);
  elsif v_policy.lease is not null then
    v_keys := array(select s.key from ephemeral_slots as s where s.policy_id = v_policy.id and s.key > v_after order by s.key limit 1000);
  elsif v_policy.durable then
    v_keys := array(select b.key from buckets as b where b.policy_id = v_policy.id and b.key > v_after order by b.key limit 1000);
  else
    v_keys := array(select b.key from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key > v_after order by b.key limit 1000);
  end if;
  foreach v_key in array v_keys loop
    perform reset(policy, v_key);
  end loop;
  after := v_key;
  more  := cardinality(v_keys) = 1000;
end;
$$;
comment on function ratelimit.reset_batch(text, text) is
  'One batch of ratelimit_reset_all, and whether another should follow.';

-- It commits, and so runs with the caller's rights and search_path, as ratelimit_cleanup_all does.
create or replace procedure ratelimit_reset_all(policy text)
  language plpgsql
as $$
declare
  v_after text;
  v_batch record;
begin
  -- PostgreSQL's own error would name no grant.
  if (case when pg_catalog.has_schema_privilege('ratelimit', 'usage')
           then pg_catalog.has_function_privilege('ratelimit.reset_batch(pg_catalog.text, pg_catalog.text)', 'execute') end) is not true then
    raise exception 'permission denied for the batches of ratelimit_reset_all'
      using errcode = '42501',
            hint    = pg_catalog.format('Its owner can run: grant usage on schema ratelimit to %1$I; grant execute on function ratelimit.reset_batch to %1$I;', current_user);
  end if;
  loop
    v_batch := ratelimit.reset_batch(ratelimit_reset_all.policy, v_after);
    v_after := v_batch.after;
    commit;
    exit when not v_batch.more;
  end loop;
end;
$$;
comment on procedure ratelimit_reset_all(text) is
'Makes all buckets of a policy full, or frees all its slots, in batches of 1000 keys, and commits after each batch.
Idempotency keys and overrides stay. The call waits for a bucket that another transaction has locked.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction, 2D000 inside a
  transaction.
Locks: the rows of the buckets or keys of a batch, in the order of key, until the batch commits.
Writes: deletes the bucket rows, or the leases.
Role: administrator. The role also needs EXECUTE on ratelimit.reset_batch and USAGE on schema ratelimit.';

-- Citus: a node cleans up its own shards. A statement that finds rows by their row ids must be about a plain table, and a row that
-- another session has locked is to be skipped. The names of policies and overrides are those of their copies on this node.

-- One batch of clean-up of the shards that this node has: of each table at most max_rows rows. The answer is how many buckets
-- and idempotency keys were deleted, and how many rows were deleted or postponed.
--
-- It is called on every node by cleanup_batch, in a transaction of its own.
-- Locks:  the rows that it deletes or postpones, until the end of that transaction.
-- Writes: the same rows; nothing if lock_timeout ended the batch.
create or replace function ratelimit.cleanup_here(max_rows integer, now timestamptz, due_before timestamptz)
  returns bigint[]
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off    -- as in ratelimit_acquire
  set lock_timeout = '100ms'  -- SKIP LOCKED can still block: see above
  set citus.enable_manual_changes_to_shards = on  -- a shard is changed as the plain table that it is on its node
as $$
declare
  v_policies  text;  -- the names of the copies
  v_overrides text;
  v_shard     record;
  v_left      integer;
  v_read      bigint;
  v_deleted   bigint;
  v_rows      bigint := 0;
  v_buckets   bigint := 0;
  v_keys      bigint := 0;
begin
  select shard_name(s.logicalrelid, s.shardid) into v_policies from pg_dist_shard as s where s.logicalrelid = 'policies'::regclass;
  select shard_name(s.logicalrelid, s.shardid) into v_overrides from pg_dist_shard as s where s.logicalrelid = 'overrides'::regclass;
  for v_pass in 1..2 loop
    exit when v_pass = 2 and v_rows > 0;  -- rows of dropped policies can wait for an idle batch
    for v_shard in
      select s.logicalrelid, shard_name(s.logicalrelid, s.shardid) as name, s.logicalrelid in ('buckets'::regclass, 'ephemeral_buckets'::regclass) as buckets,
             s.logicalrelid in ('slots'::regclass, 'ephemeral_slots'::regclass) as slots,
             (select shard_name(l.logicalrelid, l.shardid)  -- the shard of the same keys
                from pg_dist_shard as l
               where l.logicalrelid = case s.logicalrelid when 'slots'::regclass then 'leases'::regclass when 'ephemeral_slots'::regclass then 'ephemeral_leases'::regclass end
                 and l.shardminvalue = s.shardminvalue) as leases,
             (select shard_name(u.logicalrelid, u.shardid)
                from pg_dist_shard as u
               where u.logicalrelid = 'usage'::regclass
                 and u.shardminvalue = s.shardminvalue) as usage
        from pg_dist_shard as s
        join pg_dist_placement as p on p.shardid = s.shardid
        join pg_dist_local_group as g on g.groupid = p.groupid
       where s.logicalrelid in ('buckets'::regclass, 'ephemeral_buckets'::regclass, 'idempotency_keys'::regclass, 'ephemeral_idempotency_keys'::regclass,
                                'slots'::regclass, 'ephemeral_slots'::regclass, 'leases'::regclass, 'ephemeral_leases'::regclass, 'usage'::regclass)
         and p.shardstate = 1
       order by s.logicalrelid, random()
    loop
      v_left := max_rows;
      if v_pass = 2 then
        v_deleted := cleanup_orphans(v_shard.name::regclass, v_policies::regclass, v_left);
        v_read    := v_deleted;
      elsif v_shard.buckets then
        select c.read, c.deleted into v_read, v_deleted
          from cleanup_buckets(v_shard.name::regclass, v_shard.usage::regclass, v_policies::regclass, v_overrides::regclass, v_left, now, due_before) as c;
      elsif v_shard.slots then
        select c.read, c.deleted into v_read, v_deleted from cleanup_slots(v_shard.name::regclass, v_shard.leases::regclass, v_left, now, due_before) as c;
      elsif v_shard.logicalrelid in ('leases'::regclass, 'ephemeral_leases'::regclass) then
        continue;  -- with the slots
      else
        v_deleted := cleanup_expired(v_shard.name::regclass, v_left, due_before);
        v_read    := v_deleted;
      end if;
      v_rows := v_rows + v_read;
      if v_shard.logicalrelid = 'usage'::regclass then
        continue;
      elsif v_shard.logicalrelid not in ('idempotency_keys'::regclass, 'ephemeral_idempotency_keys'::regclass) then
        v_buckets := v_buckets + v_deleted;
      else
        v_keys := v_keys + v_deleted;
      end if;
    end loop;
  end loop;
  return array[v_buckets, v_keys, v_rows];
exception when lock_not_available then
  return array[0, 0, 1];  -- the locked row may be due
end;
$$;
comment on function ratelimit.cleanup_here(integer, timestamptz, timestamptz) is
  'One batch of clean-up of the shards of this node.';

-- One batch of each node, and of the overrides; the arguments and results are those that sql/cleanup_batch.sql explains. The batch
-- of a node is a transaction of its own, and is at most max_rows rows of each shard. A node that cannot be reached is left out,
-- with a warning.
-- Locks and writes: as cleanup_here on all nodes; overrides of which a part has ended.
create or replace function ratelimit.cleanup_batch(
    in    max_rows                 integer,
    in    budget                   interval,
    inout due_before               timestamptz,
    inout deadline                 timestamptz,
    out   buckets_deleted          bigint,
    out   idempotency_keys_deleted bigint,
    out   more                     boolean)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set datestyle = 'ISO'
as $$
declare
  v_now    timestamptz := clock() - interval '5 minutes';  -- rows are judged as of this instant
  v_node   record;
  v_counts bigint[];
  v_rows   bigint := 0;
begin
  perform check_max_rows(max_rows);
  if (budget > interval '0') is not true then
    perform refuse('budget', budget::text, 'Pass an interval above zero, such as ''50 seconds''.');
  end if;
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  due_before               := least(due_before, v_now);  -- least ignores null; a caller cannot look past v_now
  deadline                 := coalesce(deadline, clock_timestamp() + least(budget, interval '1000 years'));
  buckets_deleted          := 0;
  idempotency_keys_deleted := 0;
  for v_node in
    select * from run_command_on_all_nodes(format('select ratelimit.cleanup_here(%s, %L, %L)', max_rows, v_now, due_before),
                                           parallel => true, give_warning_for_connection_errors => true)
  loop
    if not v_node.success then
      raise warning 'a node was not cleaned up' using detail = format('Node %s: %s', v_node.nodeid, v_node.result);
      continue;
    end if;
    v_counts                 := v_node.result::bigint[];
    buckets_deleted          := buckets_deleted + v_counts[1];
    idempotency_keys_deleted := idempotency_keys_deleted + v_counts[2];
    v_rows                   := v_rows + v_counts[3];
  end loop;
  if exists (select from overrides as o where o.expires_at <= due_before) then
    delete from overrides as o where o.expires_at <= due_before and not o.stays;
    update overrides as o
       set expires_at = null, ending_capacity = null, ending_refill = null, ending_every = null, ending_lease = null
     where o.expires_at <= due_before;
    v_rows := v_rows + 1;
  end if;
  more := v_rows > 0 and clock_timestamp() < deadline;
end;
$$;
comment on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) is
  'One batch of clean-up on all nodes, and whether another should follow.';

{{- /* What is different on Citus, by the names of the passages of sql/ that it replaces. This file is read after them.
       A twin runs on the node that has the shard of its key. There each statement about buckets or idempotency keys must have
       key = ... as a term of its own, with a local; rows have no ids; and nothing may reach for another node. What is about the
       buckets of one policy is about one key here: so there is one bucket. */ -}}

{{- /* ratelimit_acquire_all leaves all requests to acquire_batch. */ -}}
{{ define "simple_request" }}-- Citus: acquire_batch decides.{{ end -}}

{{- /* A lock of a reference table would reach for all nodes. */ -}}
{{ define "lock_policies" }}-- Citus: a reference table is not locked here.{{ end -}}

{{- /* The rows are left to clean-up. */ -}}
{{ define "delete_rows_of_policy" }}null;  -- Citus: its rows are left to clean-up{{ end -}}

{{ define "rows.sql" -}}
create or replace function ratelimit.rows_of_{{ .buckets }}(
    in policy ratelimit.policies, in keys text[], in created boolean[], in now timestamptz,
    out numbers ratelimit.policies[], out levels bigint[], out refilled_at timestamptz[], out levels_now bigint[], out has_row boolean[])
  language plpgsql
  volatile
as $$
declare
  v_key         text collate "C"   := keys[1];
  v_numbers     ratelimit.policies := policy;
  v_override    ratelimit.overrides;
  v_level       bigint;
  v_refilled_at timestamptz;
begin
  if (policy.calendar).period is not null then
    v_numbers := quota_of_key(policy, v_key, now);
  elsif policy.overridden then
    select o.* into v_override from overrides as o where o.policy_id = policy.id and o.key = v_key and o.expires_at > now;
    if found then
      v_numbers := with_override(policy, v_override);
    end if;
  end if;
  if created[1] is not true then
    select b.level, b.refilled_at into v_level, v_refilled_at from {{ .buckets }} as b where b.policy_id = policy.id and b.key = v_key;
  end if;
  numbers     := array[v_numbers];
  levels      := array[coalesce(v_level, microtokens(greatest(v_numbers.capacity, policy.capacity)))];
  levels_now  := array[case when v_level is null then microtokens(v_numbers.capacity) else level_now(v_level, v_refilled_at, now, v_numbers) end];
  if (policy.calendar).period is not null then
    numbers := array[filling(v_numbers, v_refilled_at)];
    levels  := array[microtokens(v_numbers.capacity) + coalesce(v_level, 0)];
  end if;
  refilled_at := array[coalesce(v_refilled_at, now)];
  has_row     := array[v_level is not null];
end;
$$;
comment on function ratelimit.rows_of_{{ .buckets }}(ratelimit.policies, text[], boolean[], timestamptz) is
  'The bucket of one policy as it is now, and the numbers that apply to it.';

create or replace function ratelimit.live_{{ .idempotency_keys }}(
    policy_id bigint, keys text[], from_bucket integer, to_bucket integer, buckets integer[], charges bigint[], idempotency_keys text[], now timestamptz)
  returns table (place integer, granted ratelimit.idempotency_keys)
  language plpgsql
  volatile
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
      from {{ .idempotency_keys }} as k
     where k.policy_id = v_policy_id and k.key = v_key and k.idempotency_key = v_named;
    if granted.expires_at > now then
      place := v_place;
      return next;
    end if;
  end loop;
end;
$$;
comment on function ratelimit.live_{{ .idempotency_keys }}(bigint, text[], integer, integer, integer[], bigint[], text[], timestamptz) is
  'The grants that live idempotency keys of a batch remember, by the number of the element.';

create or replace function ratelimit.lock_{{ .buckets }}(policy_id bigint, keys text[], wanted boolean[], numbers ratelimit.policies[], now timestamptz)
  returns boolean[]
  language plpgsql
  volatile
as $$
declare
  v_policy_id alias for policy_id;
  v_key       text collate "C" := keys[1];
  v_full      bigint := stored_level(microtokens(numbers[1].capacity), numbers[1]);
begin
  while wanted[1] loop
    perform b.level from {{ .buckets }} as b where b.policy_id = v_policy_id and b.key = v_key for update;
    exit when found;
    insert into {{ .buckets }} (policy_id, key, level, refilled_at, due_at)
    values (v_policy_id, v_key, v_full, now, now)
    on conflict on constraint {{ .buckets }}_pkey do nothing;
    if found then
      return array[true];
    end if;
  end loop;
  return array[false];
end;
$$;
comment on function ratelimit.lock_{{ .buckets }}(bigint, text[], boolean[], ratelimit.policies[], timestamptz) is
  'Locks the bucket of one policy if it is wanted, and answers whether it has created its row.';

create or replace function ratelimit.create_{{ .buckets }}(
    policy_id bigint, keys text[], wanted boolean[], has_row boolean[], levels bigint[], refilled_at timestamptz[], numbers ratelimit.policies[])
  returns bigint
  language plpgsql
  volatile
as $$
declare
  v_policy_id   alias for policy_id;
  v_key         text collate "C"   := keys[1];
  v_level       bigint             := levels[1];
  v_refilled_at timestamptz        := refilled_at[1];
  v_numbers     ratelimit.policies := numbers[1];
  v_due_at      timestamptz;
begin
  if not wanted[1] or has_row[1] then
    return 0;
  end if;
  v_due_at := due_after(short_wait(v_numbers.full_level, v_level, 0, v_numbers), v_refilled_at);
  insert into {{ .buckets }} (policy_id, key, level, refilled_at, due_at)
  values (v_policy_id, v_key, v_level, v_refilled_at, v_due_at)
  on conflict on constraint {{ .buckets }}_pkey do nothing;
  return found::integer;
end;
$$;
comment on function ratelimit.create_{{ .buckets }}(bigint, text[], boolean[], boolean[], bigint[], timestamptz[], ratelimit.policies[]) is
  'Creates the row of the bucket of one policy if it is wanted and has none, and answers how many.';

create or replace function ratelimit.write_{{ .buckets }}(
    policy ratelimit.policies, keys text[], wanted boolean[], created boolean[], levels bigint[], refilled_at timestamptz[])
  returns bigint
  language plpgsql
  volatile
as $$
declare
  v_policy_id   bigint           := policy.id;
  v_key         text collate "C" := keys[1];
  v_level       bigint           := levels[1];
  v_refilled_at timestamptz      := refilled_at[1];
begin
  if wanted[1] then
    update {{ .buckets }} as b
       set level = v_level, refilled_at = v_refilled_at, room = null
     where b.policy_id = v_policy_id and b.key = v_key;
    return found::integer;
  elsif created[1] then
    delete from {{ .buckets }} as b where b.policy_id = v_policy_id and b.key = v_key;
  end if;
  return 0;
end;
$$;
comment on function ratelimit.write_{{ .buckets }}(ratelimit.policies, text[], boolean[], boolean[], bigint[], timestamptz[]) is
  'Writes the bucket of one policy if it is wanted, which is locked, and answers how many.';
{{- end }}
{{ define "remember.sql" -}}
create or replace function ratelimit.remember_{{ .idempotency_keys }}(
    policy ratelimit.policies, keys text[], idempotency_keys text[], costs bigint[], now timestamptz, new boolean,
    places bigint[], remaining bigint[], capacities bigint[], reset_us bigint[])
  returns boolean
  language plpgsql
  volatile
as $$
declare
  v_now         alias for now;
  v_all         alias for idempotency_keys;
  v_key         text collate "C";
  v_named       text collate "C";
  v_cost        bigint;
  v_remaining   bigint;
  v_capacity    bigint;
  v_policy_id   bigint := policy.id;
  v_reset_after interval;
  v_expires_at  timestamptz;
  v_granted_at  timestamptz := case when (policy.calendar).period is not null then now end;
begin
  for v_n in 1..cardinality(places) loop
    v_named       := v_all[places[v_n]];
    continue when v_named is null;
    v_key         := keys[places[v_n]];
    v_cost        := costs[places[v_n]];
    v_remaining   := remaining[v_n];
    v_capacity    := capacities[v_n];
    v_reset_after := duration(reset_us[v_n]);
    v_expires_at  := v_now + duration(policy.remember_us);
    insert into {{ .idempotency_keys }} as k
           (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at, granted_at)
    values (v_policy_id, v_key, v_named, v_cost, v_remaining, v_reset_after, v_capacity, v_expires_at, v_granted_at)
    {{ template "include/unless_live.sql" . }};
    if not found then
      return false;
    end if;
  end loop;
  return true;
end;
$$;
comment on function ratelimit.remember_{{ .idempotency_keys }}(ratelimit.policies, text[], text[], bigint[], timestamptz, boolean, bigint[], bigint[], bigint[], bigint[]) is
  'Stores the idempotency keys of granted elements; false if one of them is live already.';
{{- end }}

{{- /* A node cleans up its own shards: a statement that finds rows by their row ids must be about a plain table, and a row that
       another session has locked is to be skipped. The names of policies and overrides are those of their copies on this node. */ -}}
{{ define "cleanup_batch.sql" -}}
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
  v_most_us   constant bigint := 86400000000;  -- by which a bucket is postponed: 24 hours
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
                 and l.shardminvalue = s.shardminvalue) as leases
        from pg_dist_shard as s
        join pg_dist_placement as p on p.shardid = s.shardid
        join pg_dist_local_group as g on g.groupid = p.groupid
       where s.logicalrelid in ('buckets'::regclass, 'ephemeral_buckets'::regclass, 'idempotency_keys'::regclass, 'ephemeral_idempotency_keys'::regclass,
                                'slots'::regclass, 'ephemeral_slots'::regclass, 'leases'::regclass, 'ephemeral_leases'::regclass)
         and p.shardstate = 1
       order by s.logicalrelid, random()
    loop
      v_left := max_rows;
      if v_pass = 2 then
        execute format($orphans$ {{ template "include/orphans.sql" (dict "table" "%1$s" "policies" "%2$s" "max_rows" "$1") }} $orphans$, v_shard.name, v_policies)
          using v_left;
        get diagnostics v_deleted = row_count;
        v_read := v_deleted;
      elsif v_shard.buckets then
        execute format($due$ {{ template "include/due_buckets.sql" (dict "table" "%1$s" "policies" "%2$s" "overrides" "%3$s" "now" "$2" "due_before" "$3" "max_rows" "$1" "most_us" "$4") }} $due$,
                       v_shard.name, v_policies, v_overrides)
           into v_read, v_deleted using v_left, now, due_before, v_most_us;
      elsif v_shard.slots then
        select c.read, c.deleted into v_read, v_deleted from cleanup_slots(v_shard.name::regclass, v_shard.leases::regclass, v_left, now, due_before) as c;
      elsif v_shard.logicalrelid in ('leases'::regclass, 'ephemeral_leases'::regclass) then
        continue;  -- with the slots
      else
        execute format($expired$ {{ template "include/expired_keys.sql" (dict "table" "%1$s" "due_before" "$2" "max_rows" "$1") }} $expired$, v_shard.name)
          using v_left, due_before;
        get diagnostics v_deleted = row_count;
        v_read := v_deleted;
      end if;
      v_rows := v_rows + v_read;
      if v_shard.logicalrelid not in ('idempotency_keys'::regclass, 'ephemeral_idempotency_keys'::regclass) then
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
-- Locks and writes: as cleanup_here on all nodes; expired overrides.
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
  v_deleted bigint;
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
    delete from overrides as o where o.expires_at <= due_before;
    get diagnostics v_deleted = row_count;
    v_rows := v_rows + v_deleted;
  end if;
  more := v_rows > 0 and clock_timestamp() < deadline;
end;
$$;
comment on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) is
  'One batch of clean-up on all nodes, and whether another should follow.';
{{- end -}}

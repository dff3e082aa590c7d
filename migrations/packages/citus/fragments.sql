{{- /* What is different on Citus, by the names of the passages of sql/ that it replaces. This file is read after them.
       A twin runs on the node that has the shard of its key. There each statement about buckets or idempotency keys must have
       key = ... as a term of its own, with a local; rows have no ids; and nothing may reach for another node. Fragments about many
       buckets are about one key here, and about one policy at a time: so v_from is v_to, and there is one bucket. */ -}}

{{- /* ratelimit_acquire_all leaves all requests to acquire_batch. */ -}}
{{ define "simple_request" }}-- Citus: acquire_batch decides.{{ end -}}

{{- /* A lock of a reference table would reach for all nodes. */ -}}
{{ define "lock_policies" }}-- Citus: a reference table is not locked here.{{ end -}}

{{- /* The rows are left to clean-up. */ -}}
{{ define "delete_rows_of_policy" }}null;  -- Citus: its rows are left to clean-up{{ end -}}

{{ define "lock_buckets" -}}
if v_lock[v_from] then
              declare
                v_here text collate "C" := v_key[v_from];
                v_full bigint := microtokens(v_numbers[v_from].capacity);
              begin
                loop
                  perform b.level from {{ . }} as b where b.policy_id = v_policy.id and b.key = v_here for update;
                  exit when found;
                  insert into {{ . }} (policy_id, key, level, refilled_at, due_at)
                  values (v_policy.id, v_here, v_full, v_now, v_now)
                  on conflict on constraint {{ . }}_pkey do nothing;
                  v_created[v_from] := found;
                  exit when found;
                end loop;
              end;
            end if;
{{- end }}
{{ define "write_buckets" -}}
if v_wanted[v_from] then
            declare
              v_here          text collate "C" := v_key[v_from];
              v_level_here    bigint           := v_level[v_from];
              v_refilled_here timestamptz      := v_refilled_at[v_from];
            begin
              update {{ . }} as b
                 set level = v_level_here, refilled_at = v_refilled_here
               where b.policy_id = v_policy.id
                 and b.key       = v_here;
            end;
          else
            perform from generate_series(1, 0);  -- row_count is read next
          end if;
{{- end }}
{{ define "remove_bucket" -}}
declare
              v_here text collate "C" := v_key[v_b];
            begin
              delete from {{ . }} as b where b.policy_id = v_policy.id and b.key = v_here;
            end;
{{- end }}
{{ define "create_buckets" -}}
if v_wanted[v_from] and not v_has_row[v_from] then
            declare
              v_here          text collate "C"   := v_key[v_from];
              v_numbers_here  ratelimit.policies := v_numbers[v_from];
              v_level_here    bigint             := v_level[v_from];
              v_refilled_here timestamptz        := v_refilled_at[v_from];
              v_due_here      timestamptz;
            begin
              v_due_here := v_refilled_here
                            + least(duration({{ template "wait_below" (dict "target" "v_numbers_here.full_level" "level" "v_level_here" "elapsed_us" "0" "policy" "v_numbers_here.") }}),
                                    interval '24 hours');
              insert into {{ . }} (policy_id, key, level, refilled_at, due_at)
              values (v_policy.id, v_here, v_level_here, v_refilled_here, v_due_here)
              on conflict on constraint {{ . }}_pkey do nothing;
            end;
          else
            perform from generate_series(1, 0);  -- row_count is read next
          end if;
{{- end }}
{{ define "look_at_buckets" -}}
declare
        v_here         text collate "C"    := keys[v_from];
        v_numbers_here ratelimit.policies  := v_policy;
        v_override     ratelimit.overrides;
        v_level        bigint;
        v_refilled_at  timestamptz;
      begin
        if v_policy.overridden then
          select o.* into v_override
            from overrides as o
           where o.policy_id = v_policy.id and o.key = v_here and o.expires_at > v_now;
          if found then
            v_numbers_here := overridden(v_policy, v_override);
          end if;
        end if;
        if created[v_from] is not true then
          select b.level, b.refilled_at into v_level, v_refilled_at
            from {{ . }} as b
           where b.policy_id = v_policy.id and b.key = v_here;
        end if;
        levels      := levels || coalesce(v_level, microtokens(v_numbers_here.capacity));
        levels_now  := levels_now || case when v_level is null then microtokens(v_numbers_here.capacity)
                                          else {{ template "refilled_level" (dict "bucket" "v_" "policy" "v_numbers_here.") }} end;
        refilled_at := refilled_at || coalesce(v_refilled_at, v_now);
        has_row     := has_row || (v_level is not null);
        numbers     := numbers || v_numbers_here;
      end;
{{- end }}
{{ define "look_at_keys" -}}
declare
        v_here  text collate "C" := keys[v_from];
        v_named text collate "C";
        v_first ratelimit.idempotency_keys;
      begin
        for v_place in 1..cardinality(buckets) loop
          continue when (buckets[v_place] = v_from and charges[v_place] > 0 and idempotency_keys[v_place] is not null) is not true;
          v_named := idempotency_keys[v_place];
          select k.* into v_first
            from {{ . }} as k
           where k.policy_id       = v_policy.id
             and k.key             = v_here
             and k.idempotency_key = v_named;
          if v_first.expires_at > v_now then
            known[v_place] := v_first;
          end if;
        end loop;
      end;
{{- end }}
{{ define "remember" -}}
declare
      v_here        text collate "C";
      v_named       text collate "C";
      v_cost        bigint;
      v_remaining   bigint;
      v_capacity    bigint;
      v_policy_id   bigint;
      v_reset_after interval;
      v_expires_at  timestamptz;
    begin
      v_stored := 0;
      for v_n in 1..cardinality(places) loop
        v_named := idempotency_keys[places[v_n]];
        continue when is_name(v_named) is not true;
        v_here        := keys[places[v_n]];
        v_cost        := costs[places[v_n]];
        v_policy_id   := policy_ids[v_n];
        v_remaining   := remember.remaining[v_n];
        v_capacity    := capacities[v_n];
        v_reset_after := duration(reset_us[v_n]);
        v_expires_at  := v_now + duration(remember.remember_us[v_n]);
        insert into {{ .keys }} as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy_id, v_here, v_named, v_cost, v_remaining, v_reset_after, v_capacity, v_expires_at)
        {{ template "include/remember.sql" . }};
        v_stored := v_stored + found::integer;
      end loop;
      perform from generate_series(1, v_stored);  -- row_count is read next
    end;
{{- end }}

{{- /* A node cleans up its own shards: a statement that finds rows by their row ids must be about a plain table, and a row that
       another session has locked is to be skipped. The names of policies and overrides are those of their copies on this node. */ -}}
{{ define "cleanup_batch" -}}
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
      select s.logicalrelid, shard_name(s.logicalrelid, s.shardid) as name, s.logicalrelid in ('buckets'::regclass, 'ephemeral_buckets'::regclass) as buckets
        from pg_dist_shard as s
        join pg_dist_placement as p on p.shardid = s.shardid
        join pg_dist_local_group as g on g.groupid = p.groupid
       where s.logicalrelid in ('buckets'::regclass, 'ephemeral_buckets'::regclass, 'idempotency_keys'::regclass, 'ephemeral_idempotency_keys'::regclass)
         and p.shardstate = 1
       order by s.logicalrelid, random()
    loop
      v_left := max_rows;
      if v_pass = 2 then
        execute format($orphans$ {{ template "orphans" (dict "table" "%1$s" "policies" "%2$s" "max_rows" "$1") }} $orphans$, v_shard.name, v_policies)
          using v_left;
        get diagnostics v_deleted = row_count;
        v_read := v_deleted;
      elsif v_shard.buckets then
        execute format($due$ {{ template "due_buckets" (dict "table" "%1$s" "policies" "%2$s" "overrides" "%3$s" "now" "$2" "due_before" "$3" "max_rows" "$1" "most_us" "$4") }} $due$,
                       v_shard.name, v_policies, v_overrides)
           into v_read, v_deleted using v_left, now, due_before, v_most_us;
      else
        execute format($expired$ {{ template "expired_keys" (dict "table" "%1$s" "due_before" "$2" "max_rows" "$1") }} $expired$, v_shard.name)
          using v_left, due_before;
        get diagnostics v_deleted = row_count;
        v_read := v_deleted;
      end if;
      v_rows := v_rows + v_read;
      if v_shard.buckets then
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

-- One batch of each node, and of the overrides; the arguments and results are those that sql/cleanup.sql explains. The batch
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

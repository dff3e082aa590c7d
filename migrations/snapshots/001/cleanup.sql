-- Clean-up removes rows that nobody can tell from absent: buckets that are full again, idempotency keys
-- past their time, and rows whose policy is gone. It finds due rows through an index and skips rows that
-- others hold. An acquire that wants a bucket being removed waits for one batch to commit.
--
-- Clean-up judges every row as of five minutes ago. If the server's clock runs ahead for a moment, a bucket
-- that only looks full and a key that only looks expired are still there when the clock is set right.
--
-- SKIP LOCKED can still block if the row changes hands while it is examined. lock_timeout then ends the
-- batch, so it cannot deadlock with acquires.
{{ define "cleanup_buckets" -}}
with due as materialized (
    select b.ctid as row_id,
           p.id is null
           or wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up) = 0 as removable
      from {{ . }} as b
      left join policies as p on p.id = b.policy_id
     where b.due_at <= due_before
     order by b.due_at
     limit max_rows
       for update of b skip locked
  ), removed as (
    delete from {{ . }} as b
     where b.ctid = any (array(select d.row_id from due as d where d.removable))
    returning 1
  ), postponed as (
    update {{ . }} as b
       set due_at = v_now + (select least(interval '24 hours',
                                          duration(wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up)))
                               from policies as p
                              where p.id = b.policy_id)
     where b.ctid = any (array(select d.row_id from due as d where not d.removable))
  )
  select (select count(*) from due), (select count(*) from removed) into v_read, v_deleted;
  v_rows          := v_rows + v_read;
  buckets_deleted := buckets_deleted + v_deleted;
{{- end -}}
{{ define "cleanup_keys" -}}
delete from {{ . }} as k
   where k.ctid = any (array(select d.ctid
                               from {{ . }} as d
                              where d.expires_at <= due_before
                              order by d.expires_at
                              limit max_rows
                                for update skip locked));
  get diagnostics v_deleted = row_count;
  v_rows                   := v_rows + v_deleted;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
{{- end -}}
{{ define "cleanup_orphans" -}}
with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from {{ .table }} as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from {{ .table }} as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from {{ .table }} as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from {{ .table }} as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  v_rows      := v_rows + v_deleted;
  {{ .counter }} := {{ .counter }} + v_deleted;
{{- end -}}
-- One batch: of each table the rows due by due_before, at most max_rows. The first batch of a round passes
-- null for due_before and deadline; the others pass what the one before returned. more tells whether to go
-- on: the batch found something to do, and the budget, counted from the first batch, is not spent.
--
-- A bucket that is not full yet is looked at again when it may be, at the latest in 24 hours.
-- Locks and writes: the rows it deletes or puts off, until the caller's transaction ends; nothing, should it
--                   have to wait 100 ms for a lock.
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
  set enable_seqscan = off
  set lock_timeout = '100ms'
as $$
declare
  v_now     timestamptz := clock() - interval '5 minutes';
  v_read    bigint;
  v_deleted bigint;
  v_rows    bigint;  -- found, whether deleted or put off
begin
  if (max_rows > 0) is not true then
    perform refuse('max_rows', max_rows::text, 'Pass 1 or more.');
  end if;
  if (budget > interval '0') is not true then
    perform refuse('budget', budget::text, 'Pass an interval above zero, such as ''50 seconds''.');
  end if;
  due_before               := least(due_before, v_now);  -- least ignores null; a caller cannot move the clock ahead
  deadline                 := coalesce(deadline, clock_timestamp() + least(budget, interval '1000 years'));
  buckets_deleted          := 0;
  idempotency_keys_deleted := 0;
  v_rows                   := 0;

  begin
    {{ template "cleanup_buckets" "buckets" }}
    {{ template "cleanup_buckets" "ephemeral_buckets" }}
    {{ template "cleanup_keys" "idempotency_keys" }}
    {{ template "cleanup_keys" "ephemeral_idempotency_keys" }}
    if v_rows = 0 then  -- orphans can wait for an idle batch
      {{ template "cleanup_orphans" (dict "table" "buckets" "counter" "buckets_deleted") }}
      {{ template "cleanup_orphans" (dict "table" "ephemeral_buckets" "counter" "buckets_deleted") }}
      {{ template "cleanup_orphans" (dict "table" "idempotency_keys" "counter" "idempotency_keys_deleted") }}
      {{ template "cleanup_orphans" (dict "table" "ephemeral_idempotency_keys" "counter" "idempotency_keys_deleted") }}
    end if;
  exception when lock_not_available then
    buckets_deleted          := 0;
    idempotency_keys_deleted := 0;
    v_rows                   := 1;  -- somebody's: there may be more to do
  end;
  more := v_rows > 0 and clock_timestamp() < deadline;
end;
$$;
comment on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) is
  'One batch of clean-up, and whether another should follow.';

-- One batch. It can delete nothing and leave due rows: it may have found only buckets that are in use, or given
-- way to a lock. Rows of dropped policies it reaches once nothing else is due. To clean up until nothing is
-- due, call ratelimit_cleanup_all.
create or replace function ratelimit_cleanup(
    in  max_rows                 integer default 10000,
    out buckets_deleted          bigint,
    out idempotency_keys_deleted bigint)
  language sql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select b.buckets_deleted, b.idempotency_keys_deleted from cleanup_batch(max_rows, '1 second', null, null) as b
$$;
comment on function ratelimit_cleanup(integer) is
  'Remove one batch of full buckets and one of expired idempotency keys, at most max_rows rows of each table.';

-- Repeats batches, committing after each, until nothing is due that was due when it began, or the
-- budget is spent. Not SECURITY DEFINER, since that forbids COMMIT: a caller other than the owner
-- needs EXECUTE on this and on ratelimit.cleanup_batch, and USAGE on schema ratelimit. Its
-- search_path is the caller's for the same reason, so its body has no operator and no function but
-- cleanup_batch: somebody may have planted others of that name.
create or replace procedure ratelimit_cleanup_all(budget interval default '50 seconds')
  language plpgsql
as $$
declare
  v_due_before timestamptz;
  v_deadline   timestamptz;
  v_more       boolean;
begin
  loop
    select b.due_before, b.deadline, b.more
      into v_due_before, v_deadline, v_more
      from ratelimit.cleanup_batch(10000, ratelimit_cleanup_all.budget, v_due_before, v_deadline) as b;
    commit;
    exit when not v_more;
  end loop;
end;
$$;
comment on procedure ratelimit_cleanup_all(interval) is
  'Remove all full buckets and expired idempotency keys in short batches, committing between them, for at most budget.';

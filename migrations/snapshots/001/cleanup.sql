-- Clean-up removes what nobody can tell from absent: buckets that are full again, idempotency keys
-- past their time, and rows whose policy is gone. Due rows are found through an index, rows that
-- others hold are skipped; an acquire that wants a bucket being removed waits for one batch to commit.
-- SKIP LOCKED does wait when the holder ends at that moment and another has the next version: then the batch
-- gives way before the two can deadlock.
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
  rows_read       := rows_read + v_read;
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
  rows_read                := rows_read + v_deleted;
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
  rows_read   := rows_read + v_deleted;
  {{ .counter }} := {{ .counter }} + v_deleted;
{{- end -}}
-- One batch: of each table the rows due by due_before, at most max_rows; null means by now, and so
-- does an instant to come.
--
-- A bucket that is not full yet is looked at again when it may be, at the latest in 24 hours.
-- Locks and writes: the rows it deletes or puts off, until the caller's transaction ends; nothing, should it
--                   have to wait 100 ms for a lock.
create or replace function ratelimit.cleanup_batch(
    in    max_rows                 integer,
    inout due_before               timestamptz,
    out   buckets_deleted          bigint,
    out   idempotency_keys_deleted bigint,
    out   rows_read                bigint)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off
  set lock_timeout = '100ms'
as $$
declare
  v_now     timestamptz := clock();
  v_read    bigint;
  v_deleted bigint;
begin
  if (max_rows > 0) is not true then
    perform refuse('max_rows', max_rows::text, 'Pass 1 or more.');
  end if;
  due_before               := least(due_before, v_now);  -- by now, when null
  buckets_deleted          := 0;
  idempotency_keys_deleted := 0;
  rows_read                := 0;

  begin
    {{ template "cleanup_buckets" "buckets" }}
    {{ template "cleanup_buckets" "ephemeral_buckets" }}
    {{ template "cleanup_keys" "idempotency_keys" }}
    {{ template "cleanup_keys" "ephemeral_idempotency_keys" }}
    if rows_read > 0 then
      return;  -- orphans can wait for an idle batch
    end if;
    {{ template "cleanup_orphans" (dict "table" "buckets" "counter" "buckets_deleted") }}
    {{ template "cleanup_orphans" (dict "table" "ephemeral_buckets" "counter" "buckets_deleted") }}
    {{ template "cleanup_orphans" (dict "table" "idempotency_keys" "counter" "idempotency_keys_deleted") }}
    {{ template "cleanup_orphans" (dict "table" "ephemeral_idempotency_keys" "counter" "idempotency_keys_deleted") }}
  exception when lock_not_available then
    buckets_deleted          := 0;
    idempotency_keys_deleted := 0;
    rows_read                := 1;  -- somebody's: there may be more to do
  end;
end;
$$;
comment on function ratelimit.cleanup_batch(integer, timestamptz) is
  'One batch of clean-up, and how many rows it found to look at.';

create or replace function ratelimit_cleanup(
    in  max_rows                 integer default 10000,
    out buckets_deleted          bigint,
    out idempotency_keys_deleted bigint)
  language sql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select b.buckets_deleted, b.idempotency_keys_deleted from cleanup_batch(max_rows, null) as b
$$;
comment on function ratelimit_cleanup(integer) is
  'Remove one batch of full buckets and one of expired idempotency keys, at most max_rows rows of each table.';

-- Repeats batches, committing after each, until nothing is due that was due when it began, or the
-- budget is spent. Not SECURITY DEFINER, since that forbids COMMIT: a caller other than the owner
-- needs EXECUTE on this and on ratelimit.cleanup_batch, and USAGE on schema ratelimit. Its
-- search_path is the caller's for the same reason, so it calls nothing for which somebody's public
-- schema could have a closer match, such as a format(text, text).
create or replace procedure ratelimit_cleanup_all(budget interval default '50 seconds')
  language plpgsql
as $$
declare
  v_deadline   timestamptz;
  v_due_before timestamptz;
  v_rows_read  bigint;
begin
  if (ratelimit_cleanup_all.budget > interval '0') is not true then
    raise exception 'invalid budget'
      using errcode = '22023',
            detail  = 'budget is ' || coalesce(ratelimit_cleanup_all.budget::text, 'null') || '.',
            hint    = 'Pass an interval above zero, such as ''50 seconds''.';
  end if;
  v_deadline := clock_timestamp() + least(ratelimit_cleanup_all.budget, interval '1000 years');
  loop
    select b.due_before, b.rows_read
      into v_due_before, v_rows_read
      from ratelimit.cleanup_batch(10000, v_due_before) as b;
    commit;
    exit when v_rows_read = 0 or clock_timestamp() >= v_deadline;
  end loop;
end;
$$;
comment on procedure ratelimit_cleanup_all(interval) is
  'Remove all full buckets and expired idempotency keys in short batches, committing between them, for at most budget.';

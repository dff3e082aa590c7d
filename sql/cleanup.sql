-- Clean-up removes rows that change no answer: buckets that are full again, expired idempotency keys, expired
-- overrides, and rows whose policy was dropped. A bucket with a live override must be full by the override's numbers and
-- by the policy's, because it must not be full by either when the other applies again. It finds due rows through an index and skips rows that another session has
-- locked. An acquire on a bucket that a batch removes or postpones waits until the batch commits.
--
-- Clean-up judges every row as of five minutes ago. If the server's clock runs ahead for a moment, a bucket
-- that only looks full and a key that only looks expired are still there when the clock is set right.
--
-- SKIP LOCKED can still block if the row changes hands while it is examined. lock_timeout then ends the wait
-- after 100 ms, and the batch gives back its rows. PostgreSQL looks for a deadlock only after a wait of
-- deadlock_timeout, 1 second by default. If that is above 100 ms, a batch that is a transaction of its own gives
-- way before it is found in a deadlock. Only an acquire whose own look falls in those 100 ms can find one. In a
-- longer transaction, the rows of earlier batches stay locked, and it can deadlock with acquires.
{{- /* Removes due buckets that are full or have no policy, and postpones the other due buckets; answers how many were due, and
       how many were removed. The argument table is the name of the table. The others are names, too, in place of those of the
       tables policies and overrides, and of the locals now, due_before, max_rows and most_us. */ -}}
{{ define "due_buckets" -}}
{{ $now := default "v_now" .now -}}
{{ $most_us := default "v_most_us" .most_us -}}
{{ $policies := default "policies" .policies -}}
{{ $overrides := default "overrides" .overrides -}}
with due as materialized (
    select b.ctid as row_id,
           p.id is null
           or {{ template "wait_for" (dict "target" "p.full_level" "bucket" "b." "policy" "p." "now" $now) }} = 0
              and (o.key is null or {{ template "wait_for" (dict "target" "o.full_level" "bucket" "b." "policy" "o." "now" $now) }} = 0) as removable
      from {{ .table }} as b
      left join {{ $policies }} as p on p.id = b.policy_id
      left join {{ $overrides }} as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key and o.expires_at > {{ $now }}
     where b.due_at <= {{ default "due_before" .due_before }}
     order by b.due_at
     limit {{ default "max_rows" .max_rows }}
       for update of b skip locked
  ), removed as (
    delete from {{ .table }} as b
     where b.ctid = any (array(select d.row_id from due as d where d.removable))
    returning 1
  ), postponed as (
    update {{ .table }} as b
       set due_at = {{ $now }} + (select duration(least(greatest(coalesce({{ template "wait_for" (dict "target" "p.full_level" "bucket" "b." "policy" "p." "now" $now) }}, {{ $most_us }}),
                                                            case when o.key is not null then
                                                              coalesce({{ template "wait_for" (dict "target" "o.full_level" "bucket" "b." "policy" "o." "now" $now) }}, {{ $most_us }})
                                                            end),
                                                   {{ $most_us }}))
                               from {{ $policies }} as p
                               left join {{ $overrides }} as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key
                                                           and o.expires_at > {{ $now }}
                              where p.id = b.policy_id)
     where b.ctid = any (array(select d.row_id from due as d where d.removable is not true))
  )
  select (select count(*) from due), (select count(*) from removed)
{{- end -}}
{{- /* The argument is the name of the table. */ -}}
{{ define "cleanup_buckets" -}}
{{ template "due_buckets" (dict "table" .) }} into v_read, v_deleted;
  v_rows          := v_rows + v_read;
  buckets_deleted := buckets_deleted + v_deleted;
{{- end -}}
{{- /* Removes expired idempotency keys. The arguments are as in due_buckets. */ -}}
{{ define "expired_keys" -}}
delete from {{ .table }} as k
   where k.ctid = any (array(select d.ctid
                               from {{ .table }} as d
                              where d.expires_at <= {{ default "due_before" .due_before }}
                              order by d.expires_at
                              limit {{ default "max_rows" .max_rows }}
                                for update skip locked))
{{- end -}}
{{- /* The argument is the name of the table. */ -}}
{{ define "cleanup_keys" -}}
{{ template "expired_keys" (dict "table" .) }};
  get diagnostics v_deleted = row_count;
  v_rows                   := v_rows + v_deleted;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
{{- end -}}
{{- /* Removes expired overrides. */ -}}
{{ define "cleanup_overrides" -}}
delete from overrides as o
   where o.ctid = any (array(select d.ctid
                               from overrides as d
                              where d.expires_at <= due_before
                              order by d.expires_at
                              limit max_rows
                                for update skip locked));
  get diagnostics v_deleted = row_count;
  v_rows := v_rows + v_deleted;
{{- end -}}
{{- /* Removes rows whose policy was dropped. The arguments are as in due_buckets. */ -}}
{{ define "orphans" -}}
with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from {{ .table }} as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from {{ .table }} as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from {{ default "policies" .policies }} as p where p.id = i.id)
  )
  delete from {{ .table }} as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from {{ .table }} as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit {{ default "max_rows" .max_rows }}))
{{- end -}}
{{- /* The arguments are the table, and the counter that its rows add to. */ -}}
{{ define "cleanup_orphans" -}}
{{ template "orphans" . }};
  get diagnostics v_deleted = row_count;
  v_rows      := v_rows + v_deleted;
  {{ .counter }} := {{ .counter }} + v_deleted;
{{- end -}}
{{- /* The function that cleans up one batch. */ -}}
{{ define "cleanup_batch" -}}
-- One batch: of each table the rows that are due by due_before, at most max_rows. The first batch of a series
-- passes null for due_before and deadline. Each later batch passes the values that the batch before it
-- returned. more is true if the batch found a row that is due or of a dropped policy, or gave up for
-- lock_timeout, and the deadline is not reached. The deadline is budget after the first batch began.
--
-- A due bucket that is not full is postponed until it can be full, by 24 hours at most. So a policy that was
-- made faster is noticed within a day.
-- Locks:  the rows that it deletes or postpones, until the caller's transaction ends.
-- Writes: the same rows; nothing if lock_timeout ended the batch.
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
  set enable_seqscan = off    -- as in ratelimit_acquire
  set lock_timeout = '100ms'  -- SKIP LOCKED can still block: see above
as $$
declare
  v_now     timestamptz := clock() - interval '5 minutes';  -- rows are judged as of this instant
  v_most_us constant bigint := 86400000000;  -- by which a bucket is postponed: 24 hours
  v_read    bigint;
  v_deleted bigint;
  v_rows    bigint;  -- rows deleted or postponed
begin
  perform check_max_rows(max_rows);
  if (budget > interval '0') is not true then
    perform refuse('budget', budget::text, 'Pass an interval above zero, such as ''50 seconds''.');
  end if;
  due_before               := least(due_before, v_now);  -- least ignores null; a caller cannot look past v_now
  deadline                 := coalesce(deadline, clock_timestamp() + least(budget, interval '1000 years'));
  buckets_deleted          := 0;
  idempotency_keys_deleted := 0;
  v_rows                   := 0;

  begin
    {{ template "cleanup_buckets" "buckets" }}
    {{ template "cleanup_buckets" "ephemeral_buckets" }}
    {{ template "cleanup_keys" "idempotency_keys" }}
    {{ template "cleanup_keys" "ephemeral_idempotency_keys" }}
    {{ template "cleanup_overrides" }}
    if v_rows = 0 then  -- orphans can wait for an idle batch
      {{ template "cleanup_orphans" (dict "table" "buckets" "counter" "buckets_deleted") }}
      {{ template "cleanup_orphans" (dict "table" "ephemeral_buckets" "counter" "buckets_deleted") }}
      {{ template "cleanup_orphans" (dict "table" "idempotency_keys" "counter" "idempotency_keys_deleted") }}
      {{ template "cleanup_orphans" (dict "table" "ephemeral_idempotency_keys" "counter" "idempotency_keys_deleted") }}
    end if;
  exception when lock_not_available then
    buckets_deleted          := 0;
    idempotency_keys_deleted := 0;
    v_rows                   := 1;  -- the locked row may be due, so more is true
  end;
  more := v_rows > 0 and clock_timestamp() < deadline;
end;
$$;
comment on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) is
  'One batch of clean-up, and whether another should follow.';
{{- end -}}
{{ template "cleanup_batch" }}

-- One batch. It can delete nothing although rows are due: every due bucket may be in use, or lock_timeout may
-- have ended the batch. Rows of dropped policies are removed once nothing else is due. ratelimit_cleanup_all
-- repeats batches. The budget of 1 second has no effect here: only deadline and more depend on it, and they are
-- not used.
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

-- Repeats batches and commits after each, until a batch finds no row of a dropped policy and none that was due
-- at the first batch, or the budget is spent. Rows that other sessions have locked are skipped, and left to the next call.
--
-- A procedure that commits can have neither SECURITY DEFINER nor SET. So it runs with the caller's rights: a
-- caller other than the owner needs EXECUTE on this procedure and on ratelimit.cleanup_batch, and USAGE on
-- schema ratelimit. And it runs with the caller's search_path, where another role may have planted functions
-- and operators. So its body names its one function with the schema, and uses no operator.
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

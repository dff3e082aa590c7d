-- Clean-up removes rows that change no answer: buckets that are full again, leases that have ended and keys of slots that nobody holds,
-- expired idempotency keys and usage, the parts of overrides that have ended, and rows whose policy was dropped. Clean-up finds due rows
-- through an index and skips rows that
-- another session has locked. A call that takes from or gives to a bucket waits while a batch removes or postpones it, until the batch
-- commits. So does a call that overwrites an expired idempotency key, or changes an override of which a part has ended, that the batch removes.
--
-- Clean-up judges every row as of five minutes ago. If the server's clock runs ahead for a moment, a bucket
-- that only looks full and a key that only looks expired are still there when the clock is set right.
--
-- SKIP LOCKED can still block if the row changes hands while it is examined. lock_timeout then ends the wait
-- after 100 ms, and the batch gives back its rows. PostgreSQL looks for a deadlock only after a wait of
-- deadlock_timeout, 1 second by default. If that is above 100 ms, a batch that is a transaction of its own gives
-- way before it is found in a deadlock. Only an acquire whose own look for a deadlock falls into those 100 ms is ended by one.
-- In a longer transaction, the rows of earlier batches stay locked, and it can deadlock with acquires.
--
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
  v_read    bigint;
  v_deleted bigint;
  v_rows    bigint;  -- rows deleted or postponed
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
  v_rows                   := 0;

  begin
    select c.read, c.deleted into v_read, v_deleted from cleanup_buckets('buckets', 'usage', 'policies', 'overrides', max_rows, v_now, due_before) as c;
    v_rows          := v_rows + v_read;
    buckets_deleted := buckets_deleted + v_deleted;
    select c.read, c.deleted into v_read, v_deleted from cleanup_buckets('ephemeral_buckets', 'usage', 'policies', 'overrides', max_rows, v_now, due_before) as c;
    v_rows          := v_rows + v_read;
    buckets_deleted := buckets_deleted + v_deleted;
    v_deleted                := cleanup_expired('idempotency_keys', max_rows, due_before);
    v_rows                   := v_rows + v_deleted;
    idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
    v_deleted                := cleanup_expired('ephemeral_idempotency_keys', max_rows, due_before);
    v_rows                   := v_rows + v_deleted;
    idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
    v_rows          := v_rows + cleanup_expired('usage', max_rows, due_before);
    select c.read, c.deleted into v_read, v_deleted from cleanup_slots('slots', 'leases', max_rows, v_now, due_before) as c;
    v_rows          := v_rows + v_read;
    buckets_deleted := buckets_deleted + v_deleted;
    select c.read, c.deleted into v_read, v_deleted from cleanup_slots('ephemeral_slots', 'ephemeral_leases', max_rows, v_now, due_before) as c;
    v_rows          := v_rows + v_read;
    buckets_deleted := buckets_deleted + v_deleted;
    with due as materialized (
      select d.ctid as row_id, d.stays from overrides as d where d.expires_at <= due_before order by d.expires_at limit max_rows for update skip locked
    ), removed as (
      delete from overrides as o where o.ctid = any (array(select d.row_id from due as d where not d.stays))
    ), kept as (
      update overrides as o
         set expires_at = null, ending_capacity = null, ending_refill = null, ending_every = null, ending_lease = null
       where o.ctid = any (array(select d.row_id from due as d where d.stays))
    )
    select v_rows + count(*) into v_rows from due;
    if v_rows = 0 then  -- these can wait for an idle batch
      select o.buckets_deleted, o.idempotency_keys_deleted
        into buckets_deleted, idempotency_keys_deleted
        from remove_orphans(max_rows) as o;
      v_rows := buckets_deleted + idempotency_keys_deleted + cleanup_orphans('usage', 'policies', max_rows);
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

-- Removes rows whose policy was dropped, at most max_rows of each table.
create or replace function ratelimit.remove_orphans(in max_rows integer, out buckets_deleted bigint, out idempotency_keys_deleted bigint)
  language plpgsql volatile
as $$
begin
  buckets_deleted          := cleanup_orphans('buckets', 'policies', max_rows) + cleanup_orphans('ephemeral_buckets', 'policies', max_rows)
                              + cleanup_orphans('slots', 'policies', max_rows) + cleanup_orphans('ephemeral_slots', 'policies', max_rows)
                              + cleanup_orphans('leases', 'policies', max_rows) + cleanup_orphans('ephemeral_leases', 'policies', max_rows);
  idempotency_keys_deleted := cleanup_orphans('idempotency_keys', 'policies', max_rows) + cleanup_orphans('ephemeral_idempotency_keys', 'policies', max_rows);
end;
$$;
comment on function ratelimit.remove_orphans(integer) is
  'Removes rows whose policy was dropped, at most max_rows of each table.';

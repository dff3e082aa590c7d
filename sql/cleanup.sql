-- One batch. It can delete nothing although rows are due: every due bucket may be in use, or lock_timeout may have ended the batch. The
-- budget of 1 second has no effect here: only deadline and more depend on it, and they are not used.
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
'Removes one batch of rows that change no answer.
These are buckets that are full, idempotency keys, overrides and usage that have expired, leases that have ended, keys of slots that nobody
  holds, which count as buckets, and, if nothing else is due, rows of dropped policies. Rows are judged as of five minutes ago. A row that another session has locked is left for a
  later batch.
max_rows: rows of each table, 1 or more.
Errors: 22023 for a bad argument, 25006 in a read-only transaction.
Locks: the rows that it deletes or postpones, until the transaction ends. It waits at most 100 ms for a lock and then
  gives up the batch.
Writes: deletes these rows. The usage of a quota with a history is kept when its bucket is deleted. A bucket that was due and is not full is postponed, by 24 hours at most.
Role: clean-up.';

-- A procedure that commits can have neither SECURITY DEFINER nor SET. So it runs with the rights and the search_path of the caller, where
-- another role may have planted functions and operators. So its body names its one function with the schema, and uses no operator.
create or replace procedure ratelimit_cleanup_all(budget interval default '50 seconds')
  language plpgsql
as $$
declare
  v_due_before timestamptz;
  v_deadline   timestamptz;
  v_batch      record;
begin
  -- PostgreSQL's own error would name no grant.
  if (case when pg_catalog.has_schema_privilege('ratelimit', 'usage')
           then pg_catalog.has_function_privilege('ratelimit.cleanup_batch(integer, interval, timestamp with time zone, timestamp with time zone)', 'execute') end) is not true then
    raise exception 'permission denied for the batches of ratelimit_cleanup_all'
      using errcode = '42501',
            hint    = pg_catalog.format('Its owner can run: grant usage on schema ratelimit to %1$I; grant execute on function ratelimit.cleanup_batch to %1$I;', current_user);
  end if;
  loop
    v_batch      := ratelimit.cleanup_batch(10000, ratelimit_cleanup_all.budget, v_due_before, v_deadline);
    v_due_before := v_batch.due_before;
    v_deadline   := v_batch.deadline;
    commit;
    exit when not v_batch.more;
  end loop;
end;
$$;
comment on procedure ratelimit_cleanup_all(interval) is
'Repeats the batches of ratelimit_cleanup until no row is left that was due at the first, or budget is spent, and
  commits after each batch.
A row that another session has locked is left to the next call.
budget: an interval above 0. The batch under way when it ends is finished.
Errors: 22023 for a bad argument, 25006 in a read-only transaction, 2D000 inside a transaction.
Locks: the rows of a batch until the batch commits.
Writes: as ratelimit_cleanup.
Role: clean-up. The role also needs EXECUTE on ratelimit.cleanup_batch and USAGE on schema ratelimit.';

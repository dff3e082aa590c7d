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
  v_batch      record;
begin
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
  'Remove all full buckets and expired idempotency keys in short batches, committing between them, for at most budget.';

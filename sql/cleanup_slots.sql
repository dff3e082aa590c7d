-- Clean-up of slots: removes the leases that had ended by now, of at most max_rows keys and at most max_rows leases, and the rows of keys
-- that have no lease then. The row of another key is postponed to the end of its first lease. The answers are how many keys were due, and
-- how many were removed.
--
-- It locks the rows of the keys, and looks at their leases in later statements: a hold may have been committed between the
-- snapshot of the first one and its locks. A hold that waits for a row which is removed here finds none, and creates it anew; one that
-- waits for a row which stays counts again, because by another clock a lease that is removed here may not have ended.
--
-- The names are those of the tables. On Citus they are those of shards, for which the statements are made at run time.
-- Locks and writes: as cleanup_batch.
create or replace function ratelimit.cleanup_slots(
    in slots regclass, in leases regclass, in max_rows integer, in now timestamptz, in due_before timestamptz, out read bigint, out deleted bigint)
  language plpgsql volatile
as $$
declare
  v_ids  bigint[];
  v_keys text[];
begin
  execute format('select array_agg(d.policy_id), array_agg(d.key), count(*)'
                 '  from (select s.policy_id, s.key from %s as s where s.due_at <= $1 order by s.due_at limit $2 for update skip locked) as d', slots)
     into v_ids, v_keys, read
    using due_before, max_rows;
  deleted := 0;
  if read = 0 then
    return;
  end if;
  execute format('delete from %1$s as l'
                 ' where l.ctid = any (array(select e.ctid'
                 '                             from unnest($1, $2) as u (policy_id, key)'
                 '                            cross join lateral (select l.ctid'
                 '                                                  from %1$s as l'
                 '                                                 where l.policy_id = u.policy_id and l.key = u.key collate "C" and l.ends_at <= $3'
                 '                                                offset 0) as e'
                 '                            limit $4))', leases)
    using v_ids, v_keys, now, max_rows;
  execute format('delete from %1$s as s'
                 ' where s.ctid = any (array(select e.ctid'
                 '                             from unnest($1, $2) as u (policy_id, key)'
                 '                            cross join lateral (select s.ctid'
                 '                                                  from %1$s as s'
                 '                                                 where s.policy_id = u.policy_id and s.key = u.key collate "C"'
                 '                                                offset 0) as e'
                 '                            where not exists (select from %2$s as l where l.policy_id = u.policy_id and l.key = u.key collate "C" offset 0)))',
                 slots, leases)
    using v_ids, v_keys;
  get diagnostics deleted = row_count;
  execute format('update %1$s as s'
                 '   set counted_until = ''-infinity'', due_at = (select min(l.ends_at) from %2$s as l where l.policy_id = s.policy_id and l.key = s.key)'
                 ' where s.ctid = any (array(select e.ctid'
                 '                             from unnest($1, $2) as u (policy_id, key)'
                 '                            cross join lateral (select s.ctid'
                 '                                                  from %1$s as s'
                 '                                                 where s.policy_id = u.policy_id and s.key = u.key collate "C"'
                 '                                                offset 0) as e))', slots, leases)
    using v_ids, v_keys;
end;
$$;
comment on function ratelimit.cleanup_slots(regclass, regclass, integer, timestamptz, timestamptz) is
  'Removes leases that have ended and keys that nobody holds, and answers how many keys were due and how many were removed.';

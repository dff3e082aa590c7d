-- A bucket or an idempotency key that an open transaction has locked is skipped, and left to clean-up. Such a row changes no answer,
-- because a policy defined anew under the same name has another id. SKIP LOCKED can still block if the row
-- changes hands while it is examined, as cleanup_batch.sql says. Here only the caller's lock_timeout ends that wait. So the rows
-- are locked in the order in which requests lock buckets, and a wait never ends in a deadlock.
create or replace function ratelimit_drop_policy(policy text)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name    text collate "C" := ratelimit_drop_policy.policy;
  v_id      bigint;
  v_durable boolean;
begin
  perform check_name('policy', v_name);
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  delete from policies as p where p.name = v_name returning p.id, p.durable into v_id, v_durable;
  if not found then
    raise exception 'unknown policy' using
      errcode = 'RL001',
      detail  = format('No policy is named %L.', v_name),
      hint    = 'Pass the name of a policy that select * from ratelimit_policies() lists.';
  end if;
  delete from overrides as o where o.policy_id = v_id;
  if v_durable then
    perform delete_rows_of_policy('buckets', 'u.key', v_id);
    perform delete_rows_of_policy('idempotency_keys', 'u.key, u.idempotency_key', v_id);
    perform delete_rows_of_policy('usage', 'u.key, u.began', v_id);
    perform delete_rows_of_policy('slots', 'u.key', v_id);
    perform delete_rows_of_policy('leases', 'u.key, u.holder', v_id);
  else
    perform delete_rows_of_policy('ephemeral_buckets', 'u.key', v_id);
    perform delete_rows_of_policy('ephemeral_idempotency_keys', 'u.key, u.idempotency_key', v_id);
    perform delete_rows_of_policy('ephemeral_slots', 'u.key', v_id);
    perform delete_rows_of_policy('ephemeral_leases', 'u.key, u.holder', v_id);
  end if;
end;
$$;
comment on function ratelimit_drop_policy(text) is
'Removes a policy with its overrides, buckets, idempotency keys, holders and usage.
A row that another transaction has locked is left to clean-up. It does not count for a new policy of the same name.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the row of the policy and the rows that it deletes until the transaction ends.
Writes: deletes these rows.
Role: administrator.';

create or replace function ratelimit.delete_rows_of_policy(rows regclass, in_order_of text, policy_id bigint)
  returns void language plpgsql volatile
as $$
begin
  execute format('delete from %1$s as t'
                 ' where t.ctid = any (array(select u.ctid from %1$s as u where u.policy_id = $1 order by %2$s for update skip locked))', rows, in_order_of)
    using policy_id;
end;
$$;
comment on function ratelimit.delete_rows_of_policy(regclass, text, bigint) is
  'Deletes the rows of a policy that no other session has locked; in_order_of are the columns of their primary key after policy_id.';

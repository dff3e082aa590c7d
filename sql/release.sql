-- Ends the lease of a holder. The steps are those of ratelimit_renew: 1. has it a lease? 2. the row of the key, 3. the lease.
create or replace function ratelimit_release(policy text, key text, holder text)
  returns boolean
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  v_policy := p from policies as p where p.name = policy collate "C";
  if v_policy.lease is null then
    perform check_hold(policy, key, holder, 1);  -- raises 22023
    if v_policy.id is null then
      perform refuse_unknown(policy, 'capacity => 5, lease => ''5 minutes''');
    end if;
    perform refuse_tokens(policy);  -- raises 22023
  end if;
  if not v_policy.durable then
    if pg_is_in_recovery() then perform refuse_ephemeral(v_policy); end if;  -- raises 0A000
    return release_ephemeral(v_policy, key, holder);  -- what follows, on the twin tables
  end if;

  declare
    v_key      alias for key;
    v_holder   alias for holder;
    v_now      timestamptz := clock();
    v_cost     integer;
    v_released integer;  -- the cost of the lease that is deleted; null if none is
  begin
    -- 1. Has it a lease? One that has ended may have been renewed by a session that has not committed yet.
    v_cost := l.cost from leases as l where l.policy_id = v_policy.id and l.key = v_key collate "C" and l.holder = v_holder collate "C";
    if v_cost is null then
      perform check_hold(v_policy.name, v_key, v_holder, 1);  -- raises 22023
      return false;
    end if;
    if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006

    -- 2. The row of the key.
    update slots as s
       set held   = s.held - v_cost,
           due_at = least(s.due_at, v_now)  -- nobody may hold now: clean-up looks at it in five minutes or later
     where s.policy_id = v_policy.id
       and s.key       = v_key collate "C";
    if not found then
      return false;  -- clean-up has removed the row, and with it the lease
    end if;

    -- 3. The lease, by the clock of now.
    v_now := clock();
    delete from leases as l
     where l.policy_id = v_policy.id
       and l.key       = v_key collate "C"
       and l.holder    = v_holder collate "C"
       and l.ends_at   > v_now
    returning l.cost into v_released;
    if v_released = v_cost then
      return true;
    end if;
    update slots as s
       set counted_until = '-infinity'  -- the lease has ended, or was another one by then
     where s.policy_id = v_policy.id
       and s.key       = v_key collate "C";
    return v_released is not null;
  end;
end;
$$;
comment on function ratelimit_release(text, text, text) is
'Gives the slots of a holder back, and returns true if it held them until now.
It is safe to repeat.
Errors: 22023 for a bad argument and for a policy without a lease, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the row of the key until the transaction ends. If the holder has no lease, the call locks nothing.
Writes: the row of the key; deletes the lease. If the holder has no lease, the call writes nothing.
Role: application.';

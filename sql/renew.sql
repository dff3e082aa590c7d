-- Begins the lease of a holder anew.
--
-- The steps:
--   1. A holder without a lease is answered at once: nothing is locked. A lease that has ended may have been renewed by a session that
--      has not committed yet.
--   2. The row of the key is written, which may wait. A holder that held then may not hold any more.
--   3. The lease is written, if it has not ended.
-- So a renewal that comes after a release takes nothing, in whatever order they run.
create or replace function ratelimit_renew(policy text, key text, holder text)
  returns interval
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
    return renew_ephemeral(v_policy, key, holder);  -- what follows, on the twin tables
  end if;

  declare
    v_key      text collate "C" := key;
    v_holder   text collate "C" := holder;
    v_now      timestamptz := clock();
    v_ends_at  timestamptz;
    v_earlier  timestamptz;  -- the end of the lease by the clock and the numbers before the wait
    v_lease_us bigint;
    v_locked   boolean;
    v_override ratelimit.overrides;
    v_numbers  ratelimit.numbers;
  begin
    if v_policy.overridden then
      v_override := o from overrides as o where o.policy_id = v_policy.id and o.key = v_key;
      if v_override.key is not null then
        v_policy := with_override(v_policy, v_override, v_now);
      end if;
    end if;
    v_lease_us := microseconds(v_policy.lease)::bigint;

    -- 1. Has it a lease?
    perform l.cost from leases as l
      where l.policy_id = v_policy.id
        and l.key       = v_key
        and l.holder    = v_holder;
    if found then
      if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006

      -- 2. The row of the key.
      v_earlier := v_now + duration(v_lease_us);
      update slots as s
         set counted_until = least(s.counted_until, v_earlier),
             due_at        = least(s.due_at, v_earlier)
       where s.policy_id = v_policy.id
         and s.key       = v_key;
      v_locked := found;  -- or clean-up has removed the row, and with it the lease

      -- 3. The lease, by the clock and the numbers of now.
      v_now := clock();
      if v_override.expires_at <= v_now then
        v_numbers  := numbers_now(v_policy, v_key, v_now);
        v_policy   := v_numbers.policy;
        v_lease_us := microseconds(v_policy.lease)::bigint;
      end if;
      v_ends_at := v_now + duration(v_lease_us);
      if v_ends_at < v_earlier then  -- the clock went back, or an override with a longer lease has ended
        update slots as s
           set counted_until = '-infinity'
         where s.policy_id = v_policy.id
           and s.key       = v_key;
      end if;
      update leases as l
         set ends_at = v_ends_at
       where v_locked
         and l.policy_id = v_policy.id
         and l.key       = v_key
         and l.holder    = v_holder
         and l.ends_at   > v_now;
    elsif (is_name(v_key) and is_name(v_holder)) is not true then
      perform check_hold(v_policy.name, v_key, v_holder, 1);  -- raises 22023
    end if;
    return case when found or v_policy.shadow then duration(v_lease_us) end;
  end;
end;
$$;
comment on function ratelimit_renew(text, text, text) is
'Begins the lease of a holder anew, and returns how long it holds now: the lease.
null: the holder does not hold, or not any more. Its lease has ended or was released, and what it does must stop. It never holds by
  a renewal.
A shadow policy returns the lease to a holder that does not hold, too.
Errors: 22023 for a bad argument and for a policy without a lease, RL001 for an unknown policy, 25006 in a read-only transaction.
Locks: the row of the key until the transaction ends. If the holder has no lease, the call locks nothing.
Writes: the row of the key and the lease. If the holder has no lease, the call writes nothing.
Role: application.';

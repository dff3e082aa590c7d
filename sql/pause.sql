-- Stops one bucket until an instant ahead: its row becomes what the bucket will be then, and that is empty at most. So no other
-- call looks for a pause. Level 0 grants nothing, and refill counts from refilled_at, which is the end of the pause, whatever the
-- numbers become. Only a call that gives tokens back reads paused_until: before it the level stays at 0.
--
-- If an override ends before the pause does, the numbers of the policy apply at the end.
create or replace function ratelimit_pause(policy text, key text, pause_for interval)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy ratelimit.policies;
begin
  perform check_pause(policy, key, pause_for);
  v_policy := policy_named(policy);
  if not v_policy.durable then
    if pg_is_in_recovery() then perform refuse_ephemeral(v_policy); end if;  -- raises 0A000
    return pause_ephemeral(v_policy, key, pause_for);  -- what follows, on the twin tables
  end if;

  declare
    v_key         text collate "C" := key;
    v_now         timestamptz;
    v_until       timestamptz;  -- the end of the pause
    v_level       bigint;       -- microtokens in the bucket
    v_refilled_at timestamptz;  -- when the bucket held v_level
    v_numbers     ratelimit.numbers;
  begin
    if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
    loop
      select b.level, b.refilled_at, b.paused_until into v_level, v_refilled_at, v_until
        from buckets as b
       where b.policy_id = v_policy.id
         and b.key       = v_key
         for update;
      v_now     := clock();  -- the lock may have waited
      v_numbers := numbers_now(v_policy, v_key, v_now);
      v_policy  := v_numbers.policy;
      if v_policy.refill = 0 then
        perform refuse_pause(v_policy.name, v_key);  -- raises 22023
      end if;
      exit when v_level is not null;
      v_level       := microtokens(v_policy.capacity);
      v_refilled_at := v_now;
      insert into buckets (policy_id, key, level, refilled_at, due_at)
      values (v_policy.id, v_key, v_level, v_refilled_at, v_now)  -- due at once: clean-up will postpone it
      on conflict on constraint buckets_pkey do nothing;
      exit when found;
    end loop;
    v_until := greatest(v_until, v_now + duration(microseconds(pause_for)::bigint));  -- a day is 24 hours
    if v_numbers.ends_at <= v_until then
      v_level := refilled(v_level, v_refilled_at, v_now, v_policy);
      v_level := refilled(v_level, refilled_until(v_refilled_at, v_now, v_policy.tick), v_until, v_numbers.after);
    else
      v_level := refilled(v_level, v_refilled_at, v_until, v_policy);
    end if;
    v_level       := least(v_level, 0);
    v_refilled_at := greatest(v_refilled_at, v_until);
    update buckets as b
       set level = v_level, refilled_at = v_refilled_at, room = null, paused_until = v_until
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    return answer_of(v_level, wait_past_end(1, v_level, v_refilled_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after),
                     wait_past_end(null, v_level, v_refilled_at, v_now, v_policy, v_numbers.ends_at, null, v_numbers.after), v_policy.capacity);
  end;
end;
$$;
comment on function ratelimit_pause(text, text, interval) is
'Stops one bucket until pause_for is over, and returns what ratelimit_peek answers from then on.
Nothing is granted before the end of the pause, and ratelimit_reserve grants no earlier start. After the end the bucket
  refills from 0, so waiting callers do not start together. Debt is paid by refill during the pause, too.
A pause can be made longer. A shorter one changes nothing. ratelimit_reset ends it.
Tokens that are given back during a pause pay debt, and are lost beyond it.
Other numbers, by ratelimit_define_policy or ratelimit_override, do not end a pause.
A stepped policy counts its intervals from the end of the pause, so the first tokens come an interval later.
Replays, ratelimit_charge, and reservations granted before the pause are not stopped. A shadow policy is not either.
pause_for: 1 millisecond to 365 days, in days or smaller units.
Errors: 22023 for a bad argument and for numbers that do not refill, RL001 for an unknown policy, 25006 in a read-only
  transaction.
Locks: the bucket row, which is created if the bucket has none, until the transaction ends.
Writes: the bucket.
Role: application. A role that may call it can stop any key.';

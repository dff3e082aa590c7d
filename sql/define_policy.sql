create or replace function ratelimit.changed_by()
  returns text language sql stable
as $$
  select session_user || coalesce('/' || nullif(current_setting('role'), 'none'), '')
$$;
comment on function ratelimit.changed_by() is
  'Who calls: the role of the session, and after a slash the role that SET ROLE chose, if any.';

-- A bucket that clean-up removed while a policy was lowered was full by the lower capacity, and is full by the higher one once
-- the policy is raised again.
create or replace function ratelimit_define_policy(
    policy    text,
    capacity  bigint    default null,
    refill    bigint    default null,
    every     interval  default null,
    stepped   boolean   default null,
    durable   boolean   default null,
    remember  interval  default null,
    shadow    boolean   default null,
    period    interval  default null,
    time_zone text      default null,
    anchor    timestamp default null,
    lease     interval  default null,
    history   interval  default null)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name   text collate "C" := ratelimit_define_policy.policy;
  v_by     text := changed_by();
  v_now    timestamptz;
  v_policy policies;
  v_new    policies;
begin
  perform check_name('policy', v_name);
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  loop
    select p.* into v_policy from policies as p where p.name = v_name for update;  -- the checks combine new numbers with these
    v_now := clock();
    if v_policy.id is not null and v_policy.kind <> 'slots' and ratelimit_define_policy.lease is not null then
      perform refuse('lease', ratelimit_define_policy.lease::text, 'The policy has tokens. Drop it and define it anew, or choose another name.');
    end if;
    v_new           := v_policy;
    v_new.lease     := coalesce(ratelimit_define_policy.lease, v_policy.lease);
    v_new.capacity  := coalesce(ratelimit_define_policy.capacity, v_policy.capacity);
    if v_new.lease is not null then
      perform check_only_slots(ratelimit_define_policy.refill, ratelimit_define_policy.every, ratelimit_define_policy.stepped,
                               ratelimit_define_policy.remember, ratelimit_define_policy.period, ratelimit_define_policy.time_zone,
                               ratelimit_define_policy.anchor);
      perform check_lease(v_new.capacity, 1, v_new.lease);
    elsif v_policy.id is not null and v_policy.kind <> 'quota' and ratelimit_define_policy.period is not null then
      perform refuse('period', ratelimit_define_policy.period::text, 'The policy refills. Drop it and define it anew; its buckets will be full.');
    end if;
    v_new.period    := coalesce(ratelimit_define_policy.period, v_policy.period);
    v_new.time_zone := coalesce(ratelimit_define_policy.time_zone, v_policy.time_zone, case when v_new.period is not null then 'UTC' end);
    v_new.anchor    := coalesce(ratelimit_define_policy.anchor, v_policy.anchor, case when v_new.period is not null then timestamp '2001-01-01 00:00' end);
    perform check_calendar(ratelimit_define_policy.refill, ratelimit_define_policy.every, ratelimit_define_policy.stepped, v_new.period,
                           ratelimit_define_policy.time_zone, v_new.anchor);
    if v_new.period is not null or v_new.lease is not null then
      v_new.refill := 0;  -- as of calendar.sql
      v_new.every  := interval '1 day';
    else
      v_new.refill := coalesce(ratelimit_define_policy.refill, v_policy.refill);
      v_new.every  := coalesce(ratelimit_define_policy.every, v_policy.every);
    end if;
    perform check_numbers(v_new.capacity, v_new.refill, v_new.every);
    if ratelimit_define_policy.history is not null then
      perform check_history(ratelimit_define_policy.history, v_new.period);
    end if;
    if ratelimit_define_policy.remember is not null then
      perform check_span('remember', ratelimit_define_policy.remember);
    end if;
    if v_policy.durable <> ratelimit_define_policy.durable then
      raise exception 'invalid durable'
        using errcode = '22023',
              detail  = format('Policy %L was created with durable => %s.', v_name, v_policy.durable),
              hint    = 'Drop the policy and define it anew; its buckets will be full.';
    end if;
    if ratelimit_define_policy.history is not null and not coalesce(v_policy.durable, ratelimit_define_policy.durable, true) then
      perform refuse('history', ratelimit_define_policy.history::text, 'The policy is ephemeral, and keeps nothing. Leave it out, or drop the policy and define a durable one.');
    end if;
    v_new.history  := coalesce(case when v_policy.history is null then nullif(ratelimit_define_policy.history, '0') else ratelimit_define_policy.history end,
                               v_policy.history);
    v_new.stepped  := coalesce(ratelimit_define_policy.stepped, v_policy.stepped, false);
    v_new.remember := coalesce(ratelimit_define_policy.remember, v_policy.remember, interval '24 hours');
    v_new.shadow   := coalesce(ratelimit_define_policy.shadow, v_policy.shadow, false);

    exit when v_new is not distinct from v_policy;
    insert into policies as p (id, name, capacity, refill, every, stepped, durable, remember, shadow, overridden, period, time_zone, anchor, lease,
                               history, changed_at, changed_by)
    values (hashtextextended(gen_random_uuid()::text, 0), v_name, v_new.capacity, v_new.refill, v_new.every, v_new.stepped,
            coalesce(ratelimit_define_policy.durable, true), v_new.remember, v_new.shadow, false, v_new.period, v_new.time_zone, v_new.anchor, v_new.lease,
            v_new.history, v_now, v_by)
    on conflict on constraint policies_pkey do update
       set capacity   = excluded.capacity,
           refill     = excluded.refill,
           every      = excluded.every,
           stepped    = excluded.stepped,
           remember   = excluded.remember,
           shadow     = excluded.shadow,
           period     = excluded.period,
           time_zone  = excluded.time_zone,
           anchor     = excluded.anchor,
           lease      = excluded.lease,
           history    = excluded.history,
           changed_at = excluded.changed_at,
           changed_by = excluded.changed_by
     where v_policy.id is not null;
    exit when found;  -- or another session has created the policy
  end loop;
end;
$$;
comment on function ratelimit_define_policy(text, bigint, bigint, interval, boolean, boolean, interval, boolean, interval, text, timestamp, interval, interval) is
'Creates a policy, or changes the policy of that name.
null keeps the value of an existing policy.
A change applies to the next call about each bucket. Levels stay, cut to the new capacity. The time since a bucket was
  last written is credited at the new rate. A key whose override leaves a number to the policy follows it.
A policy with a period is a quota: its buckets are full at each turn of a calendar, and gain nothing in between. What was
  used stays used when its capacity changes. Another period, time_zone or anchor fills no bucket by itself.
A policy with a lease lends slots: at most capacity of a key are held at a time, by ratelimit_hold. It has no refill, every,
  stepped, remember, period, time_zone and anchor.
policy: 1 to 512 bytes, case-sensitive.
capacity: the most tokens that a bucket holds, 0 to 9000000000000. With 0 each cost above 0 is denied. A new policy
  needs it. Of slots it is 1 to 10000.
refill: the tokens that a bucket gains in each interval every, 0 to 9000000000000. With 0 only ratelimit_refund and
  ratelimit_reset fill a bucket. A new policy without period and lease needs it.
every: 1 microsecond to 365250 days, without months and years. A new policy without period and lease needs it.
stepped: true refills at the end of each interval every, false by the microsecond. A new policy has false.
durable: false keeps buckets and idempotency keys in unlogged tables: after a crash buckets are full. It cannot be
  changed. A new policy has true.
remember: how long a grant is remembered under its idempotency key, 1 microsecond to 365250 days. A new policy has 24
  hours.
shadow: true grants requests that the policy would deny, takes nothing for them, and returns shadowed true. A new
  policy has false.
period: whole days or whole months, 1 day to 1000 years, in place of refill, every and stepped. A policy cannot become
  a quota, or cease to be one.
time_zone: the time zone of the turns, UTC or a name with a slash of pg_timezone_names. A new quota has UTC.
anchor: the local time of one turn, of the years 1 to 9999. The others are whole periods from it: a month after
  31 January is 28 or 29 February. A new quota has 2001-01-01 00:00, which is the start of a week, a month and a year.
lease: how long slots are held unless the holder renews or releases them, 1 millisecond to 365250 days, without months and years. A
  policy cannot begin or cease to lend slots. Leases that run keep their ends when it changes.
history: how long the usage of closed periods is kept, whole days or whole months, 1 day to 1000 years; see ratelimit_usage. Of a durable
  quota only. 0 keeps no more from then on. Another history counts for the periods that are closed from then on.
Errors: 22023 for a bad argument, for a new policy without capacity, refill or every, for a bucket that would take
  more than 10000 years to fill, and for a durable other than that of the policy. 25006 in a read-only transaction.
Locks: the row of the policy until the transaction ends. Acquires do not wait for it.
Writes: the policy, unless it was as it is to be.
Role: administrator.';

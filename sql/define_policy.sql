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
    lease     interval  default null)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_name      text collate "C" := ratelimit_define_policy.policy;
  v_policy    policies;
  v_id        bigint;
  v_stepped   boolean;
  v_durable   boolean;
  v_period    interval;
  v_time_zone text;
  v_anchor    timestamp;
  v_lease     interval;
begin
  perform check_name('policy', v_name);
  if current_setting('transaction_read_only') = 'on' then perform refuse_read_only(); end if;  -- raises 25006
  select p.* into v_policy from policies as p where p.name = v_name for update;  -- the checks combine new numbers with these
  if v_policy.id is not null and v_policy.kind <> 'slots' and ratelimit_define_policy.lease is not null then
    perform refuse('lease', ratelimit_define_policy.lease::text, 'The policy has tokens. Drop it and define it anew, or choose another name.');
  end if;
  v_lease := coalesce(ratelimit_define_policy.lease, v_policy.lease);
  if v_lease is not null then
    perform check_only_slots(ratelimit_define_policy.refill, ratelimit_define_policy.every, ratelimit_define_policy.stepped,
                             ratelimit_define_policy.remember, ratelimit_define_policy.period, ratelimit_define_policy.time_zone,
                             ratelimit_define_policy.anchor);
    perform check_lease(coalesce(ratelimit_define_policy.capacity, v_policy.capacity), 1, v_lease);
  elsif v_policy.id is not null and v_policy.kind <> 'quota' and ratelimit_define_policy.period is not null then
    perform refuse('period', ratelimit_define_policy.period::text, 'The policy refills. Drop it and define it anew; its buckets will be full.');
  end if;
  v_period    := coalesce(ratelimit_define_policy.period, v_policy.period);
  v_time_zone := coalesce(ratelimit_define_policy.time_zone, v_policy.time_zone, case when v_period is not null then 'UTC' end);
  v_anchor    := coalesce(ratelimit_define_policy.anchor, v_policy.anchor, case when v_period is not null then timestamp '2001-01-01 00:00' end);
  perform check_calendar(ratelimit_define_policy.refill, ratelimit_define_policy.every, ratelimit_define_policy.stepped, v_period, ratelimit_define_policy.time_zone, v_anchor);
  if v_period is not null or v_lease is not null then
    refill := 0;  -- as of calendar.sql
    every  := interval '1 day';
  end if;
  perform check_numbers(coalesce(ratelimit_define_policy.capacity, v_policy.capacity),
                        coalesce(ratelimit_define_policy.refill, v_policy.refill),
                        coalesce(ratelimit_define_policy.every, v_policy.every));
  if ratelimit_define_policy.remember is not null then
    perform check_span('remember', ratelimit_define_policy.remember);
  end if;
  insert into policies as p (id, name, capacity, refill, every, stepped, durable, remember, shadow, overridden, period, time_zone, anchor, lease)
  values (hashtextextended(gen_random_uuid()::text, 0),
          v_name,
          coalesce(ratelimit_define_policy.capacity, v_policy.capacity),
          coalesce(ratelimit_define_policy.refill, v_policy.refill),
          coalesce(ratelimit_define_policy.every, v_policy.every),
          coalesce(ratelimit_define_policy.stepped, false),
          coalesce(ratelimit_define_policy.durable, true),
          coalesce(ratelimit_define_policy.remember, interval '24 hours'),
          coalesce(ratelimit_define_policy.shadow, false),
          false, v_period, v_time_zone, v_anchor, v_lease)
  on conflict on constraint policies_pkey do update
     set capacity  = excluded.capacity,
         refill    = excluded.refill,
         every     = excluded.every,
         stepped   = coalesce(ratelimit_define_policy.stepped, p.stepped),
         remember  = coalesce(ratelimit_define_policy.remember, p.remember),
         shadow    = coalesce(ratelimit_define_policy.shadow, p.shadow),
         period    = excluded.period,
         time_zone = coalesce(ratelimit_define_policy.time_zone, p.time_zone),  -- another session may have created the policy
         anchor    = coalesce(ratelimit_define_policy.anchor, p.anchor),
         lease     = coalesce(ratelimit_define_policy.lease, p.lease)
   where p.kind = excluded.kind
  returning p.id, p.stepped, p.durable into v_id, v_stepped, v_durable;
  if not found then  -- another session has created the policy meanwhile
    perform refuse(case when v_lease is not null then 'lease' else 'period' end, coalesce(v_lease, v_period)::text,
                   'Another session has just created the policy as one of another kind: drop it, or choose another name.');
  end if;

  if v_policy.stepped is distinct from v_stepped then  -- another session may have created the policy meanwhile
    update overrides as o set stepped = v_stepped where o.policy_id = v_id;
  end if;
  if v_durable <> ratelimit_define_policy.durable then
    raise exception 'invalid durable'
      using errcode = '22023',
            detail  = format('Policy %L was created with durable => %s.', v_name, v_durable),
            hint    = 'Drop the policy and define it anew; its buckets will be full.';
  end if;
end;
$$;
comment on function ratelimit_define_policy(text, bigint, bigint, interval, boolean, boolean, interval, boolean, interval, text, timestamp, interval) is
'Creates a policy, or changes the policy of that name.
null keeps the value of an existing policy.
A change applies to the next call about each bucket. Levels stay, cut to the new capacity. The time since a bucket was
  last written is credited at the new rate. Overrides keep their numbers.
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
Errors: 22023 for a bad argument, for a new policy without capacity, refill or every, for a bucket that would take
  more than 10000 years to fill, and for a durable other than that of the policy. 25006 in a read-only transaction.
Locks: the row of the policy until the transaction ends. Acquires do not wait for it.
Writes: the policy, and its overrides if stepped changes.
Role: administrator.';

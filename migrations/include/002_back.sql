-- The way back of 002_several_limits.sql, but for the functions that snapshot 001 makes anew.
drop table if exists ratelimit.pre_request;  -- docs/postgrest/install.sql created it, and the function ratelimit_pre_request

-- Snapshot 001 makes its functions anew. By clock it knows that it is installed already, two are needed below, and one may have
-- been granted.
do $functions$
declare
  v_path text := pg_catalog.current_setting('search_path');
  v_proc pg_catalog.regprocedure;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_proc in
    select p.oid
      from pg_proc as p
     where p.pronamespace = 'ratelimit'::regnamespace
       and p.proname not in ('clock', 'floor_level', 'deepest_debt', 'cleanup_batch')
  loop
    execute format('drop routine %s', v_proc);
  end loop;
  perform set_config('search_path', v_path, true);
end;
$functions$;
drop type ratelimit.decision, ratelimit.reservation, ratelimit.partial_decision, ratelimit.hold, ratelimit.packed, ratelimit.charged, ratelimit.part, ratelimit.asked;
alter type ratelimit.retired_decision rename to decision;

-- Without slots, what is held of a key is missing in its bucket. Slots come back within a lease, and so do the tokens.
insert into ratelimit.buckets (policy_id, key, level, refilled_at, due_at)
select p.id, l.key, p.full_level - sum(l.cost) * 1000000, pg_catalog.clock_timestamp(), pg_catalog.clock_timestamp()
  from ratelimit.policies as p
  join ratelimit.leases as l on l.policy_id = p.id
 where l.ends_at > pg_catalog.clock_timestamp()
 group by p.id, p.full_level, l.key;
insert into ratelimit.ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
select p.id, l.key, p.full_level - sum(l.cost) * 1000000, pg_catalog.clock_timestamp(), pg_catalog.clock_timestamp()
  from ratelimit.policies as p
  join ratelimit.ephemeral_leases as l on l.policy_id = p.id
 where l.ends_at > pg_catalog.clock_timestamp()
 group by p.id, p.full_level, l.key;
update ratelimit.policies
   set refill = capacity,
       every  = (calendar).lease
 where (calendar).lease is not null;
-- Without refill 0, such a policy refills as slowly as one can.
update ratelimit.policies
   set refill = 1,
       every  = least(interval '365250 days', make_interval(secs => 315576000000 / greatest(capacity, 1)::double precision))
 where refill = 0;
-- Without saturation, a debt below the floor of its policy may be too deep for the time it takes.
update ratelimit.buckets as b
   set level = ratelimit.floor_level(p.gain, p.every_us)::bigint
  from ratelimit.policies as p
 where p.id = b.policy_id
   and b.level < ratelimit.floor_level(p.gain, p.every_us);
update ratelimit.ephemeral_buckets as b
   set level = ratelimit.floor_level(p.gain, p.every_us)::bigint
  from ratelimit.policies as p
 where p.id = b.policy_id
   and b.level < ratelimit.floor_level(p.gain, p.every_us);
drop function ratelimit.floor_level, ratelimit.deepest_debt;
update ratelimit.idempotency_keys set reset_after = interval '365250 days' where reset_after is null;
update ratelimit.ephemeral_idempotency_keys set reset_after = interval '365250 days' where reset_after is null;
alter table ratelimit.idempotency_keys alter column reset_after set not null;
alter table ratelimit.ephemeral_idempotency_keys alter column reset_after set not null;
alter table ratelimit.idempotency_keys drop column ready_at, drop column settled, drop column taken, drop column granted_at;
alter table ratelimit.ephemeral_idempotency_keys drop column ready_at, drop column settled, drop column taken, drop column granted_at;
alter table ratelimit.buckets drop column room, drop column paused_until;
alter table ratelimit.ephemeral_buckets drop column room, drop column paused_until;
do $names$
begin
  -- From PostgreSQL 18 on NOT NULL has a name, and the twin was created with that of the other table.
  if pg_catalog.current_setting('server_version_num')::pg_catalog.int4 operator(pg_catalog.>=) 180000 then
    alter table ratelimit.ephemeral_idempotency_keys
      rename constraint ephemeral_idempotency_keys_reset_after_not_null to idempotency_keys_reset_after_not_null;
  end if;
end;
$names$;
drop table ratelimit.overrides, ratelimit.shard, ratelimit.slots, ratelimit.leases, ratelimit.ephemeral_slots, ratelimit.ephemeral_leases;
alter table ratelimit.policies
  drop column overridden,
  drop column shadow,
  drop column calendar;
drop type ratelimit.calendar;
comment on type ratelimit.decision is
  'The answer about one bucket: allowed; whole tokens remaining; retry_after, zero when allowed and null when the cost can never fit; reset_after, until full; capacity; replayed, when it is the first answer under a live idempotency key, given again.';

-- Snapshot 001 finds its place by this function, and replaces it.
do $home$
begin
  execute pg_catalog.format('create function %I.ratelimit_acquire(policy text, key text, cost bigint default 1, idempotency_key text default null) '
                            'returns ratelimit.decision language sql return null::ratelimit.decision', pg_catalog.current_setting('ratelimit.home'));
end;
$home$;

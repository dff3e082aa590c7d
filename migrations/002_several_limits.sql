{{ if false }}
\reset
\set ON_ERROR_STOP on
do $$
begin
  raise exception 'this file is a migration for tern, and psql would run its way back too'
    using hint = 'Run migrations/psql/install.sql instead.';
end;
$$;
{{ end -}}
{{- /* The functions whose arguments or columns change. Both ways drop them, and grant again what was granted on them. */ -}}
{{ define "changed" }}'ratelimit_define_policy', 'ratelimit_policies', 'ratelimit_acquire', 'ratelimit_acquire_many', 'ratelimit_peek',
                         'ratelimit_refund'{{ end -}}
{{- /* The argument is further names, each after a comma. */ -}}
{{ define "drop_changed" -}}
-- Remembers who may execute the functions that are dropped here, to grant it again at the end, and drops them.
do $drop$
declare
  v_path   text := pg_catalog.current_setting('search_path');
  v_home   text;
  v_grants jsonb := '[]';
  v_proc   record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspname
    into strict v_home
    from pg_proc as p
    join pg_namespace as n on n.oid = p.pronamespace
    join pg_namespace as package on package.nspname = 'ratelimit' and package.nspowner = p.proowner
   where p.proname = 'ratelimit_acquire'
     and p.prorettype = 'ratelimit.decision'::regtype;
  for v_proc in
    select p.oid::regprocedure as signature, p.proname, p.proacl, p.proowner
      from pg_proc as p
     where p.pronamespace = quote_ident(v_home)::regnamespace
       and p.proname in ({{ template "changed" }}{{ . }})
  loop
    v_grants := v_grants || coalesce((
      select jsonb_agg(jsonb_build_object('name', v_proc.proname, 'grantable', a.is_grantable,
                                          'grantee', case a.grantee when 0 then 'public' else a.grantee::regrole::text end))
        from aclexplode(v_proc.proacl) as a
       where a.grantee <> v_proc.proowner), '[]');
    execute format('drop routine %s', v_proc.signature);
  end loop;
  perform set_config('ratelimit.grants', v_grants::text, true);
  perform set_config('ratelimit.home', v_home, true);
  perform set_config('search_path', v_path, true);
end;
$drop$;
{{- end -}}
{{- /* The arguments are further names, each after a comma, and whose grants a function gets. */ -}}
{{ define "grant_changed" -}}
do $grant$
declare
  v_path  text := pg_catalog.current_setting('search_path');
  v_proc  record;
  v_grant record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_proc in
    select p.oid::regprocedure as signature, p.proname, p.proowner,
           coalesce(p.proacl, acldefault('f', p.proowner)) as acl
      from pg_proc as p
     where p.pronamespace = quote_ident(current_setting('ratelimit.home'))::regnamespace
       and p.proname in ({{ template "changed" }}{{ .more }})
  loop
    for v_grant in
      select distinct case a.grantee when 0 then 'public' else a.grantee::regrole::text end as grantee
        from aclexplode(v_proc.acl) as a
       where a.grantee <> v_proc.proowner
    loop
      execute format('revoke all on function %s from %s', v_proc.signature, v_grant.grantee);
    end loop;
    for v_grant in
      select g.grantee, bool_or(g.grantable) as grantable
        from jsonb_to_recordset(current_setting('ratelimit.grants')::jsonb) as g (name text, grantee text, grantable boolean)
       where g.name = {{ .name }}
       group by g.grantee
    loop
      execute format('grant execute on function %s to %s%s', v_proc.signature, v_grant.grantee,
                     case when v_grant.grantable then ' with grant option' end);
    end loop;
  end loop;
  perform set_config('search_path', v_path, true);
end;
$grant$;
{{- end -}}
-- Several limits in one request, overrides, shadow policies, policies that do not refill, debt and reservations, shards.

-- Acquires wait behind this migration, so it does not wait for long. It fails with 55P03 when a transaction that took
-- tokens stays open, and can be run again.
set local lock_timeout = '3s';

-- Calls that begin from here on wait at the policy. They were resolved to the old functions, and go on with what those
-- call: the functions at the end of this file and the old helpers, which the next migration drops.
lock table ratelimit.policies in access exclusive mode;

{{ template "drop_changed" "" }}

alter type ratelimit.decision rename to retired_decision;
create type ratelimit.decision as (
  allowed     boolean,
  remaining   bigint,
  retry_after interval,
  reset_after interval,
  capacity    bigint,
  replayed    boolean,
  shadowed    boolean
);
comment on type ratelimit.decision is
'The answer about one bucket.
allowed: whether the request is granted. A shadow policy grants each request.
remaining: whole tokens in the bucket, rounded down. Below zero while there is debt.
retry_after: the time until the same request is allowed, if no other request takes tokens. Zero if it is allowed; null
  if no wait helps.
reset_after: the time until the bucket is full; null for never.
capacity: of the bucket, in whole tokens, by the policy or the override of the key.
replayed: this is the first answer under a live idempotency key, given again.
shadowed: a shadow policy would have denied if it were enforced.';
create type ratelimit.packed as (
  elements          bigint[],
  remaining         bigint[],
  retry_after_us    bigint[],
  reset_after_us    bigint[],
  capacity          bigint[],
  replayed          boolean[],
  shadowed          boolean[],
  requests          bigint[],
  requests_allowed  boolean[],
  requests_replayed boolean[],
  requests_shadowed boolean[],
  bindings          integer[],
  refused           bigint[],
  error_codes       text[],
  error_messages    text[],
  error_details     text[],
  error_hints       text[]
);
comment on type ratelimit.packed is
'The answers of ratelimit_acquire_packed, as arrays.
The arrays up to shadowed are parallel, those from requests to bindings are, and those from refused on are. Without
  sizes the arrays from requests to bindings are null.
elements: the numbers of the elements that have a decision, from 1, in no particular order.
remaining: as in ratelimit.decision.
retry_after_us: microseconds; 0 if the element is allowed, null for never.
reset_after_us: microseconds; null for never.
capacity: as in ratelimit.decision.
replayed: as in ratelimit.decision. null if no element is replayed.
shadowed: as in ratelimit.decision. null if no element is shadowed.
requests: the numbers of the requests that have a decision, from 1.
requests_allowed: whether the request is granted.
requests_replayed: as replayed of ratelimit_acquire_all.
requests_shadowed: as shadowed of ratelimit_acquire_all.
bindings: the binding element, counted within the request from 1.
refused: the numbers of the requests that have an error, from 1. null if there is none.
error_codes: SQLSTATE.';
create type ratelimit.calendar as (
  ends_at    timestamptz,
  overridden boolean,
  period     interval,
  months     integer,
  time_zone  text collate "C",
  anchor     timestamp,
  turned_at  timestamptz,
  turns_at   timestamptz,
  lease      interval
);
comment on type ratelimit.calendar is
  'When numbers end, infinity for those of a quota or of slots; of these whether some key has had an override; of a quota its period, also in months or 0, its time zone and the local time of one turn, and in a call its last turn and the next; of slots the lease.';
create type ratelimit.charged as (
  places      bigint[],
  wanted      bigint,
  level       bigint,
  refilled_at timestamptz
);
comment on type ratelimit.charged is
  'What ratelimit.take_from_buckets did to one bucket: for which elements, the microtokens they wanted together, and the bucket after it.';
create type ratelimit.reservation as (
  allowed     boolean,
  wait        interval,
  remaining   bigint,
  reset_after interval,
  capacity    bigint,
  replayed    boolean,
  shadowed    boolean
);
comment on type ratelimit.reservation is
'The answer of ratelimit_reserve.
allowed: whether the request is granted. A shadow policy grants each request.
wait: the time until the tokens may be used. Of a denial it is the wait that would have been needed; null for never.
remaining: as in ratelimit.decision.
reset_after: as in ratelimit.decision.
capacity: as in ratelimit.decision.
replayed: as in ratelimit.decision.
shadowed: a shadow policy would have waited or denied if it were enforced.';
create type ratelimit.partial_decision as (
  allowed     boolean,
  remaining   bigint,
  retry_after interval,
  reset_after interval,
  capacity    bigint,
  replayed    boolean,
  shadowed    boolean,
  taken       bigint
);
comment on type ratelimit.partial_decision is
'The answer of ratelimit_acquire_up_to: the columns of ratelimit.decision, and taken.
taken: whole tokens, 0 for a denial.';
create type ratelimit.hold as (
  allowed     boolean,
  remaining   bigint,
  retry_after interval,
  held_for    interval,
  capacity    bigint,
  renewed     boolean,
  shadowed    boolean
);
comment on type ratelimit.hold is
'The answer of ratelimit_hold.
allowed: whether the holder holds. A shadow policy grants each request.
remaining: the slots that nobody holds after the call. Below zero after the capacity was lowered.
retry_after: the time until the same request is allowed, if nobody holds, renews or releases meanwhile. Zero if it is allowed;
  null if no wait helps.
held_for: how long the lease lasts from now. Zero for a denial.
capacity: the slots of the key, by the policy or the override of the key.
renewed: the holder held them before the call.
shadowed: a shadow policy would have denied if it were enforced. Then nothing is held.';
create type ratelimit.asked as (
  key    text collate "C",
  wanted bigint,
  places bigint[],
  size   bigint
);
comment on type ratelimit.asked is
  'What a batch asks of one bucket: the microtokens, and for which elements. See ratelimit.take_from_buckets.';
create type ratelimit.part as (
  policy  ratelimit.policies,
  asked   ratelimit.asked[],
  row_ids tid[]
);
comment on type ratelimit.part is
  'What a batch asks of the buckets of one policy, and their row ids. See ratelimit.acquire_batch.';
comment on type ratelimit.retired_decision is
  'Retired: calls that began under schema version 1 may still return it.';

-- Neither column makes PostgreSQL write the table anew, which a call with an older snapshot would find empty.
alter table ratelimit.policies
  add column overridden boolean not null default false,
  add column shadow     boolean not null default false,
  add column calendar   ratelimit.calendar,
  add constraint policies_calendar_check check ((calendar).period is not null or (calendar).lease is not null or calendar is null);
-- The planner reads a table slower while rows may lack a column. CLUSTER writes them anew, and unlike other ways to do so
-- it keeps them visible to older snapshots.
cluster ratelimit.policies using policies_pkey;
alter table ratelimit.policies set without cluster;
comment on column ratelimit.policies.overridden is
  'Some key has had an override, or the policy is a quota or lends slots; until then nothing looks for an override.';
comment on column ratelimit.policies.shadow is
  'The policy watches: what it would deny is allowed, and marked shadowed.';
comment on column ratelimit.policies.calendar is
  'Of a quota, whose buckets are full at each turn, or of slots, which have a lease; either has refill 0. null for a policy that refills.';

-- The columns from stepped on are those of ratelimit.policies.
create table ratelimit.overrides (
  policy_id  bigint      not null,
  expires_at timestamptz not null,
  key        text        collate "C" not null,
  capacity   bigint      not null,
  refill     bigint      not null,
  every      interval    not null,
  stepped    boolean     not null,
  tick       interval    not null generated always as (case when stepped then every else interval '1 microsecond' end) stored,
  every_us   numeric     not null generated always as (extract(epoch from every) * 1000000.0) stored,
  tick_us    numeric     not null generated always as (case when stepped then extract(epoch from every) * 1000000.0 else 1 end) stored,
  full_level numeric     not null generated always as (capacity * 1000000) stored,
  gain       numeric     not null generated always as (refill::numeric * 1000000000000::numeric) stored,
  tick_gain  numeric     not null generated always as ((refill * 1000000)::numeric * case when stepped then extract(epoch from every) * 1000000.0 else 1 end) stored,
  round_up   numeric     not null generated always as ((refill * 1000000)::numeric * case when stepped then extract(epoch from every) * 1000000.0 else 1 end - 1::numeric) stored,
  calendar   ratelimit.calendar,
  constraint overrides_pkey primary key (policy_id, key)
);
create index overrides_expires_at_idx on ratelimit.overrides (expires_at);
comment on table ratelimit.overrides is
  'The numbers of single keys that differ from their policy''s; changed by ratelimit_override and ratelimit_remove_override only.';
comment on column ratelimit.overrides.expires_at is
  'From when on the override is as good as absent; infinity for never.';
comment on column ratelimit.overrides.stepped is
  'That of the policy.';
comment on column ratelimit.overrides.calendar is
  'Of a quota''s key the time zone and the anchor; of a key of slots the lease.';

-- Inserts fill a page to its fillfactor, and a page of which less is free than that is pruned when it is read. So of a page that
-- inserts have filled every update was followed by a prune, which was an eighth of what a batch cost. Rows that become smaller
-- leave room for more versions.
alter table ratelimit.buckets add column room uuid, add column paused_until timestamptz;
alter table ratelimit.ephemeral_buckets add column room uuid, add column paused_until timestamptz;
alter table ratelimit.buckets alter column room set default '00000000-0000-0000-0000-000000000000';
alter table ratelimit.ephemeral_buckets alter column room set default '00000000-0000-0000-0000-000000000000';
comment on column ratelimit.buckets.room is
  'Nothing but 16 bytes. The first update of a row sets it to null, and so leaves room on the page for the next versions.';
comment on column ratelimit.buckets.paused_until is
  'The end of the last pause: until then what is given back does not lift the level above 0. See ratelimit_pause.';
comment on column ratelimit.ephemeral_buckets.room is
  'Nothing but 16 bytes. The first update of a row sets it to null, and so leaves room on the page for the next versions.';
comment on column ratelimit.ephemeral_buckets.paused_until is
  'The end of the last pause: until then what is given back does not lift the level above 0. See ratelimit_pause.';

-- The time until a bucket is full is null when its policy does not refill.
alter table ratelimit.idempotency_keys alter column reset_after drop not null;
alter table ratelimit.ephemeral_idempotency_keys alter column reset_after drop not null;

-- A column that is null in every row slows no statement down: the planner finds nothing missing, and no row is written anew.
alter table ratelimit.idempotency_keys
  add column ready_at   timestamptz,
  add column settled    bigint,
  add column taken      bigint,
  add column granted_at timestamptz;
alter table ratelimit.ephemeral_idempotency_keys
  add column ready_at   timestamptz,
  add column settled    bigint,
  add column taken      bigint,
  add column granted_at timestamptz;
comment on column ratelimit.idempotency_keys.ready_at is
  'When a reserved grant begins to hold; null for a grant that held at once.';
comment on column ratelimit.idempotency_keys.settled is
  'The real cost, in place of cost, once the grant is settled.';
comment on column ratelimit.idempotency_keys.taken is
  'The microtokens that a charge took which was cut at the floor; null for all of cost.';
comment on column ratelimit.idempotency_keys.granted_at is
  'When a quota granted; null for another policy.';
comment on column ratelimit.ephemeral_idempotency_keys.granted_at is
  'When a quota granted; null for another policy.';
comment on column ratelimit.ephemeral_idempotency_keys.ready_at is
  'When a reserved grant begins to hold; null for a grant that held at once.';
comment on column ratelimit.ephemeral_idempotency_keys.settled is
  'The real cost, in place of cost, once the grant is settled.';
comment on column ratelimit.ephemeral_idempotency_keys.taken is
  'The microtokens that a charge took which was cut at the floor; null for all of cost.';

-- Slots. What is held is the sum of the leases that have not ended. A key's row in slots is the lock of its leases: a session that changes
-- them writes it first, and with it their sum. So no lease is without that row.
--
-- Neither a grant nor a renewal nor a release changes an indexed column, but for due_at once after clean-up has postponed it: updates
-- can be HOT, and a key that is in use pays nothing for clean-up.
create table ratelimit.slots (
  policy_id     bigint      not null,
  changes       bigint      not null,
  held          bigint      not null,
  counted_until timestamptz not null,
  due_at        timestamptz not null,
  key           text        collate "C" not null,
  constraint slots_pkey primary key (policy_id, key)
);
create index slots_due_at_idx on ratelimit.slots (due_at);
comment on table ratelimit.slots is
  'Keys of durable slots that somebody has held: the lock of the leases of a key.';
comment on column ratelimit.slots.changes is
  'Counts what was changed in the leases of the key, from the microsecond in which the row was created: no two states have one number.';
comment on column ratelimit.slots.held is
  'The costs of all leases of the key, until counted_until.';
comment on column ratelimit.slots.counted_until is
  'Until then held is right and no lease of the key ends; -infinity: the next grant adds up the leases.';
comment on column ratelimit.slots.due_at is
  'When clean-up looks for ended leases of the key; none of its leases ends earlier.';
create table ratelimit.leases (
  policy_id bigint      not null,
  ends_at   timestamptz not null,
  cost      integer     not null,
  key       text        collate "C" not null,
  holder    text        collate "C" not null,
  constraint leases_pkey primary key (policy_id, key, holder)
);
comment on table ratelimit.leases is
  'Who holds how many slots of a durable policy until when; from ends_at on a lease is as good as absent.';
create unlogged table ratelimit.ephemeral_slots (
  like ratelimit.slots including all
);
comment on table ratelimit.ephemeral_slots is
  'Keys of ephemeral slots: unlogged, empty after a crash.';
create unlogged table ratelimit.ephemeral_leases (
  like ratelimit.leases including all
);
comment on table ratelimit.ephemeral_leases is
  'Leases of ephemeral slots: unlogged, empty after a crash.';
-- As for buckets: room for the next versions of rows, and vacuum that keeps up.
alter table ratelimit.slots set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.ephemeral_slots set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.leases set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.ephemeral_leases set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);

create table ratelimit.shard (
  shard integer not null,
  of    integer not null
);
create unique index shard_one_row_idx on ratelimit.shard ((true));
comment on table ratelimit.shard is
  'At most one row: which of how many shards this database is; written by ratelimit_define_shard only.';
comment on column ratelimit.shard.shard is
  'The number of this shard, from 0.';
comment on column ratelimit.shard.of is
  'How many shards there are: a power of two.';

-- Default privileges may have granted rights on the new tables to other roles.
do $private$
declare
  v_path  text := pg_catalog.current_setting('search_path');
  v_grant record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_grant in
    select distinct c.oid::regclass as of, case a.grantee when 0 then 'public' else a.grantee::regrole::text end as grantee
      from pg_class as c
     cross join aclexplode(c.relacl) as a
     where c.oid in ('ratelimit.overrides'::regclass, 'ratelimit.shard'::regclass, 'ratelimit.slots'::regclass, 'ratelimit.leases'::regclass,
                     'ratelimit.ephemeral_slots'::regclass, 'ratelimit.ephemeral_leases'::regclass)
       and a.grantee <> c.relowner
  loop
    execute format('revoke all on %s from %s', v_grant.of, v_grant.grantee);
  end loop;
  perform set_config('search_path', v_path, true);
end;
$private$;

{{ install_snapshot "002" }}

-- Retired: calls that began under schema version 1 may still call these.
create or replace function ratelimit.granted(level bigint, reset_us bigint, capacity bigint)
  returns ratelimit.retired_decision language sql immutable parallel safe
as $$
  select (true, level / 1000000, interval '0', ratelimit.duration(reset_us), capacity, false)::ratelimit.retired_decision
$$;
create or replace function ratelimit.answer(level bigint, retry_us bigint, reset_us bigint, capacity bigint)
  returns ratelimit.retired_decision language sql immutable parallel safe
as $$
  select (coalesce(retry_us = 0, false), ratelimit.whole_tokens(level), ratelimit.duration(retry_us),
          ratelimit.duration(reset_us), capacity, false)::ratelimit.retired_decision
$$;
create or replace function ratelimit.replay(granted ratelimit.idempotency_keys, cost bigint)
  returns ratelimit.retired_decision language plpgsql immutable
as $$
begin
  if granted.cost <> cost then
    perform ratelimit.refuse_repeat(granted, cost);
  end if;
  return (true, granted.remaining, interval '0', granted.reset_after, granted.capacity, true)::ratelimit.retired_decision;
end;
$$;

-- Grants again what was granted on the functions that were dropped, and no more. Who may call
-- ratelimit_acquire_many may call ratelimit_acquire_packed, which is the same in another form.
{{ template "grant_changed" (dict "more" `, 'ratelimit_acquire_packed'` "name" `case v_proc.proname when 'ratelimit_acquire_packed' then 'ratelimit_acquire_many' else v_proc.proname end`) }}
---- create above / drop below ----

set local lock_timeout = '3s';
lock table ratelimit.policies in access exclusive mode;
{{- if not .uninstall }}
-- Without quotas, what is used of one, in the period that runs, is missing in its bucket.
update ratelimit.buckets as b
   set level = ratelimit.level_now(b.level, b.refilled_at, now(), ratelimit.with_turns(p, now()))
  from ratelimit.policies as p
 where p.id = b.policy_id
   and (p.calendar).period is not null;
update ratelimit.ephemeral_buckets as b
   set level = ratelimit.level_now(b.level, b.refilled_at, now(), ratelimit.with_turns(p, now()))
  from ratelimit.policies as p
 where p.id = b.policy_id
   and (p.calendar).period is not null;
{{- end }}

{{ template "drop_changed" `,
                         'ratelimit_acquire_packed', 'ratelimit_acquire_all', 'ratelimit_acquire_all_many', 'ratelimit_override',
                         'ratelimit_remove_override', 'ratelimit_overrides', 'ratelimit_charge', 'ratelimit_settle',
                         'ratelimit_reserve', 'ratelimit_acquire_up_to', 'ratelimit_acquire_up_to_many', 'ratelimit_enforce', 'ratelimit_guard', 'ratelimit_pre_request',
                         'ratelimit_status', 'ratelimit_doctor', 'ratelimit_shard', 'ratelimit_define_shard', 'ratelimit_reset_all',
                         'ratelimit_hold', 'ratelimit_renew', 'ratelimit_release', 'ratelimit_holders', 'ratelimit_peek_many', 'ratelimit_pause'` }}
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

{{- if not .uninstall }}{{/* which goes on to the way back of 001, and that drops these */}}
{{ install_snapshot "001" }}

-- Grants again what was granted on the functions that were dropped, and no more.
{{ template "grant_changed" (dict "more" "" "name" "v_proc.proname") }}
{{- end }}

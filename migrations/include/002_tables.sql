-- The types and tables of 002_several_limits.sql.
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

-- The types and tables, which migration 001 makes.
comment on schema ratelimit is
  'pgratelimit: tables and private helpers. Callers use the public functions named ratelimit_*.';
comment on table ratelimit.version is
  'One row: the newest migration that is installed.';
create unique index if not exists version_one_row on ratelimit.version ((true));  -- a restore of rows alone would add one

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
create type ratelimit.turns as (
  turned_at timestamptz,
  turns_at  timestamptz
);
comment on type ratelimit.turns is
  'The turns of a quota around an instant: the last one not after it, and the next one.';
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
create type ratelimit.demand as (
  key    text collate "C",
  wanted bigint,
  places bigint[],
  size   bigint
);
comment on type ratelimit.demand is
  'What a batch asks of one bucket: the microtokens, and for which elements. See ratelimit.take_from_buckets.';

-- Each new policy draws a random id, so rows of a dropped policy never count for a new policy of the same
-- name. The generated columns are operands of sql/arithmetic.sql. They are stored, because computing them
-- would make every decision slower.
create table ratelimit.policies (
  id          bigint    not null,
  name        text      collate "C" not null,
  capacity    bigint    not null,
  refill      bigint    not null,
  every       interval  not null,
  stepped     boolean   not null,
  durable     boolean   not null,
  remember    interval  not null,
  shadow      boolean   not null,
  overridden  boolean   not null,
  period      interval,
  time_zone   text      collate "C",
  anchor      timestamp,
  lease       interval,
  history     interval,
  tick        interval  not null generated always as (case when stepped then every else interval '1 microsecond' end) stored,
  every_us    numeric   not null generated always as (extract(epoch from every) * 1000000.0) stored,
  tick_us     numeric   not null generated always as (case when stepped then extract(epoch from every) * 1000000.0 else 1 end) stored,
  full_level  numeric   not null generated always as (capacity * 1000000) stored,
  gain        numeric   not null generated always as (refill::numeric * 1000000000000::numeric) stored,
  tick_gain   numeric   not null generated always as ((refill * 1000000)::numeric * case when stepped then extract(epoch from every) * 1000000.0 else 1 end) stored,
  round_up    numeric   not null generated always as ((refill * 1000000)::numeric * case when stepped then extract(epoch from every) * 1000000.0 else 1 end - 1::numeric) stored,
  rate_full   bigint    not null generated always as (capacity * 1000000) stored,
  rate_floor  bigint    not null generated always as (capacity * -1000000) stored,
  rate_gain   bigint    not null generated always as (refill * 1000000 / case when stepped then 1 else gcd(refill * 1000000, (extract(epoch from every) * 1000000.0)::bigint) end) stored,
  rate_per    bigint    not null generated always as (case when stepped then 1 else (extract(epoch from every) * 1000000.0)::bigint / gcd(refill * 1000000, (extract(epoch from every) * 1000000.0)::bigint) end) stored,
  rate_up     bigint    generated always as (nullif(refill * 1000000 / case when stepped then 1 else gcd(refill * 1000000, (extract(epoch from every) * 1000000.0)::bigint) end, 0) - 1) stored,
  fill_ticks  bigint    generated always as (case
    when greatest(capacity, refill) >= 70000000000 or capacity::numeric * 2000000.0 * case when stepped then 1.0
           else ((extract(epoch from every) * 1000000.0)::bigint / gcd(refill * 1000000, (extract(epoch from every) * 1000000.0)::bigint))::numeric end >= 9e18 then null
    when refill = 0 then 0::numeric
    when capacity::numeric * extract(epoch from every) < refill::numeric * 470000000.0
      then div(capacity::numeric * 2.0 * case when stepped then 1.0 else extract(epoch from every) * 1000000.0 end, refill::numeric) + 1.0 end::bigint) stored,
  remember_us bigint    not null generated always as ((extract(epoch from remember) * 1000000.0)::bigint) stored,
  months      integer   generated always as ((extract(year from period) * 12.0 + extract(month from period))::integer) stored,
  kind        text      collate "C" not null generated always as (case when lease is not null then 'slots' when period is not null then 'quota' else 'tokens' end) stored,
  special     boolean   not null generated always as (overridden or period is not null or lease is not null) stored,
  plain       boolean   not null generated always as (not (stepped or overridden) and period is null and lease is null
    and greatest(capacity, refill) < 70000000000
    and capacity::numeric * 2000000.0 * ((extract(epoch from every) * 1000000.0)::bigint / gcd(refill * 1000000, (extract(epoch from every) * 1000000.0)::bigint))::numeric < 9e18
    and (refill = 0 or capacity::numeric * extract(epoch from every) < refill::numeric * 470000000.0)) stored,
  changed_at  timestamptz not null,
  changed_by  text      collate "C" not null,
  constraint policies_pkey primary key (name),
  constraint policies_id_key unique (id)
);
comment on table ratelimit.policies is
  'One row per policy; changed by ratelimit_define_policy and ratelimit_drop_policy only.';
comment on column ratelimit.policies.tick is
  'every if stepped, else 1 microsecond: the interval after which refill is credited.';
comment on column ratelimit.policies.every_us is
  'every, in microseconds.';
comment on column ratelimit.policies.tick_us is
  'tick, in microseconds.';
comment on column ratelimit.policies.full_level is
  'capacity * 10^6: the level of a full bucket, in microtokens.';
comment on column ratelimit.policies.gain is
  'refill * 10^12, in 10^-12 tokens: elapsed seconds * gain / every_us = microtokens gained.';
comment on column ratelimit.policies.tick_gain is
  'refill * 10^6 * tick_us, in microtokens * microseconds: tick_gain / every_us = microtokens gained in one tick.';
comment on column ratelimit.policies.round_up is
  'tick_gain - 1, in microtokens * microseconds: added before a division by tick_gain, it rounds the quotient up.';
comment on column ratelimit.policies.rate_full is
  'full_level in whole numbers, as those that follow.';
comment on column ratelimit.policies.rate_floor is
  'The level above which whole numbers are exact.';
comment on column ratelimit.policies.rate_gain is
  'rate_per ticks gain rate_gain microtokens, in lowest terms.';
comment on column ratelimit.policies.rate_per is
  'See rate_gain.';
comment on column ratelimit.policies.rate_up is
  'rate_gain - 1: added before a division by rate_gain, it rounds the quotient up. null if nothing refills, which gives waits of null.';
comment on column ratelimit.policies.fill_ticks is
  'The ticks in which a bucket gains its capacity twice. null where a product of whole numbers could overflow, or the sum of such a gain
  and of the level that a larger policy left, 9 * 10^18 at most: then numeric counts.';
comment on column ratelimit.policies.remember_us is
  'remember, in microseconds.';
comment on column ratelimit.policies.shadow is
  'The policy watches: what it would deny is allowed, and marked shadowed.';
comment on column ratelimit.policies.overridden is
  'Some key has had an override; until then nothing looks for one.';
comment on column ratelimit.policies.period is
  'Of a quota, the time from turn to turn: whole days or whole months. Its refill is 0.';
comment on column ratelimit.policies.anchor is
  'Of a quota, the local time of one turn.';
comment on column ratelimit.policies.lease is
  'Of slots, how long they are held unless the holder renews. Their refill is 0.';
comment on column ratelimit.policies.history is
  'Of a durable quota, how long the usage of closed periods is kept; 0: no more, null: it never was.';
comment on column ratelimit.policies.months is
  'period, in months; 0 for days.';
comment on column ratelimit.policies.kind is
  'tokens: buckets that refill. quota: buckets that are full at each turn of a calendar. slots: leases.';
comment on column ratelimit.policies.plain is
  'A call takes the short way: the bucket refills continuously by numbers for which bigint will do, and no key has had an override.';
comment on column ratelimit.policies.special is
  'Not plain tokens: a call about the policy looks at its kind, and for an override of the key.';
comment on column ratelimit.policies.changed_at is
  'When ratelimit_define_policy last changed something of the policy.';
comment on column ratelimit.policies.changed_by is
  'Who did: the role of the session, and after a slash the role that SET ROLE chose, if any.';

-- What applies to a key in a call.
create type ratelimit.numbers as (
  policy  ratelimit.policies,
  ends_at timestamptz,
  turns   ratelimit.turns,
  after   ratelimit.policies
);
comment on type ratelimit.numbers is
'The policy with the numbers of the override of the key, when some of these end (null: none does), the turns of a quota, and the policy
  with the numbers that apply after the end.';

create type ratelimit.element as (
  place  integer,
  policy ratelimit.policies,
  key    text collate "C",
  cost   bigint,
  covers boolean
);
comment on type ratelimit.element is
  'One charge of ratelimit_acquire_all, and whether the level that is stored covers it; place is its number.';
create type ratelimit.part as (
  policy  ratelimit.policies,
  demands ratelimit.demand[],
  row_ids tid[]
);
comment on type ratelimit.part is
  'What a batch asks of the buckets of one policy, and their row ids. See ratelimit.acquire_batch.';

-- A row is both parts of an override: the columns that begin with ending are the part that ends, and hide the others until then. null is
-- what follows. refill and every are null together.
create table ratelimit.overrides (
  policy_id       bigint      not null,
  expires_at      timestamptz,
  changed_at      timestamptz not null,
  key             text        collate "C" not null,
  changed_by      text        collate "C" not null,
  capacity        bigint,
  refill          bigint,
  every           interval,
  time_zone       text        collate "C",
  anchor          timestamp,
  lease           interval,
  ending_capacity bigint,
  ending_refill   bigint,
  ending_every    interval,
  ending_lease    interval,
  stays           boolean     not null generated always as (num_nonnulls(capacity, refill, every, time_zone, anchor, lease) > 0) stored,
  constraint overrides_pkey primary key (policy_id, key)
);
create index overrides_expires_at_idx on ratelimit.overrides (expires_at) where expires_at is not null;
comment on table ratelimit.overrides is
  'The numbers of single keys that differ from their policy''s; changed by ratelimit_override and ratelimit_remove_override only.';
comment on column ratelimit.overrides.expires_at is
  'From when on the part that ends is as good as absent; null if nothing ends.';
comment on column ratelimit.overrides.changed_at is
  'When ratelimit_override last changed something of the row.';
comment on column ratelimit.overrides.changed_by is
  'Who did, as in ratelimit.policies.';
comment on column ratelimit.overrides.stays is
  'Whether there is a part that stays.';

create type ratelimit.override as (
  policy     text,
  key        text,
  capacity   bigint,
  refill     bigint,
  every      interval,
  expires_at timestamptz,
  time_zone  text,
  anchor     timestamp,
  lease      interval,
  changed_at timestamptz,
  changed_by text
);
comment on type ratelimit.override is
'One part of the override of a key. null is a number that the part leaves to what follows: to the part that stays, or to the policy.
expires_at: the end of the part that ends; null for the part that stays.
changed_at: when the override last changed, either part of it.
changed_by: who changed it: the role of the session, and after a slash the role that SET ROLE chose, if any.';

-- An acquire changes no indexed column, so its updates can be HOT. Clean-up finds rows by the index on due_at,
-- which an acquire sets in a new row and never changes. The columns of fixed width come first, because
-- PostgreSQL reads them faster there.
--
-- Inserts fill a page to its fillfactor, and a page of which less is free than that is pruned when it is read. So of a page that
-- inserts have filled every update was followed by a prune, which was an eighth of what a batch cost. Rows that become smaller, by
-- the column room, leave room for more versions.
--
-- fillfactor leaves room on each page for the next version of its rows, which a HOT update needs. Vacuum starts after a fixed number
-- of changed rows and a small share of the table, because by the default share a large table would wait too long. It takes no pauses
-- (cost_delay), so that dead row versions go soon.
create table ratelimit.buckets (
  policy_id    bigint      not null,
  level        bigint      not null,
  refilled_at  timestamptz not null,
  due_at       timestamptz not null,
  key          text        collate "C" not null,
  room         uuid        default '00000000-0000-0000-0000-000000000000',
  paused_until timestamptz,
  counts_from  timestamptz,
  constraint buckets_pkey primary key (policy_id, key)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
create index buckets_due_at_idx on ratelimit.buckets (due_at);
comment on table ratelimit.buckets is
  'Buckets of durable policies that are not known to be full; a bucket without a row is full.';
comment on column ratelimit.buckets.level is
  'Microtokens at refilled_at; below zero is debt.';
comment on column ratelimit.buckets.refilled_at is
  'When level was true; for a stepped policy a whole number of intervals after the first take, until the policy changes.';
comment on column ratelimit.buckets.due_at is
  'When clean-up checks whether the bucket is full again.';
comment on column ratelimit.buckets.room is
  'Nothing but 16 bytes. The first update of a row sets it to null, and so leaves room on the page for the next versions.';
comment on column ratelimit.buckets.paused_until is
  'The end of the last pause: until then what is given back does not lift the level above 0. See ratelimit_pause.';
comment on column ratelimit.buckets.counts_from is
  'Of a quota with a history, when the period began of which level counts; null for the last turn not after refilled_at. See usage.sql.';

create table ratelimit.idempotency_keys (
  policy_id       bigint      not null,
  cost            bigint      not null,
  remaining       bigint      not null,
  capacity        bigint      not null,
  expires_at      timestamptz not null,
  reset_after     interval,
  key             text        collate "C" not null,
  idempotency_key text        collate "C" not null,
  ready_at        timestamptz,
  settled         bigint,
  taken           bigint,
  granted_at      timestamptz,
  constraint idempotency_keys_pkey primary key (policy_id, key, idempotency_key)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
create index idempotency_keys_expires_at_idx on ratelimit.idempotency_keys (expires_at);
comment on table ratelimit.idempotency_keys is
  'Grants of durable policies made under an idempotency key, as first answered, until expires_at.';
comment on column ratelimit.idempotency_keys.reset_after is
  'null where the bucket''s policy does not refill.';
comment on column ratelimit.idempotency_keys.ready_at is
  'When a reserved grant begins to hold; null for a grant that held at once.';
comment on column ratelimit.idempotency_keys.settled is
  'The real cost, in place of cost, once the grant is settled.';
comment on column ratelimit.idempotency_keys.taken is
  'The microtokens that a charge took which was cut at the floor; null for all of cost.';
comment on column ratelimit.idempotency_keys.granted_at is
  'When a quota granted; null for another policy.';

create table ratelimit.usage (
  policy_id  bigint      not null,
  began      timestamptz not null,
  ended      timestamptz not null,
  expires_at timestamptz not null,
  used       bigint      not null,
  key        text        collate "C" not null,
  constraint usage_pkey primary key (policy_id, key, began)
);
create index usage_expires_at_idx on ratelimit.usage (expires_at);
comment on table ratelimit.usage is
  'What keys of quotas with a history have used in periods that are closed, until expires_at.';
comment on column ratelimit.usage.used is
  'Whole tokens.';

-- Slots. What is held is the sum of the leases that have not ended. A key's row in slots is the lock of its leases: a session that changes
-- them writes it first, and with it their sum. So no lease is without that row.
--
-- Neither a grant nor a renewal nor a release changes an indexed column, but for due_at once after clean-up has postponed it: updates
-- can be HOT, and a key that is in use pays nothing for clean-up.
create table ratelimit.slots (
  policy_id     bigint      not null,
  held          bigint      not null,
  counted_until timestamptz not null,
  due_at        timestamptz not null,
  key           text        collate "C" not null,
  constraint slots_pkey primary key (policy_id, key)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
create index slots_due_at_idx on ratelimit.slots (due_at);
comment on table ratelimit.slots is
  'Keys of durable slots that somebody has held: the lock of the leases of a key.';
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
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
comment on table ratelimit.leases is
  'Who holds how many slots of a durable policy until when; from ends_at on a lease is as good as absent.';

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

-- The twins for ephemeral policies. They are not in the WAL, so commits flush nothing for them, and a crash
-- empties them.
create unlogged table ratelimit.ephemeral_buckets (
  like ratelimit.buckets including all
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
comment on table ratelimit.ephemeral_buckets is
  'Buckets of ephemeral policies: unlogged, empty after a crash.';
create unlogged table ratelimit.ephemeral_idempotency_keys (
  like ratelimit.idempotency_keys including all
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
comment on table ratelimit.ephemeral_idempotency_keys is
  'Idempotency keys of ephemeral policies: unlogged, empty after a crash.';
create unlogged table ratelimit.ephemeral_slots (
  like ratelimit.slots including all
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
comment on table ratelimit.ephemeral_slots is
  'Keys of ephemeral slots: unlogged, empty after a crash.';
create unlogged table ratelimit.ephemeral_leases (
  like ratelimit.leases including all
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);
comment on table ratelimit.ephemeral_leases is
  'Leases of ephemeral slots: unlogged, empty after a crash.';

-- Default privileges may have granted rights on the schema and the tables to other roles.
do $private$
declare
  v_path  text := pg_catalog.current_setting('search_path');
  v_grant record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_grant in
    select o.object, case a.grantee when 0 then 'public' else a.grantee::pg_catalog.regrole::text end as grantee
      from (select 'schema ratelimit', n.nspacl, n.nspowner
              from pg_catalog.pg_namespace as n
             where n.nspname = 'ratelimit'
            union all
            select 'table ' || c.oid::pg_catalog.regclass, c.relacl, c.relowner
              from pg_catalog.pg_class as c
             where c.relnamespace = 'ratelimit'::pg_catalog.regnamespace and c.relkind = 'r') as o (object, acl, owner)
     cross join lateral pg_catalog.aclexplode(o.acl) as a
     where a.grantee <> o.owner
     group by o.object, a.grantee
  loop
    execute pg_catalog.format('revoke all on %s from %s', v_grant.object, v_grant.grantee);
  end loop;
  perform pg_catalog.set_config('search_path', v_path, true);
end;
$private$;

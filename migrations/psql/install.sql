-- Installs pgratelimit, or brings an installed one up to date; running it again is harmless. For psql:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f install.sql
--
-- The role must be the owner of schema ratelimit, or be allowed to create schemas while that is not there. The
-- functions go into the schema that heads search_path, and stay where an earlier install put them. Each migration is
-- one transaction. psql ends with status 3 where it fails.
--
-- Generated from the migrations: make psql.
\set pgratelimit_stop :ON_ERROR_STOP
\set pgratelimit_quiet :QUIET
\set ON_ERROR_STOP on
\set QUIET on
do $begin$
begin
  if pg_catalog.now() operator(pg_catalog.<>) pg_catalog.statement_timestamp() then
    raise exception 'this file cannot run inside a transaction'
      using errcode = '25001',
            hint    = 'Leave out --single-transaction, or commit first.';
  end if;
end;
$begin$;

-- What each transaction begins with.
select $pgratelimit$
do $prepare$
declare
  v_path    text := pg_catalog.current_setting('search_path');
  v_schema  oid;
  v_owner   oid;
  v_version integer;
  v_member  boolean;  -- of the extension
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  perform pg_advisory_xact_lock(9628173550095224);  -- as tern does
  select n.oid, n.nspowner into v_schema, v_owner from pg_namespace as n where n.nspname = 'ratelimit';
  if not found then
    create schema ratelimit;
  elsif exists (select from pg_class as c where c.relnamespace = v_schema and c.relowner <> v_owner) then
    raise exception 'schema ratelimit holds objects of several roles'
      using errcode = '42501',
            detail  = 'They would run with your rights.',
            hint    = 'Drop what does not belong to the owner of the schema.';
  else
    v_member := exists (select
                          from pg_depend as d
                         where d.classid = 'pg_namespace'::regclass
                           and d.objid = v_schema
                           and d.refclassid = 'pg_extension'::regclass
                           and d.deptype = 'e');
    if v_member or pg_get_userbyid(v_owner) <> current_user then
      if exists (select
                   from pg_class as c
                   join pg_attribute as a on a.attrelid = c.oid
                  where c.relnamespace = v_schema
                    and c.relname = 'schema_version'
                    and c.relkind = 'r'
                    and not c.relrowsecurity
                    and a.attname = 'version'
                    and a.atttypid = 'integer'::regtype
                    and has_schema_privilege(v_schema, 'usage')
                    and has_table_privilege(c.oid, 'select')) then
        select v.version into v_version from only ratelimit.schema_version as v;
      end if;
      if v_version is null or v_version < 2 then
        if v_member then
          raise exception 'pgratelimit is an extension in this database'
            using errcode = '55000',
                  hint    = 'Run: alter extension pgratelimit update';
        end if;
        raise exception 'schema ratelimit belongs to another role'
          using errcode = '42501',
                detail  = format('It belongs to %s.', v_owner::regrole),
                hint    = format('Connect as %1$s, for example with PGOPTIONS=''-c role=%1$s''; or drop the schema if it was planted.', v_owner::regrole);
      end if;
    end if;
  end if;
  if not exists (select from pg_class as c where c.relnamespace = 'ratelimit'::regnamespace and c.relname = 'schema_version') then
    create table ratelimit.schema_version (version int4 not null);
    insert into ratelimit.schema_version values (0);
  end if;
  perform set_config('search_path', v_path, true);
end;
$prepare$;
do $newer$
declare
  v_version integer := (select v.version from ratelimit.schema_version as v);
begin
  if v_version operator(pg_catalog.>) 2 then
    raise exception 'a newer schema is installed'
      using errcode = '55000',
            detail  = pg_catalog.format('Schema version %s is installed; this file knows versions up to 2.', v_version),
            hint    = 'Use the file of the release that installed it, or of a later one.';
  end if;
end;
$newer$;
$pgratelimit$ as pgratelimit_prepare
\gset

begin transaction isolation level read committed;
:pgratelimit_prepare
select v.version operator(pg_catalog.<) 1 as pgratelimit_missing from ratelimit.schema_version as v
\gset
\if :pgratelimit_missing
-- 001_install.sql
-- Schema, tables and types, then the functions. They are one migration, because the public functions go into
-- the schema that heads the session's search_path, and tern resets the session after each migration.

do $schema$
declare
  v_path   text := pg_catalog.current_setting('search_path');
  v_object text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select pg_describe_object(d.classid, d.objid, d.objsubid)
    into v_object
    from pg_depend as d
   where d.refclassid = 'pg_namespace'::regclass
     and d.refobjid = 'ratelimit'::regnamespace
     and (d.classid, d.objid) <> ('pg_class'::regclass, 'ratelimit.schema_version'::regclass)
   limit 1;
  if found then
    raise exception 'schema ratelimit is not empty'
      using errcode = '42P06',
            detail  = format('It holds %s, which is not of this package.', v_object),
            hint    = 'Drop or move what the schema holds, or drop the schema if it was planted.';
  end if;
  perform set_config('search_path', v_path, true);
end;
$schema$;

comment on schema ratelimit is
  'pgratelimit: tables and private helpers. Callers use the public functions named ratelimit_*.';

comment on table ratelimit.schema_version is
  'One row: the newest migration that is installed.';

create type ratelimit.decision as (
  allowed     boolean,
  remaining   bigint,
  retry_after interval,
  reset_after interval,
  capacity    bigint,
  replayed    boolean
);
comment on type ratelimit.decision is
  'The answer about one bucket: allowed; whole tokens remaining; retry_after, zero when allowed and null when the cost can never fit; reset_after, until full; capacity; replayed, when it is the first answer under a live idempotency key, given again.';

-- Each new policy draws a random id, so rows of a dropped policy never count for a new policy of the same
-- name. The generated columns are operands of sql/arithmetic.sql. They are stored, because computing them
-- would make every decision slower.
create table ratelimit.policies (
  id          bigint   not null,
  name        text     collate "C" not null,
  capacity    bigint   not null,
  refill      bigint   not null,
  every       interval not null,
  stepped     boolean  not null,
  durable     boolean  not null,
  remember    interval not null,
  tick        interval not null generated always as (case when stepped then every else interval '1 microsecond' end) stored,
  every_us    numeric  not null generated always as (extract(epoch from every) * 1000000.0) stored,
  tick_us     numeric  not null generated always as (case when stepped then extract(epoch from every) * 1000000.0 else 1 end) stored,
  full_level  numeric  not null generated always as (capacity * 1000000) stored,
  gain        numeric  not null generated always as (refill::numeric * 1000000000000::numeric) stored,
  tick_gain   numeric  not null generated always as ((refill * 1000000)::numeric * case when stepped then extract(epoch from every) * 1000000.0 else 1 end) stored,
  round_up    numeric  not null generated always as ((refill * 1000000)::numeric * case when stepped then extract(epoch from every) * 1000000.0 else 1 end - 1::numeric) stored,
  remember_us bigint   not null generated always as ((extract(epoch from remember) * 1000000.0)::bigint) stored,
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
comment on column ratelimit.policies.remember_us is
  'remember, in microseconds.';

-- An acquire changes no indexed column, so its updates can be HOT. Clean-up finds rows by the index on due_at,
-- which an acquire sets in a new row and never changes. The columns of fixed width come first, because
-- PostgreSQL reads them faster there.
create table ratelimit.buckets (
  policy_id   bigint      not null,
  level       bigint      not null,
  refilled_at timestamptz not null,
  due_at      timestamptz not null,
  key         text        collate "C" not null,
  constraint buckets_pkey primary key (policy_id, key)
);
create index buckets_due_at_idx on ratelimit.buckets (due_at);
comment on table ratelimit.buckets is
  'Buckets of durable policies that are not known to be full; a bucket without a row is full.';
comment on column ratelimit.buckets.level is
  'Microtokens at refilled_at; below zero is debt.';
comment on column ratelimit.buckets.refilled_at is
  'When level was true; for a stepped policy a whole number of intervals after the first take, until the policy changes.';
comment on column ratelimit.buckets.due_at is
  'When clean-up checks whether the bucket is full again.';

create table ratelimit.idempotency_keys (
  policy_id       bigint      not null,
  cost            bigint      not null,
  remaining       bigint      not null,
  capacity        bigint      not null,
  expires_at      timestamptz not null,
  reset_after     interval    not null,
  key             text        collate "C" not null,
  idempotency_key text        collate "C" not null,
  constraint idempotency_keys_pkey primary key (policy_id, key, idempotency_key)
);
create index idempotency_keys_expires_at_idx on ratelimit.idempotency_keys (expires_at);
comment on table ratelimit.idempotency_keys is
  'Grants of durable policies made under an idempotency key, as first answered, until expires_at.';

-- The twins for ephemeral policies. They are not in the WAL, so commits flush nothing for them, and a crash
-- empties them.
create unlogged table ratelimit.ephemeral_buckets (
  like ratelimit.buckets including all
);
comment on table ratelimit.ephemeral_buckets is
  'Buckets of ephemeral policies: unlogged, empty after a crash.';

create unlogged table ratelimit.ephemeral_idempotency_keys (
  like ratelimit.idempotency_keys including all
);
comment on table ratelimit.ephemeral_idempotency_keys is
  'Idempotency keys of ephemeral policies: unlogged, empty after a crash.';

-- fillfactor leaves room on each page for the next version of its rows, which a HOT update needs. Vacuum starts
-- after a fixed number of changed rows and a small share of the table, because by the default share a large
-- table would wait too long. Vacuum takes no pauses (cost_delay), so that dead row versions go soon.
alter table ratelimit.buckets set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.ephemeral_buckets set (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.idempotency_keys set (
  autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);
alter table ratelimit.ephemeral_idempotency_keys set (
  autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000,
  autovacuum_vacuum_cost_delay = 0);

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

-- pgratelimit: token bucket rate limits that live in PostgreSQL.
--
-- A policy says how large a bucket is and how fast it refills. A bucket belongs to one policy and
-- one key; it stores how many microtokens it held at one instant, and everything else follows by
-- arithmetic from the server's clock. No row means full: the first grant creates the row, clean-up
-- removes it once it is full again. A grant made under an idempotency key is remembered beside its
-- bucket, so that a retry gets the first answer and takes nothing.
--
-- The public functions are named ratelimit_* and live in the schema that headed search_path at the
-- first install. Tables and helpers live in schema ratelimit, where callers have no rights: the
-- public functions are SECURITY DEFINER with a pinned search_path, all but ratelimit_cleanup_all, which commits.
--
-- Durable and ephemeral policies keep their state in twin tables (buckets and ephemeral_buckets,
-- idempotency_keys and ephemeral_idempotency_keys), because a statement cannot choose its table at run time.
-- Code that touches them is written once, as a template over the two names.
--
-- This file is the table of contents.
\ir ../snapshots/001/prologue.sql

-- Private: the rules, each in one place.
\ir ../snapshots/001/clock.sql
\ir ../snapshots/001/arithmetic.sql
\ir ../snapshots/001/checks.sql
\ir ../snapshots/001/answer.sql

-- Policies.
\ir ../snapshots/001/define_policy.sql
-- Removes a policy with its buckets and idempotency keys.
--
-- A row that an open transaction has locked is skipped, and left to clean-up. Such a row changes no answer,
-- because a policy defined anew under the same name has another id. SKIP LOCKED can still block if the row
-- changes hands while it is examined, as cleanup.sql says. Here only the caller's lock_timeout ends that wait.
-- Locks:  the policy row and the rows it deletes, until the caller's transaction ends.
-- Writes: policies; the buckets and idempotency keys of the policy.
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
  delete from policies as p where p.name = v_name returning p.id, p.durable into v_id, v_durable;
  if not found then
    perform unknown_policy(v_name);
  end if;
  if v_durable then
    delete from buckets as t
 where t.ctid = any (array(select u.ctid
                             from buckets as u
                            where u.policy_id = v_id
                              for update skip locked));
    delete from idempotency_keys as t
 where t.ctid = any (array(select u.ctid
                             from idempotency_keys as u
                            where u.policy_id = v_id
                              for update skip locked));
  else
    delete from ephemeral_buckets as t
 where t.ctid = any (array(select u.ctid
                             from ephemeral_buckets as u
                            where u.policy_id = v_id
                              for update skip locked));
    delete from ephemeral_idempotency_keys as t
 where t.ctid = any (array(select u.ctid
                             from ephemeral_idempotency_keys as u
                            where u.policy_id = v_id
                              for update skip locked));
  end if;
end;
$$;
comment on function ratelimit_drop_policy(text) is
  'Remove a policy with its buckets and idempotency keys.';

\ir ../snapshots/001/policies.sql

-- Buckets.
-- Takes cost tokens from one bucket if it has them, and answers; a denial is an answer, not an error.
--
-- A repeat under the same idempotency key is the same request answered again, and takes nothing. So the program
-- chooses the idempotency key, one for each operation. If its own clients chose it, a client that repeats one
-- would pass every time.
--
-- The steps, in include/decide.sql. Steps 1 and 4 are for an acquire with an idempotency key. An idempotency key
-- that has not expired is live.
--   1. A live idempotency key is replayed, even when the bucket is empty.
--   2. One conditional update takes the tokens. Concurrent acquires take turns at it, and each takes tokens
--      only if the bucket still has enough.
--   3. If the update takes nothing, the bucket is read.
--      If it has too few tokens, the idempotency key is looked up again, because the request that emptied the
--      bucket may have had the same one; then the answer is the replay or the denial.
--      If the bucket has no row, it is full: the row is created, less the cost. If another session created the
--      row first, step 2 is repeated.
--      If the bucket has enough tokens after all, step 2 is repeated.
--   4. After the tokens are taken, the idempotency key is remembered. By now this call has locked the bucket's
--      row in step 2, or created it in step 3. So a live idempotency key that turns up only now was committed
--      after step 1 and before that. The tokens go back and the idempotency key is replayed. The refill that
--      step 2 credited stays.
-- A cost of 0 or above capacity takes nothing: it has only steps 1 and 3, and is answered from the bucket as read.
--
-- The clock is read before step 1 and in each step 3. The update of step 2 and the insert of step 3 may wait for
-- another session. A grant that waited is answered by the clock from before the wait: its reset_after is never
-- too short, and the refill of the wait is credited later. A denial is answered by the clock from after the wait.
--
-- Under REPEATABLE READ and SERIALIZABLE, an acquire that would take from a bucket that changed since the snapshot
-- fails with 40001, and a denial is as old as the snapshot. In a read-only transaction, an acquire that gets to
-- the update of step 2 fails with 25006, even if it would be denied.
--
-- Locks:  a grant and a replay of step 4 hold the bucket row and the row of the idempotency key until the
--         caller's transaction ends. A denial and a replay of step 3 hold the bucket row only if they had to
--         wait for it. A replay of step 1 holds nothing.
-- Writes: a grant writes the bucket and its idempotency key. A denial writes nothing. A replay writes
--         nothing, unless it is the replay of step 4.
create or replace function ratelimit_acquire(
    policy          text,
    key             text,
    cost            bigint default 1,
    idempotency_key text   default null)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- a plan made while the table was empty would read all of it once it has grown
as $$
declare
  v_policy          policies;     -- in: the policy
  v_key             text collate "C" := ratelimit_acquire.key;  -- in: the bucket's key
  v_cost            alias for ratelimit_acquire.cost;  -- in: tokens that one request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; decide reads the clock again before each look
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
  v_reset_us        bigint;       -- out: microseconds until the bucket is full
  v_idempotency_key text collate "C" := ratelimit_acquire.idempotency_key;  -- in: null for none
  v_wanted          bigint;       -- in/out: microtokens to take, 0 for none; v_cost as microtokens, or for a run a multiple
                                  --         of it, which decide lowers to the requests that the bucket covers
  v_taken           bigint;       -- out: microtokens taken; 0 after a denial; of no meaning after a replay
  v_replayed        boolean;      -- in/out: null before; true when a live idempotency key was found, and then only v_first counts
  v_first           idempotency_keys;  -- out, when v_replayed: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- out, after a grant: the instant at which the row says that the bucket held v_level
  v_due_at          timestamptz;  -- inner: when clean-up looks at a new bucket
  v_expires_at      timestamptz;  -- inner: when the idempotency key is forgotten
  v_round           integer;      -- in/out: null before; the rounds that took nothing and denied nothing
begin
  if not acceptable(v_key, v_cost) then  -- inlined; the call of check_request raises the error
    perform check_request(policy, v_key, v_cost, v_idempotency_key);
  end if;
  if v_idempotency_key is not null then
    if not is_name(v_idempotency_key) then
      perform check_request(policy, v_key, v_cost, v_idempotency_key);
    end if;
    if v_cost = 0 then
      v_idempotency_key := null;  -- nothing is granted, so nothing is remembered
    end if;
  end if;
  select p.* into v_policy from policies as p where p.name = ratelimit_acquire.policy collate "C";
  if not found then  -- the name of a policy that was found needs no check
    perform check_name('policy', policy);
    perform unknown_policy(policy);
  end if;

  v_wanted := case when v_cost <= v_policy.capacity then microtokens(v_cost) else 0 end;
  v_now    := clock();
  if v_policy.durable then
    <<decide>>
    begin
      if v_idempotency_key is not null then
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        exit decide when v_replayed;
      end if;

      loop
        if v_wanted > 0 then
          update buckets as b
             set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
           where b.policy_id = v_policy.id
             and b.key       = v_key
             and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
          returning b.level, b.refilled_at into v_level, v_refilled_at;
          exit when found;
        end if;

        v_now := clock();  -- the update may have waited
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

        if v_wanted = 0 or v_retry_us <> 0 then
          v_taken := 0;
          if v_idempotency_key is not null then
            select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
          end if;
          exit decide;
        end if;

        -- The bucket has no row, or it holds the cost by now, or it covers a part of the run, or the update of
        -- acquire_in_order waited for the row and found nothing. Without a row, this round makes one, less the
        -- tokens. Otherwise a second round takes them, unless another session changes the bucket in between.
        -- Each further round is due to another session.
        v_round := coalesce(v_round, 0) + 1;
        if v_round = 1000 then
          raise exception 'the bucket changed at every look'
            using errcode = '40001',
                  detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                  hint    = 'Try again.';
        end if;
        v_wanted := least(v_wanted, v_level - v_level % microtokens(v_cost));  -- lowers a run to whole requests
        if not v_has_row then
          v_level       := v_level - v_wanted;
          v_refilled_at := v_now;
          -- v_reset_us is worked out here for due_at. cleanup.sql says why due_at is within 24 hours.
          v_reset_us    := wait_below(v_policy.full_level, v_level, 0, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
          v_due_at      := v_now + least(duration(v_reset_us), interval '24 hours');
          -- The insert may wait for a session that creates the same row. The clock is not read again after that.
          insert into buckets (policy_id, key, level, refilled_at, due_at)
          values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
          on conflict on constraint buckets_pkey do nothing;
          exit when found;
        end if;
      end loop;

      v_taken    := v_wanted;
      v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

      if v_idempotency_key is not null then
        v_expires_at := v_now + duration(v_policy.remember_us);
        insert into idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy.id, v_key, v_idempotency_key, v_cost,
                whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
        on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now;
        if not found then  -- a live idempotency key: its tokens were taken already
          update buckets as b
             set level = b.level + v_taken
           where b.policy_id = v_policy.id
             and b.key       = v_key;
          select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        end if;
      end if;
    end decide;

  else
    <<decide>>
    begin
      if v_idempotency_key is not null then
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        exit decide when v_replayed;
      end if;

      loop
        if v_wanted > 0 then
          update ephemeral_buckets as b
             set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
           where b.policy_id = v_policy.id
             and b.key       = v_key
             and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
          returning b.level, b.refilled_at into v_level, v_refilled_at;
          exit when found;
        end if;

        v_now := clock();  -- the update may have waited
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

        if v_wanted = 0 or v_retry_us <> 0 then
          v_taken := 0;
          if v_idempotency_key is not null then
            select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
          end if;
          exit decide;
        end if;

        -- The bucket has no row, or it holds the cost by now, or it covers a part of the run, or the update of
        -- acquire_in_order waited for the row and found nothing. Without a row, this round makes one, less the
        -- tokens. Otherwise a second round takes them, unless another session changes the bucket in between.
        -- Each further round is due to another session.
        v_round := coalesce(v_round, 0) + 1;
        if v_round = 1000 then
          raise exception 'the bucket changed at every look'
            using errcode = '40001',
                  detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                  hint    = 'Try again.';
        end if;
        v_wanted := least(v_wanted, v_level - v_level % microtokens(v_cost));  -- lowers a run to whole requests
        if not v_has_row then
          v_level       := v_level - v_wanted;
          v_refilled_at := v_now;
          -- v_reset_us is worked out here for due_at. cleanup.sql says why due_at is within 24 hours.
          v_reset_us    := wait_below(v_policy.full_level, v_level, 0, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
          v_due_at      := v_now + least(duration(v_reset_us), interval '24 hours');
          -- The insert may wait for a session that creates the same row. The clock is not read again after that.
          insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
          values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
          on conflict on constraint ephemeral_buckets_pkey do nothing;
          exit when found;
        end if;
      end loop;

      v_taken    := v_wanted;
      v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

      if v_idempotency_key is not null then
        v_expires_at := v_now + duration(v_policy.remember_us);
        insert into ephemeral_idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy.id, v_key, v_idempotency_key, v_cost,
                whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
        on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now;
        if not found then  -- a live idempotency key: its tokens were taken already
          update ephemeral_buckets as b
             set level = b.level + v_taken
           where b.policy_id = v_policy.id
             and b.key       = v_key;
          select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        end if;
      end if;
    end decide;

  end if;

  if v_replayed then
    return replay(v_first, v_cost);
  elsif v_taken > 0 then
    return granted(v_level, v_reset_us, v_policy.capacity);
  end if;
  return answer(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_acquire(text, text, bigint, text) is
  'Take cost tokens from a bucket if it has them; a repeat under the same idempotency key is the same request answered again, and takes nothing.';

-- Decides the requests for one policy, bucket by bucket in the order of key, so that all calls lock buckets in one
-- order. Element n of keys, costs and idempotency_keys is the request with the number requests[n]. Rows come back
-- in the order of buckets.
--
-- The fast path, include/all_or_none.sql, is one statement. It decides when every bucket has a row, and covers all
-- its requests or fails even the cheapest. It reads all buckets before it takes from any, because a bucket that it
-- could not decide would have to be locked later, out of order. Its file lists what else makes it give up. Then it
-- is rolled back, and the ordered path decides. The rollback needs a subtransaction, which begins with every fast
-- path, also with one that succeeds. The fast path is not tried if the policy is unknown, if all requests for the
-- policy are equal and none has an idempotency key, or if a cost is not from 1 to 2147483646. It is not tried in a
-- read-only transaction either, where its update would fail also for requests that write nothing.
--
-- All answers of the fast path are as of one instant, read before its statement. They are accepted if they are less
-- than 100 ms old after the updates, or less than 1 ms for each request if that is longer. In the ordered path, a
-- denial is as old as the waits for later buckets, because all rows are returned at the end. A grant and a look-up
-- of an idempotency key are by the clock from before the waits for earlier buckets. Either way, times count from the
-- instant of the decision. So retry_after is never too short, but the tokens may be there sooner.
--
-- The ordered path goes through the steps of ratelimit_acquire, run by run. A run is equal requests without an
-- idempotency key that follow each other on one bucket; any other request is a run of its own. If the bucket covers
-- the whole run, one update takes for all of it. If the bucket covers a part, the update takes nothing, the bucket
-- is read, and a second update takes for the part. On a busy key, a run is often the whole call. Such a call skips
-- the fast path.
--
-- Locks and writes: as ratelimit_acquire_many.
create or replace function ratelimit.acquire_in_order(
    policy text, keys text[], costs bigint[], idempotency_keys text[], requests bigint[])
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean,
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan  -- no plan is better for some arguments than for others, and planning is slow
  set enable_seqscan = off    -- as in ratelimit_acquire
  set enable_hashjoin = off   -- nested loops alone keep the order of key, in which buckets are locked
  set enable_mergejoin = off  -- likewise
  set jit = off               -- the statements take less time than compiling them
as $$
declare
  v_policy          policies;     -- in: the policy
  v_key             text collate "C";  -- in: the bucket's key
  v_cost            bigint;  -- in: tokens that one request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; decide reads the clock again before each look
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
  v_reset_us        bigint;       -- out: microseconds until the bucket is full
  v_idempotency_key text collate "C";  -- in: null for none
  v_wanted          bigint;       -- in/out: microtokens to take, 0 for none; v_cost as microtokens, or for a run a multiple
                                  --         of it, which decide lowers to the requests that the bucket covers
  v_taken           bigint;       -- out: microtokens taken; 0 after a denial; of no meaning after a replay
  v_replayed        boolean;      -- in/out: null before; true when a live idempotency key was found, and then only v_first counts
  v_first           idempotency_keys;  -- out, when v_replayed: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- out, after a grant: the instant at which the row says that the bucket held v_level
  v_due_at          timestamptz;  -- inner: when clean-up looks at a new bucket
  v_expires_at      timestamptz;  -- inner: when the idempotency key is forgotten
  v_round           integer;      -- in/out: null before; the rounds that took nothing and denied nothing
  v_name            text collate "C" := acquire_in_order.policy;
  v_alike           boolean;      -- the whole call is one run
  v_stale_at        timestamptz;  -- an answer of the fast path is too old from here on
  v_answered        boolean;      -- the fast path returned the rows
  v_run             record;       -- key, cost, idempotency_key, and the numbers of its requests
  v_position        integer;      -- requests of the run that are answered
  v_count           integer;      -- requests that one pass of the loop over a run answers
  v_step            bigint;       -- microtokens between two grants of a pass; 0 when the pass takes nothing
  v_elapsed_us      numeric;      -- microseconds from v_refilled_at to v_now
begin
  v_now      := clock();
  v_stale_at := v_now + greatest(interval '100 milliseconds', cardinality(keys) * interval '1 millisecond');
  v_alike    := (idempotency_keys is null and keys[1] collate "C" = all (keys) and costs[1] = all (costs)) is true;
  select p.* into v_policy from policies as p where p.name = v_name;
  if found and not v_alike
     and 0 < all (costs) and 2147483647 > all (costs)  -- as integers their sums are bigint; sums of bigints are numeric, and slow
     and current_setting('transaction_read_only') = 'off' then  -- there an UPDATE fails even if it would take nothing
    begin
      if v_policy.durable and idempotency_keys is null then
        return query
      with found as materialized (
        select w.*, b.row_id, b.version, b.level, b.refilled_at,
               refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) as level_now
          from (select a.key, sum(a.cost) as total, min(a.cost) as cheapest,
                       array_agg(a.request) as requests, array_agg(a.total) as totals
                  from (select u.key collate "C" as key, u.cost::integer as cost, u.request,
                               sum(u.cost::integer)  -- of integers: the sum of bigints would be numeric
                                 over (order by u.key collate "C", u.request rows unbounded preceding) as total
                          from unnest(keys, costs) with ordinality as u (key, cost, request)) as a
                 group by a.key
                 order by a.key) as w
         cross join lateral (select b.ctid as row_id, b.xmin as version, b.level, b.refilled_at
                               from buckets as b
                              where b.policy_id = v_policy.id
       and b.key      >= w.key
       and b.key      <= w.key
     order by b.key desc
     limit 1) as b
      ), clear as materialized (
        select count(*) filter (where f.level_now / 1000000 >= f.total) as granting
          from found as f
        having sum(cardinality(f.requests)) = cardinality(keys)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update buckets as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
          from found as f
         where f.level_now / 1000000 >= f.total
           and exists (select from clear)
           and b.ctid = f.row_id
           and b.xmin = f.version
        returning f.requests, f.totals, b.level, b.refilled_at
      ), granted as (
        select g.request, g.level,
               wait_below(v_policy.full_level, g.level, microseconds(v_now - g.refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, r.level + microtokens(r.last - r.total) as level, r.refilled_at
                  from (select unnest(t.requests) as request, unnest(t.totals) as total,
                               t.totals[cardinality(t.totals)] as last, t.level, t.refilled_at
                          from taken as t) as r
                offset 0) as g
      ), denied as (
        select d.request, d.level_now as level,
               case
                 when d.cost <= v_policy.capacity then wait_for(microtokens(d.cost), d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
               end as retry_us,
               wait_for(v_policy.full_level, d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, costs[r.request] as cost, r.level, r.refilled_at, r.level_now
                  from (select unnest(f.requests) as request, f.level, f.refilled_at, f.level_now
                          from found as f
                         where f.level_now / 1000000 < f.cheapest
                           and exists (select from clear)) as r
                offset 0) as d
      )
      select requests[a.request], a.allowed, whole_tokens(a.level), duration(a.retry_us), duration(a.reset_us),
             v_policy.capacity, false, null::text, null::text, null::text, null::text
        from (select g.request, true as allowed, g.level, 0::bigint as retry_us, g.reset_us
                from granted as g
              union all
              select d.request, false, d.level, d.retry_us, d.reset_us
                from denied as d
              offset 0) as a
       where (select count(*) = (select c.granting from clear as c) and clock() < v_stale_at from taken);
      v_answered := found;

      elsif v_policy.durable then
        v_expires_at := v_now + duration(v_policy.remember_us);
        return query
      with found as materialized (
        select w.*, b.row_id, b.version, b.level, b.refilled_at,
               refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) as level_now
          from (select a.key, sum(a.cost) as total, min(a.cost) as cheapest,
                       array_agg(a.request) as requests, array_agg(a.total) as totals
                  from (select u.key collate "C" as key, u.cost::integer as cost, u.request,
                               sum(u.cost::integer)  -- of integers: the sum of bigints would be numeric
                                 over (order by u.key collate "C", u.request rows unbounded preceding) as total
                          from unnest(keys, costs) with ordinality as u (key, cost, request)) as a
                 group by a.key
                 order by a.key) as w
         cross join lateral (select b.ctid as row_id, b.xmin as version, b.level, b.refilled_at
                               from buckets as b
                              where b.policy_id = v_policy.id
       and b.key      >= w.key
       and b.key      <= w.key
     order by b.key desc
     limit 1) as b
      ), clear as materialized (
        select count(*) filter (where f.level_now / 1000000 >= f.total) as granting
          from found as f
        having sum(cardinality(f.requests)) = cardinality(keys)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update buckets as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
          from found as f
         where f.level_now / 1000000 >= f.total
           and exists (select from clear)
           and b.ctid = f.row_id
           and b.xmin = f.version
        returning f.requests, f.totals, b.level, b.refilled_at
      ), granted as (
        select g.request, g.level,
               wait_below(v_policy.full_level, g.level, microseconds(v_now - g.refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, r.level + microtokens(r.last - r.total) as level, r.refilled_at
                  from (select unnest(t.requests) as request, unnest(t.totals) as total,
                               t.totals[cardinality(t.totals)] as last, t.level, t.refilled_at
                          from taken as t) as r
                offset 0) as g
      ), denied as (
        select d.request, d.level_now as level,
               case
                 when d.cost <= v_policy.capacity then wait_for(microtokens(d.cost), d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
               end as retry_us,
               wait_for(v_policy.full_level, d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, costs[r.request] as cost, r.level, r.refilled_at, r.level_now
                  from (select unnest(f.requests) as request, f.level, f.refilled_at, f.level_now
                          from found as f
                         where f.level_now / 1000000 < f.cheapest
                           and exists (select from clear)) as r
                offset 0) as d
      ), remembered as (
        insert into idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        select v_policy.id, keys[g.request], idempotency_keys[g.request], costs[g.request],
               whole_tokens(g.level), duration(g.reset_us), v_policy.capacity, v_expires_at
          from granted as g
         where is_name(idempotency_keys[g.request])
        on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now
        returning 1
      )
      select requests[a.request], a.allowed, whole_tokens(a.level), duration(a.retry_us), duration(a.reset_us),
             v_policy.capacity, false, null::text, null::text, null::text, null::text
        from (select g.request, true as allowed, g.level, 0::bigint as retry_us, g.reset_us
                from granted as g
              union all
              select d.request, false, d.level, d.retry_us, d.reset_us
                from denied as d
              offset 0) as a
       where (select count(*) = (select c.granting from clear as c) and clock() < v_stale_at from taken)
         and (select count(idempotency_keys[g.request]) from granted as g) = (select count(*) from remembered)
         and not exists (select from denied as d
                          where not is_name(idempotency_keys[d.request]))
         and not exists (select from denied as d
                          cross join lateral (select k.expires_at
                                                from idempotency_keys as k
                                               where k.policy_id       = v_policy.id
                                                 and k.key             = keys[d.request] collate "C"
                                                 and k.idempotency_key = idempotency_keys[d.request] collate "C"
                                              offset 0) as k
                          where k.expires_at > v_now);
      v_answered := found;

      elsif idempotency_keys is null then
        return query
      with found as materialized (
        select w.*, b.row_id, b.version, b.level, b.refilled_at,
               refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) as level_now
          from (select a.key, sum(a.cost) as total, min(a.cost) as cheapest,
                       array_agg(a.request) as requests, array_agg(a.total) as totals
                  from (select u.key collate "C" as key, u.cost::integer as cost, u.request,
                               sum(u.cost::integer)  -- of integers: the sum of bigints would be numeric
                                 over (order by u.key collate "C", u.request rows unbounded preceding) as total
                          from unnest(keys, costs) with ordinality as u (key, cost, request)) as a
                 group by a.key
                 order by a.key) as w
         cross join lateral (select b.ctid as row_id, b.xmin as version, b.level, b.refilled_at
                               from ephemeral_buckets as b
                              where b.policy_id = v_policy.id
       and b.key      >= w.key
       and b.key      <= w.key
     order by b.key desc
     limit 1) as b
      ), clear as materialized (
        select count(*) filter (where f.level_now / 1000000 >= f.total) as granting
          from found as f
        having sum(cardinality(f.requests)) = cardinality(keys)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update ephemeral_buckets as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
          from found as f
         where f.level_now / 1000000 >= f.total
           and exists (select from clear)
           and b.ctid = f.row_id
           and b.xmin = f.version
        returning f.requests, f.totals, b.level, b.refilled_at
      ), granted as (
        select g.request, g.level,
               wait_below(v_policy.full_level, g.level, microseconds(v_now - g.refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, r.level + microtokens(r.last - r.total) as level, r.refilled_at
                  from (select unnest(t.requests) as request, unnest(t.totals) as total,
                               t.totals[cardinality(t.totals)] as last, t.level, t.refilled_at
                          from taken as t) as r
                offset 0) as g
      ), denied as (
        select d.request, d.level_now as level,
               case
                 when d.cost <= v_policy.capacity then wait_for(microtokens(d.cost), d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
               end as retry_us,
               wait_for(v_policy.full_level, d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, costs[r.request] as cost, r.level, r.refilled_at, r.level_now
                  from (select unnest(f.requests) as request, f.level, f.refilled_at, f.level_now
                          from found as f
                         where f.level_now / 1000000 < f.cheapest
                           and exists (select from clear)) as r
                offset 0) as d
      )
      select requests[a.request], a.allowed, whole_tokens(a.level), duration(a.retry_us), duration(a.reset_us),
             v_policy.capacity, false, null::text, null::text, null::text, null::text
        from (select g.request, true as allowed, g.level, 0::bigint as retry_us, g.reset_us
                from granted as g
              union all
              select d.request, false, d.level, d.retry_us, d.reset_us
                from denied as d
              offset 0) as a
       where (select count(*) = (select c.granting from clear as c) and clock() < v_stale_at from taken);
      v_answered := found;

      else
        v_expires_at := v_now + duration(v_policy.remember_us);
        return query
      with found as materialized (
        select w.*, b.row_id, b.version, b.level, b.refilled_at,
               refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) as level_now
          from (select a.key, sum(a.cost) as total, min(a.cost) as cheapest,
                       array_agg(a.request) as requests, array_agg(a.total) as totals
                  from (select u.key collate "C" as key, u.cost::integer as cost, u.request,
                               sum(u.cost::integer)  -- of integers: the sum of bigints would be numeric
                                 over (order by u.key collate "C", u.request rows unbounded preceding) as total
                          from unnest(keys, costs) with ordinality as u (key, cost, request)) as a
                 group by a.key
                 order by a.key) as w
         cross join lateral (select b.ctid as row_id, b.xmin as version, b.level, b.refilled_at
                               from ephemeral_buckets as b
                              where b.policy_id = v_policy.id
       and b.key      >= w.key
       and b.key      <= w.key
     order by b.key desc
     limit 1) as b
      ), clear as materialized (
        select count(*) filter (where f.level_now / 1000000 >= f.total) as granting
          from found as f
        having sum(cardinality(f.requests)) = cardinality(keys)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update ephemeral_buckets as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
          from found as f
         where f.level_now / 1000000 >= f.total
           and exists (select from clear)
           and b.ctid = f.row_id
           and b.xmin = f.version
        returning f.requests, f.totals, b.level, b.refilled_at
      ), granted as (
        select g.request, g.level,
               wait_below(v_policy.full_level, g.level, microseconds(v_now - g.refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, r.level + microtokens(r.last - r.total) as level, r.refilled_at
                  from (select unnest(t.requests) as request, unnest(t.totals) as total,
                               t.totals[cardinality(t.totals)] as last, t.level, t.refilled_at
                          from taken as t) as r
                offset 0) as g
      ), denied as (
        select d.request, d.level_now as level,
               case
                 when d.cost <= v_policy.capacity then wait_for(microtokens(d.cost), d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
               end as retry_us,
               wait_for(v_policy.full_level, d.level, d.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up) as reset_us
          from (select r.request, costs[r.request] as cost, r.level, r.refilled_at, r.level_now
                  from (select unnest(f.requests) as request, f.level, f.refilled_at, f.level_now
                          from found as f
                         where f.level_now / 1000000 < f.cheapest
                           and exists (select from clear)) as r
                offset 0) as d
      ), remembered as (
        insert into ephemeral_idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        select v_policy.id, keys[g.request], idempotency_keys[g.request], costs[g.request],
               whole_tokens(g.level), duration(g.reset_us), v_policy.capacity, v_expires_at
          from granted as g
         where is_name(idempotency_keys[g.request])
        on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now
        returning 1
      )
      select requests[a.request], a.allowed, whole_tokens(a.level), duration(a.retry_us), duration(a.reset_us),
             v_policy.capacity, false, null::text, null::text, null::text, null::text
        from (select g.request, true as allowed, g.level, 0::bigint as retry_us, g.reset_us
                from granted as g
              union all
              select d.request, false, d.level, d.retry_us, d.reset_us
                from denied as d
              offset 0) as a
       where (select count(*) = (select c.granting from clear as c) and clock() < v_stale_at from taken)
         and (select count(idempotency_keys[g.request]) from granted as g) = (select count(*) from remembered)
         and not exists (select from denied as d
                          where not is_name(idempotency_keys[d.request]))
         and not exists (select from denied as d
                          cross join lateral (select k.expires_at
                                                from ephemeral_idempotency_keys as k
                                               where k.policy_id       = v_policy.id
                                                 and k.key             = keys[d.request] collate "C"
                                                 and k.idempotency_key = idempotency_keys[d.request] collate "C"
                                              offset 0) as k
                          where k.expires_at > v_now);
      v_answered := found;

      end if;
      if v_answered then
        return;
      end if;
      raise exception sqlstate 'RL000';  -- rolls back to the begin above; caught below, so no caller sees it
    exception when sqlstate 'RL000' or cardinality_violation then
      v_now := clock();  -- the fast path may have waited
    end;
  end if;

  -- The ordered path. starts marks a request that begins a run: it or the request before it has an idempotency key,
  -- or their costs differ. run counts the starts up to a request, and so numbers the runs of a bucket from 1. Run 0
  -- is requests at the beginning of a bucket whose cost is null; they are refused.
  for v_run in
    select keys[1] collate "C" as key, costs[1] as cost, null as idempotency_key, requests as requests
     where v_alike
    union all
   (select c.key, c.cost, c.idempotency_key, array_agg(requests[c.request] order by c.request)
      from (select b.*, count(*) filter (where b.starts) over (partition by b.key order by b.request) as run
              from (select a.*,
                           a.idempotency_key is not null
                           or lag(a.idempotency_key) over bucket is not null
                           or lag(a.cost) over bucket is distinct from a.cost as starts
                      from (select u.key collate "C" as key, u.cost, u.idempotency_key collate "C" as idempotency_key,
                                   u.request
                              from unnest(keys, costs, idempotency_keys)
                                   with ordinality as u (key, cost, idempotency_key, request)
                             where not v_alike) as a
                    window bucket as (partition by a.key order by a.request)) as b) as c
     group by c.key, c.run, c.cost, c.idempotency_key
     order by c.key, c.run)
  loop
    v_key             := v_run.key;
    v_cost            := v_run.cost;
    v_idempotency_key := case when v_cost > 0 then v_run.idempotency_key end;
    v_position        := 0;
    if v_policy.id is null
       or not acceptable(v_key, v_cost)
       or not is_name(v_run.idempotency_key) then
      return query
        select r.request, null::boolean, null::bigint, null::interval, null::interval, null::bigint, null::boolean, e.*
          from unnest(v_run.requests) as r (request)
         cross join refusal(v_name, v_key, v_cost, v_run.idempotency_key, null) as e;
      continue;
    end if;

    while v_position < cardinality(v_run.requests) loop
      v_wanted := case
        when v_cost between 1 and v_policy.capacity then
          microtokens(v_cost * least(cardinality(v_run.requests) - v_position, v_policy.capacity / v_cost))
        else 0
      end;
      v_round    := null;
      v_replayed := null;
      if v_policy.durable then
        <<decide>>
    begin
      if v_idempotency_key is not null then
        select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        exit decide when v_replayed;
      end if;

      loop
        if v_wanted > 0 then
          update buckets as b
             set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
           where b.ctid = (select b.ctid
                             from buckets as b
                            where b.policy_id = v_policy.id
       and b.key      >= v_key
       and b.key      <= v_key
     order by b.key desc
     limit 1)
             and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
          returning b.level, b.refilled_at into v_level, v_refilled_at;
          exit when found;
        end if;

        v_now := clock();  -- the update may have waited
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key      >= v_key
       and b.key      <= v_key
     order by b.key desc
     limit 1;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

        if v_wanted = 0 or v_retry_us <> 0 then
          v_taken := 0;
          if v_idempotency_key is not null then
            select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
          end if;
          exit decide;
        end if;

        -- The bucket has no row, or it holds the cost by now, or it covers a part of the run, or the update of
        -- acquire_in_order waited for the row and found nothing. Without a row, this round makes one, less the
        -- tokens. Otherwise a second round takes them, unless another session changes the bucket in between.
        -- Each further round is due to another session.
        v_round := coalesce(v_round, 0) + 1;
        if v_round = 1000 then
          raise exception 'the bucket changed at every look'
            using errcode = '40001',
                  detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                  hint    = 'Try again.';
        end if;
        v_wanted := least(v_wanted, v_level - v_level % microtokens(v_cost));  -- lowers a run to whole requests
        if not v_has_row then
          v_level       := v_level - v_wanted;
          v_refilled_at := v_now;
          -- v_reset_us is worked out here for due_at. cleanup.sql says why due_at is within 24 hours.
          v_reset_us    := wait_below(v_policy.full_level, v_level, 0, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
          v_due_at      := v_now + least(duration(v_reset_us), interval '24 hours');
          -- The insert may wait for a session that creates the same row. The clock is not read again after that.
          insert into buckets (policy_id, key, level, refilled_at, due_at)
          values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
          on conflict on constraint buckets_pkey do nothing;
          exit when found;
        end if;
      end loop;

      v_taken    := v_wanted;
      v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

      if v_idempotency_key is not null then
        v_expires_at := v_now + duration(v_policy.remember_us);
        insert into idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy.id, v_key, v_idempotency_key, v_cost,
                whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
        on conflict on constraint idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now;
        if not found then  -- a live idempotency key: its tokens were taken already
          update buckets as b
             set level = b.level + v_taken
           where b.policy_id = v_policy.id
             and b.key       = v_key;
          select k.* into v_first
          from idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        end if;
      end if;
    end decide;

      else
        <<decide>>
    begin
      if v_idempotency_key is not null then
        select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        exit decide when v_replayed;
      end if;

      loop
        if v_wanted > 0 then
          update ephemeral_buckets as b
             set level       = refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) - v_wanted,
                 refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
           where b.ctid = (select b.ctid
                             from ephemeral_buckets as b
                            where b.policy_id = v_policy.id
       and b.key      >= v_key
       and b.key      <= v_key
     order by b.key desc
     limit 1)
             and refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick) >= v_wanted
          returning b.level, b.refilled_at into v_level, v_refilled_at;
          exit when found;
        end if;

        v_now := clock();  -- the update may have waited
        select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key      >= v_key
       and b.key      <= v_key
     order by b.key desc
     limit 1;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

        if v_wanted = 0 or v_retry_us <> 0 then
          v_taken := 0;
          if v_idempotency_key is not null then
            select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
          end if;
          exit decide;
        end if;

        -- The bucket has no row, or it holds the cost by now, or it covers a part of the run, or the update of
        -- acquire_in_order waited for the row and found nothing. Without a row, this round makes one, less the
        -- tokens. Otherwise a second round takes them, unless another session changes the bucket in between.
        -- Each further round is due to another session.
        v_round := coalesce(v_round, 0) + 1;
        if v_round = 1000 then
          raise exception 'the bucket changed at every look'
            using errcode = '40001',
                  detail  = format('Key %s of policy %s.', quote_literal(v_key), quote_literal(v_policy.name)),
                  hint    = 'Try again.';
        end if;
        v_wanted := least(v_wanted, v_level - v_level % microtokens(v_cost));  -- lowers a run to whole requests
        if not v_has_row then
          v_level       := v_level - v_wanted;
          v_refilled_at := v_now;
          -- v_reset_us is worked out here for due_at. cleanup.sql says why due_at is within 24 hours.
          v_reset_us    := wait_below(v_policy.full_level, v_level, 0, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
          v_due_at      := v_now + least(duration(v_reset_us), interval '24 hours');
          -- The insert may wait for a session that creates the same row. The clock is not read again after that.
          insert into ephemeral_buckets (policy_id, key, level, refilled_at, due_at)
          values (v_policy.id, v_key, v_level, v_refilled_at, v_due_at)
          on conflict on constraint ephemeral_buckets_pkey do nothing;
          exit when found;
        end if;
      end loop;

      v_taken    := v_wanted;
      v_reset_us := wait_below(v_policy.full_level, v_level, microseconds(v_now - v_refilled_at), v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);

      if v_idempotency_key is not null then
        v_expires_at := v_now + duration(v_policy.remember_us);
        insert into ephemeral_idempotency_keys as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        values (v_policy.id, v_key, v_idempotency_key, v_cost,
                whole_tokens(v_level), duration(v_reset_us), v_policy.capacity, v_expires_at)
        on conflict on constraint ephemeral_idempotency_keys_pkey do update
           set cost        = excluded.cost,
               remaining   = excluded.remaining,
               reset_after = excluded.reset_after,
               capacity    = excluded.capacity,
               expires_at  = excluded.expires_at
         where k.expires_at <= v_now;
        if not found then  -- a live idempotency key: its tokens were taken already
          update ephemeral_buckets as b
             set level = b.level + v_taken
           where b.policy_id = v_policy.id
             and b.key       = v_key;
          select k.* into v_first
          from ephemeral_idempotency_keys as k
         where k.policy_id       = v_policy.id
           and k.key             = v_key
           and k.idempotency_key = v_idempotency_key;
        v_replayed := v_first.expires_at > v_now;
        end if;
      end if;
    end decide;

      end if;

      if v_replayed and v_first.cost <> v_cost then
        return query
          select v_run.requests[1], null::boolean, null::bigint, null::interval, null::interval, null::bigint, null::boolean, e.*
            from refusal(v_name, v_key, v_cost, v_idempotency_key, v_first) as e;
        exit;
      end if;
      capacity := v_policy.capacity;
      replayed := coalesce(v_replayed, false);
      if replayed then
        v_taken    := 0;
        v_level    := microtokens(v_first.remaining);
        v_retry_us := 0;
        v_reset_us := microseconds(v_first.reset_after)::bigint;
        capacity   := v_first.capacity;
      elsif v_taken > 0 then
        v_retry_us := 0;
      end if;
      allowed     := coalesce(v_retry_us = 0, false);
      retry_after := duration(v_retry_us);

      -- Each grant is answered with the level that it left. Requests that the bucket did not cover are left to
      -- the next pass, which takes for them or denies them all.
      v_step  := case when v_taken > 0 then microtokens(v_cost) else 0 end;
      v_count := case when v_step > 0 then (v_taken / v_step)::integer else cardinality(v_run.requests) - v_position end;
      if v_count = 1 then
        request     := v_run.requests[v_position + 1];
        remaining   := whole_tokens(v_level);
        reset_after := duration(v_reset_us);
        return next;
      else
        v_elapsed_us := microseconds(v_now - v_refilled_at);
        return query
          select d.request, acquire_in_order.allowed, whole_tokens(d.level), acquire_in_order.retry_after,
                 duration(d.reset_us), acquire_in_order.capacity, acquire_in_order.replayed, null, null, null, null
            from (select l.request, l.level,
                         case
                           when v_step = 0 then v_reset_us
                           else wait_below(v_policy.full_level, l.level, v_elapsed_us, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
                         end as reset_us
                    from (select v_run.requests[v_position + n] as request, v_level + (v_count - n) * v_step as level
                            from generate_series(1, v_count) as n
                          offset 0) as l
                  offset 0) as d;
      end if;
      v_position := v_position + v_count;
    end loop;
  end loop;
end;
$$;
comment on function ratelimit.acquire_in_order(text, text[], bigint[], text[], bigint[]) is
  'Decides the requests for one policy, and answers them in the order of their buckets.';

\ir ../snapshots/001/acquire_many.sql
-- Reports the tokens that a bucket holds, and whether an acquire of this cost would be allowed now. Takes nothing.
--
-- Locks:  nothing.
-- Writes: nothing. It works in a read-only transaction and, for durable policies, on a standby.
create or replace function ratelimit_peek(policy text, key text, cost bigint default 1)
  returns ratelimit.decision
  language plpgsql
  stable
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_policy          policies;     -- in: the policy
  v_key             text collate "C" := ratelimit_peek.key;  -- in: the bucket's key
  v_cost            alias for ratelimit_peek.cost;  -- in: tokens that one request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; decide reads the clock again before each look
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
  v_reset_us        bigint;       -- out: microseconds until the bucket is full
begin
  if not acceptable(v_key, v_cost) then
    perform check_request(policy, v_key, v_cost, null);
  end if;
  v_policy := policy_named(policy);
  v_now    := clock();
  if v_policy.durable then
    select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

  else
    select refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
           case
             when v_cost = 0 then 0::bigint
             when v_cost <= v_policy.capacity then wait_for(microtokens(v_cost), b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
           end,
           wait_for(v_policy.full_level, b.level, b.refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up)
      into v_level, v_retry_us, v_reset_us
      from ephemeral_buckets as b
     where b.policy_id = v_policy.id
       and b.key       = v_key;
    v_has_row := found;
    if not v_has_row then  -- full
      v_level    := microtokens(v_policy.capacity);
      v_retry_us := case when v_cost <= v_policy.capacity then 0::bigint end;
      v_reset_us := 0;
    end if;

  end if;
  return answer(v_level, v_retry_us, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_peek(text, text, bigint) is
  'The tokens that a bucket holds, and whether an acquire of this cost would be allowed now; takes nothing.';

-- Gives amount tokens back to one bucket, never above the policy's capacity, and answers with the tokens
-- that the bucket holds then. An amount above capacity counts as capacity.
--
-- A bucket without a row is full already, so nothing is written.
-- Locks:  the bucket row, until the caller's transaction ends.
-- Writes: the bucket.
create or replace function ratelimit_refund(policy text, key text, amount bigint)
  returns ratelimit.decision
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_key         text collate "C" := ratelimit_refund.key;
  v_policy      policies;
  v_amount      bigint;
  v_now         timestamptz;
  v_level       bigint;
  v_refilled_at timestamptz;
  v_reset_us    bigint;
  v_has_row     boolean;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  perform check_tokens('amount', ratelimit_refund.amount);
  v_policy := policy_named(policy);
  v_amount := least(ratelimit_refund.amount, v_policy.capacity);
  v_now    := clock();
  if v_policy.durable then
    update buckets as b
       set level       = least(refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
                               microtokens(v_policy.capacity - v_amount)) + microtokens(v_amount),
           refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
           due_at      = least(b.due_at, v_now)  -- the bucket may be full now: clean-up looks at it in five minutes or later
     where b.policy_id = v_policy.id
       and b.key       = v_key
    returning b.level, b.refilled_at into v_level, v_refilled_at;
    v_has_row := found;
  else
    update ephemeral_buckets as b
       set level       = least(refilled_level(b.level, b.refilled_at, v_now, v_policy.full_level, v_policy.gain, v_policy.every_us, v_policy.tick),
                               microtokens(v_policy.capacity - v_amount)) + microtokens(v_amount),
           refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
           due_at      = least(b.due_at, v_now)  -- the bucket may be full now: clean-up looks at it in five minutes or later
     where b.policy_id = v_policy.id
       and b.key       = v_key
    returning b.level, b.refilled_at into v_level, v_refilled_at;
    v_has_row := found;
  end if;
  if not v_has_row then
    return answer(microtokens(v_policy.capacity), 0, 0, v_policy.capacity);
  end if;
  v_reset_us := wait_for(v_policy.full_level, v_level, v_refilled_at, v_now, v_policy.every_us, v_policy.tick_us, v_policy.tick_gain, v_policy.round_up);
  return answer(v_level, 0, v_reset_us, v_policy.capacity);
end;
$$;
comment on function ratelimit_refund(text, text, bigint) is
  'Give tokens back to a bucket, never above its capacity.';

\ir ../snapshots/001/reset.sql

-- Upkeep.
-- Clean-up removes rows that change no answer: buckets that are full again, expired idempotency keys, and
-- rows whose policy was dropped. It finds due rows through an index and skips rows that another session has
-- locked. An acquire on a bucket that a batch removes or postpones waits until the batch commits.
--
-- Clean-up judges every row as of five minutes ago. If the server's clock runs ahead for a moment, a bucket
-- that only looks full and a key that only looks expired are still there when the clock is set right.
--
-- SKIP LOCKED can still block if the row changes hands while it is examined. lock_timeout then ends the wait
-- after 100 ms, and the batch gives back its rows. PostgreSQL looks for a deadlock only after a wait of
-- deadlock_timeout, 1 second by default. If that is above 100 ms, a batch that is a transaction of its own gives
-- way before it is found in a deadlock. Only an acquire whose own look falls in those 100 ms can find one. In a
-- longer transaction, the rows of earlier batches stay locked, and it can deadlock with acquires.-- One batch: of each table the rows that are due by due_before, at most max_rows. The first batch of a series
-- passes null for due_before and deadline. Each later batch passes the values that the batch before it
-- returned. more is true if the batch found a row that is due or of a dropped policy, or gave up for
-- lock_timeout, and the deadline is not reached. The deadline is budget after the first batch began.
--
-- A due bucket that is not full is postponed until it can be full, by 24 hours at most. So a policy that was
-- made faster is noticed within a day.
-- Locks:  the rows that it deletes or postpones, until the caller's transaction ends.
-- Writes: the same rows; nothing if lock_timeout ended the batch.
create or replace function ratelimit.cleanup_batch(
    in    max_rows                 integer,
    in    budget                   interval,
    inout due_before               timestamptz,
    inout deadline                 timestamptz,
    out   buckets_deleted          bigint,
    out   idempotency_keys_deleted bigint,
    out   more                     boolean)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off    -- as in ratelimit_acquire
  set lock_timeout = '100ms'  -- SKIP LOCKED can still block: see above
as $$
declare
  v_now     timestamptz := clock() - interval '5 minutes';  -- rows are judged as of this instant
  v_read    bigint;
  v_deleted bigint;
  v_rows    bigint;  -- rows deleted or postponed
begin
  if (max_rows > 0) is not true then
    perform refuse('max_rows', max_rows::text, 'Pass 1 or more.');
  end if;
  if (budget > interval '0') is not true then
    perform refuse('budget', budget::text, 'Pass an interval above zero, such as ''50 seconds''.');
  end if;
  due_before               := least(due_before, v_now);  -- least ignores null; a caller cannot look past v_now
  deadline                 := coalesce(deadline, clock_timestamp() + least(budget, interval '1000 years'));
  buckets_deleted          := 0;
  idempotency_keys_deleted := 0;
  v_rows                   := 0;

  begin
    with due as materialized (
    select b.ctid as row_id,
           p.id is null
           or wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up) = 0 as removable
      from buckets as b
      left join policies as p on p.id = b.policy_id
     where b.due_at <= due_before
     order by b.due_at
     limit max_rows
       for update of b skip locked
  ), removed as (
    delete from buckets as b
     where b.ctid = any (array(select d.row_id from due as d where d.removable))
    returning 1
  ), postponed as (
    update buckets as b
       set due_at = v_now + (select least(interval '24 hours',
                                          duration(wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up)))
                               from policies as p
                              where p.id = b.policy_id)
     where b.ctid = any (array(select d.row_id from due as d where not d.removable))
  )
  select (select count(*) from due), (select count(*) from removed) into v_read, v_deleted;
  v_rows          := v_rows + v_read;
  buckets_deleted := buckets_deleted + v_deleted;
    with due as materialized (
    select b.ctid as row_id,
           p.id is null
           or wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up) = 0 as removable
      from ephemeral_buckets as b
      left join policies as p on p.id = b.policy_id
     where b.due_at <= due_before
     order by b.due_at
     limit max_rows
       for update of b skip locked
  ), removed as (
    delete from ephemeral_buckets as b
     where b.ctid = any (array(select d.row_id from due as d where d.removable))
    returning 1
  ), postponed as (
    update ephemeral_buckets as b
       set due_at = v_now + (select least(interval '24 hours',
                                          duration(wait_for(p.full_level, b.level, b.refilled_at, v_now, p.every_us, p.tick_us, p.tick_gain, p.round_up)))
                               from policies as p
                              where p.id = b.policy_id)
     where b.ctid = any (array(select d.row_id from due as d where not d.removable))
  )
  select (select count(*) from due), (select count(*) from removed) into v_read, v_deleted;
  v_rows          := v_rows + v_read;
  buckets_deleted := buckets_deleted + v_deleted;
    delete from idempotency_keys as k
   where k.ctid = any (array(select d.ctid
                               from idempotency_keys as d
                              where d.expires_at <= due_before
                              order by d.expires_at
                              limit max_rows
                                for update skip locked));
  get diagnostics v_deleted = row_count;
  v_rows                   := v_rows + v_deleted;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
    delete from ephemeral_idempotency_keys as k
   where k.ctid = any (array(select d.ctid
                               from ephemeral_idempotency_keys as d
                              where d.expires_at <= due_before
                              order by d.expires_at
                              limit max_rows
                                for update skip locked));
  get diagnostics v_deleted = row_count;
  v_rows                   := v_rows + v_deleted;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
    if v_rows = 0 then  -- orphans can wait for an idle batch
      with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from buckets as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from buckets as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from buckets as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from buckets as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  v_rows      := v_rows + v_deleted;
  buckets_deleted := buckets_deleted + v_deleted;
      with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from ephemeral_buckets as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from ephemeral_buckets as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from ephemeral_buckets as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from ephemeral_buckets as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  v_rows      := v_rows + v_deleted;
  buckets_deleted := buckets_deleted + v_deleted;
      with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from idempotency_keys as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from idempotency_keys as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from idempotency_keys as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from idempotency_keys as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  v_rows      := v_rows + v_deleted;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
      with recursive ids (id) as (  -- one index probe for each policy that has rows
    (select t.policy_id from ephemeral_idempotency_keys as t order by t.policy_id limit 1)
    union all
    select (select t.policy_id from ephemeral_idempotency_keys as t where t.policy_id > i.id order by t.policy_id limit 1)
      from ids as i
     where i.id is not null
  ), gone as materialized (
    select i.id from ids as i where not exists (select from policies as p where p.id = i.id)
  )
  delete from ephemeral_idempotency_keys as t
   where t.ctid = any (array(select o.ctid
                               from gone as g
                              cross join lateral (select u.ctid
                                                    from ephemeral_idempotency_keys as u
                                                   where u.policy_id = g.id
                                                     for update skip locked) as o
                              limit max_rows));
  get diagnostics v_deleted = row_count;
  v_rows      := v_rows + v_deleted;
  idempotency_keys_deleted := idempotency_keys_deleted + v_deleted;
    end if;
  exception when lock_not_available then
    buckets_deleted          := 0;
    idempotency_keys_deleted := 0;
    v_rows                   := 1;  -- the locked row may be due, so more is true
  end;
  more := v_rows > 0 and clock_timestamp() < deadline;
end;
$$;
comment on function ratelimit.cleanup_batch(integer, interval, timestamptz, timestamptz) is
  'One batch of clean-up, and whether another should follow.';

-- One batch. It can delete nothing although rows are due: every due bucket may be in use, or lock_timeout may
-- have ended the batch. Rows of dropped policies are removed once nothing else is due. ratelimit_cleanup_all
-- repeats batches. The budget of 1 second has no effect here: only deadline and more depend on it, and they are
-- not used.
create or replace function ratelimit_cleanup(
    in  max_rows                 integer default 10000,
    out buckets_deleted          bigint,
    out idempotency_keys_deleted bigint)
  language sql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select b.buckets_deleted, b.idempotency_keys_deleted from cleanup_batch(max_rows, '1 second', null, null) as b
$$;
comment on function ratelimit_cleanup(integer) is
  'Remove one batch of full buckets and one of expired idempotency keys, at most max_rows rows of each table.';

-- Repeats batches and commits after each, until a batch finds no row of a dropped policy and none that was due
-- at the first batch, or the budget is spent. Rows that other sessions have locked are skipped, and left to the next call.
--
-- A procedure that commits can have neither SECURITY DEFINER nor SET. So it runs with the caller's rights: a
-- caller other than the owner needs EXECUTE on this procedure and on ratelimit.cleanup_batch, and USAGE on
-- schema ratelimit. And it runs with the caller's search_path, where another role may have planted functions
-- and operators. So its body names its one function with the schema, and uses no operator.
create or replace procedure ratelimit_cleanup_all(budget interval default '50 seconds')
  language plpgsql
as $$
declare
  v_due_before timestamptz;
  v_deadline   timestamptz;
  v_more       boolean;
begin
  loop
    select b.due_before, b.deadline, b.more
      into v_due_before, v_deadline, v_more
      from ratelimit.cleanup_batch(10000, ratelimit_cleanup_all.budget, v_due_before, v_deadline) as b;
    commit;
    exit when not v_more;
  end loop;
end;
$$;
comment on procedure ratelimit_cleanup_all(interval) is
  'Remove all full buckets and expired idempotency keys in short batches, committing between them, for at most budget.';

\ir ../snapshots/001/version.sql

\ir ../snapshots/001/epilogue.sql
update ratelimit.schema_version set version = 1;
\endif
\unset pgratelimit_missing
commit;

begin transaction isolation level read committed;
:pgratelimit_prepare
select v.version operator(pg_catalog.<) 2 as pgratelimit_missing from ratelimit.schema_version as v
\gset
\if :pgratelimit_missing
-- 002_several_limits.sql
-- Several limits in one request, overrides, shadow policies, policies that do not refill, debt and reservations, shards.

-- Acquires wait behind this migration, so it does not wait for long. It fails with 55P03 when a transaction that took
-- tokens stays open, and can be run again.
set local lock_timeout = '3s';

-- Calls that begin from here on wait at the policy. They were resolved to the old functions, and go on with what those
-- call: the functions at the end of this file and the old helpers, which the next migration drops.
lock table ratelimit.policies in access exclusive mode;

-- The functions whose arguments or columns change. Both ways drop them, and grant again what was granted on them.
set local ratelimit.changed =
  'ratelimit_define_policy ratelimit_policies ratelimit_acquire ratelimit_acquire_many ratelimit_peek ratelimit_refund';
\ir ../include/002_drop_changed.sql
\ir ../include/002_tables.sql
-- pgratelimit: token bucket rate limits that live in PostgreSQL.
--
-- A policy says how large a bucket is and how fast it refills. A bucket belongs to one policy and one key; it stores how many microtokens
-- it held at one instant, and everything else follows by arithmetic from the server's clock. No row means full: the first grant creates
-- the row, clean-up removes it once it is full again. A grant made under an idempotency key is remembered beside its bucket, so that a
-- retry gets the first answer and takes nothing.
--
-- The public functions are named ratelimit_* and live in the schema that headed search_path at the first install. Tables and helpers live
-- in schema ratelimit, where callers have no rights: the public functions are SECURITY DEFINER with a pinned search_path, all but
-- ratelimit_cleanup_all and ratelimit_reset_all, which commit.
--
-- A policy with a lease lends slots in place of tokens: what is held of a key is the sum of its leases that have not ended. Their rows,
-- and one row of each key, which is the lock of its leases, are in leases and slots.
--
-- An ephemeral policy writes no WAL: a crash makes its buckets full. Durable and ephemeral policies keep their state in twin tables
-- (buckets and ephemeral_buckets, idempotency_keys and ephemeral_idempotency_keys, slots and leases likewise), because a statement cannot
-- choose its table at run time. Longer code that touches them is written for the durable ones; copies.sql has it for the others. Short
-- statements are written twice. The tables and types are made by migrations/include/002_tables.sql.
--
-- This file is the table of contents.
\ir ../snapshots/002/prologue.sql

-- Private: the rules, each in one place.
\ir ../snapshots/002/clock.sql
\ir ../snapshots/002/arithmetic.sql
\ir ../snapshots/002/checks.sql
\ir ../snapshots/002/answer.sql
\ir ../snapshots/002/calendar.sql
\ir ../snapshots/002/overridden.sql
\ir ../snapshots/002/exceeded.sql

-- Policies.
\ir ../snapshots/002/define_policy.sql
\ir ../snapshots/002/drop_policy.sql
\ir ../snapshots/002/policies.sql
\ir ../snapshots/002/override.sql

-- Buckets.
\ir ../snapshots/002/quota.sql
\ir ../snapshots/002/acquire.sql
\ir ../snapshots/002/peek.sql
\ir ../snapshots/002/refund.sql
\ir ../snapshots/002/reset.sql
\ir ../snapshots/002/pause.sql

-- Slots: so many at a time.
\ir ../snapshots/002/slots.sql
\ir ../snapshots/002/hold.sql
\ir ../snapshots/002/renew.sql
\ir ../snapshots/002/release.sql
\ir ../snapshots/002/holders.sql

-- Spend now, know later; wait in line; take what is there.
\ir ../snapshots/002/charge.sql
\ir ../snapshots/002/settle.sql
\ir ../snapshots/002/reserve.sql
\ir ../snapshots/002/acquire_up_to.sql

-- Many requests, or many buckets, in one call.
\ir ../snapshots/002/batch_form.sql
\ir ../snapshots/002/asked_of.sql
\ir ../snapshots/002/take.sql
\ir ../snapshots/002/deny.sql
\ir ../snapshots/002/remember.sql
\ir ../snapshots/002/rows.sql
\ir ../snapshots/002/numbered.sql
\ir ../snapshots/002/look_at_buckets.sql
\ir ../snapshots/002/decide.sql
\ir ../snapshots/002/decide_in_order.sql
\ir ../snapshots/002/decide_left.sql
\ir ../snapshots/002/acquire_batch.sql
\ir ../snapshots/002/acquire_all.sql
\ir ../snapshots/002/acquire_many.sql
\ir ../snapshots/002/acquire_all_many.sql
\ir ../snapshots/002/acquire_packed.sql
\ir ../snapshots/002/acquire_up_to_many.sql
\ir ../snapshots/002/peeked.sql
\ir ../snapshots/002/peek_many.sql

-- Guards, which raise where the functions above answer with a denial.
\ir ../snapshots/002/enforce.sql
\ir ../snapshots/002/guard.sql
\ir ../snapshots/002/pre_request.sql

-- Upkeep.
\ir ../snapshots/002/cleanup_rows.sql
\ir ../snapshots/002/cleanup_slots.sql
\ir ../snapshots/002/cleanup_batch.sql
\ir ../snapshots/002/cleanup.sql
\ir ../snapshots/002/status.sql
\ir ../snapshots/002/doctor.sql
\ir ../snapshots/002/version.sql

-- Which part of the keys is in this database, where more than one has them.
\ir ../snapshots/002/shard.sql

-- The same text for other tables, and for the guards.
\ir ../snapshots/002/copies.sql

\ir ../snapshots/002/epilogue.sql


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

\ir ../include/002_grant_changed.sql
update ratelimit.schema_version set version = 2;
\endif
\unset pgratelimit_missing
commit;

\unset pgratelimit_prepare
select coalesce(pg_catalog.string_agg(p.pronamespace::pg_catalog.regnamespace::pg_catalog.text, ', '),
                'none (the functions are missing)') as pgratelimit_home
  from pg_catalog.pg_proc as p
  join pg_catalog.pg_namespace as n on n.nspowner operator(pg_catalog.=) p.proowner
 where n.nspname operator(pg_catalog.=) 'ratelimit'
   and p.proname operator(pg_catalog.=) 'ratelimit_version'
   and p.pronargs operator(pg_catalog.=) 0
\gset
\echo pgratelimit 0.2.0 is installed in schema :pgratelimit_home; its schema version is 2.
\unset pgratelimit_home
\set ON_ERROR_STOP :pgratelimit_stop
\set QUIET :pgratelimit_quiet
\unset pgratelimit_stop
\unset pgratelimit_quiet

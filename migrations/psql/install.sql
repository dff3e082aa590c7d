-- Installs pgratelimit, or brings an installed one up to date; running it again is harmless. For psql:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f migrations/psql/install.sql
--
-- The role must be the owner of schema ratelimit, or be allowed to create schemas while that is not there. The functions go into the
-- schema that heads search_path, and stay where an earlier install put them. It is one transaction. psql ends with status 3 where it
-- fails.
--
-- The functions are listed as in sql/install.sql, which says what they are.
\set pgratelimit_stop :ON_ERROR_STOP
\set pgratelimit_quiet :QUIET
\set ON_ERROR_STOP on
\set QUIET on
\ir ../include/outside.sql

begin transaction isolation level read committed;
do $task$ begin perform pg_catalog.set_config('ratelimit.task', 'install', true), pg_catalog.set_config('ratelimit.known', '1', true); end $task$;
\ir ../include/prepare.sql
select v.version operator(pg_catalog.<) pg_catalog.current_setting('ratelimit.known')::pg_catalog.int4 as pgratelimit_missing from ratelimit.version as v \gset
\if :pgratelimit_missing
select v.version operator(pg_catalog.<) 1 as pgratelimit_next from ratelimit.version as v \gset
\if :pgratelimit_next
\ir ../include/001_tables.sql
\endif
\ir ../../sql/prologue.sql
\ir ../../sql/clock.sql
\ir ../../sql/arithmetic.sql
\ir ../../sql/checks.sql
\ir ../../sql/answer.sql
\ir ../../sql/calendar.sql
\ir ../../sql/expiring_numbers.sql
\ir ../../sql/exceeded.sql
\ir ../../sql/define_policy.sql
\ir ../../sql/drop_policy.sql
\ir ../../sql/policies.sql
\ir ../../sql/override.sql
\ir ../../sql/usage.sql
\ir ../../sql/quota.sql
\ir ../../sql/acquire.sql
\ir ../../sql/peek.sql
\ir ../../sql/refund.sql
\ir ../../sql/reset.sql
\ir ../../sql/pause.sql
\ir ../../sql/http_fields.sql
\ir ../../sql/slots.sql
\ir ../../sql/hold.sql
\ir ../../sql/renew.sql
\ir ../../sql/release.sql
\ir ../../sql/holders.sql
\ir ../../sql/charge.sql
\ir ../../sql/settle.sql
\ir ../../sql/grants.sql
\ir ../../sql/reserve.sql
\ir ../../sql/acquire_up_to.sql
\ir ../../sql/batch_form.sql
\ir ../../sql/demand.sql
\ir ../../sql/take.sql
\ir ../../sql/denials.sql
\ir ../../sql/remember.sql
\ir ../../sql/rows.sql
\ir ../../sql/number_buckets.sql
\ir ../../sql/look_at_buckets.sql
\ir ../../sql/decide.sql
\ir ../../sql/decide_in_order.sql
\ir ../../sql/decide_left.sql
\ir ../../sql/acquire_batch.sql
\ir ../../sql/acquire_all.sql
\ir ../../sql/acquire_many.sql
\ir ../../sql/acquire_packed.sql
\ir ../../sql/settle_all.sql
\ir ../../sql/enforce.sql
\ir ../../sql/guard.sql
\ir ../../sql/pre_request.sql
\ir ../../sql/cleanup_rows.sql
\ir ../../sql/cleanup_slots.sql
\ir ../../sql/cleanup_batch.sql
\ir ../../sql/cleanup.sql
\ir ../../sql/status.sql
\ir ../../sql/doctor.sql
\ir ../../sql/version.sql
\ir ../../sql/shard.sql
\ir ../../sql/twins.sql
\ir ../../sql/epilogue.sql
update ratelimit.version set version = pg_catalog.current_setting('ratelimit.known')::pg_catalog.int4;
\unset pgratelimit_next
\endif
\unset pgratelimit_missing
commit;

select coalesce(pg_catalog.max(pg_catalog.substring(p.prosrc, '[0-9.]+')), '?') as pgratelimit_release,
       coalesce(pg_catalog.string_agg(p.pronamespace::pg_catalog.regnamespace::pg_catalog.text, ', '),
                'none (the functions are missing)') as pgratelimit_home
  from pg_catalog.pg_proc as p
  join pg_catalog.pg_namespace as n on n.nspowner operator(pg_catalog.=) p.proowner
 where n.nspname operator(pg_catalog.=) 'ratelimit'
   and p.proname operator(pg_catalog.=) 'ratelimit_version'
   and p.pronargs operator(pg_catalog.=) 0
\gset
select v.version as pgratelimit_version from ratelimit.version as v \gset
\echo pgratelimit :pgratelimit_release is installed in schema :pgratelimit_home; its schema version is :pgratelimit_version.
\unset pgratelimit_release
\unset pgratelimit_home
\unset pgratelimit_version
\set ON_ERROR_STOP :pgratelimit_stop
\set QUIET :pgratelimit_quiet
\unset pgratelimit_stop
\unset pgratelimit_quiet

-- Removes pgratelimit with all policies and buckets, also a development version; running it again is harmless. For psql:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f migrations/psql/uninstall.sql
--
-- The role must be the owner of schema ratelimit. It is one transaction. psql ends with status 3 where it fails.
\set pgratelimit_stop :ON_ERROR_STOP
\set pgratelimit_quiet :QUIET
\set ON_ERROR_STOP on
\set QUIET on
\ir ../include/outside.sql

begin transaction isolation level read committed;
do $task$ begin perform pg_catalog.set_config('ratelimit.task', 'uninstall', true), pg_catalog.set_config('ratelimit.known', '1', true); end $task$;
\ir ../include/prepare.sql
\ir ../include/remove.sql
set local client_min_messages = warning;
drop table if exists ratelimit.version;
drop schema if exists ratelimit;
commit;

\echo pgratelimit: not installed any more.
\set ON_ERROR_STOP :pgratelimit_stop
\set QUIET :pgratelimit_quiet
\unset pgratelimit_stop
\unset pgratelimit_quiet

#!/usr/bin/env bash
# Brings pgratelimit in a database up to date, as often as you like. PGHOST, PGUSER (a superuser) and PGDATABASE say
# where. Role pgratelimit owns the package; role ratelimit_app is for the application, and can log in with
# RATELIMIT_APP_PASSWORD where that is set.
set -euo pipefail
cd "$(dirname "$0")"
sql() { psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 "$@"; }
as_owner() { PGOPTIONS='-c role=pgratelimit' sql "$@"; }

sql --file update.sql
as_owner --file migrations/psql/install.sql
as_owner <<'SQL'
do $$ begin
  execute (select format('grant execute on function %s to ratelimit_app', string_agg(p.oid::regprocedure::text, ', '))
             from pg_proc as p
            where pg_get_userbyid(p.proowner) = current_user
              and p.proname::text like 'ratelimit\_%'
              and obj_description(p.oid, 'pg_proc') ~ 'Role: application'); end $$;
SQL
as_owner --file schedule.sql

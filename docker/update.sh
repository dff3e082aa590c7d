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
as_owner --command '
  grant execute on function
    ratelimit_acquire, ratelimit_acquire_many, ratelimit_acquire_all, ratelimit_acquire_packed, ratelimit_acquire_up_to,
    ratelimit_reserve, ratelimit_charge, ratelimit_settle, ratelimit_enforce, ratelimit_peek, ratelimit_refund, ratelimit_pause,
    ratelimit_hold, ratelimit_renew, ratelimit_release, ratelimit_shard
  to ratelimit_app;'
as_owner --file schedule.sql

#!/usr/bin/env bash
# Runs once, when the data directory is new: pg_cron for POSTGRES_DB, then what every later start does too.
set -euo pipefail

export PGUSER=${POSTGRES_USER:-postgres}
export PGDATABASE=${POSTGRES_DB:-$PGUSER}

# Background workers: jobs need no password and no entry in pg_hba.conf.
psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 <<'SQL'
alter system set shared_preload_libraries = 'pg_cron';
alter system set cron.database_name = :'DBNAME';
alter system set cron.use_background_workers = on;
SQL
pg_ctl restart --pgdata "$PGDATA" --wait --silent
/usr/local/share/pgratelimit/update.sh

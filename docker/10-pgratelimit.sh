#!/usr/bin/env bash
# Runs once, when the data directory is new: pg_cron for POSTGRES_DB, the package in it, clean-up scheduled.
set -euo pipefail

export PGUSER=${POSTGRES_USER:-postgres}
export PGDATABASE=${POSTGRES_DB:-$PGUSER}
files=/usr/local/share/pgratelimit
sql() { psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 "$@"; }

# Background workers: jobs need no password and no entry in pg_hba.conf.
sql <<'SQL'
alter system set shared_preload_libraries = 'pg_cron';
alter system set cron.database_name = :'DBNAME';
alter system set cron.use_background_workers = on;
SQL
pg_ctl restart --pgdata "$PGDATA" --wait --silent

# install.sql prints the migrations that are missing.
sql --tuples-only --no-align --file "$files/install.sql" | sql
sql --file "$files/schedule.sql"

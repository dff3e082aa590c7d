#!/usr/bin/env bash
# The image's entrypoint. A volume that has a database may come from an older image: before the server starts, one that
# only this script reaches brings pgratelimit in it up to date. Where that fails the server starts all the same, with
# what is installed, and the log says so.
set -euo pipefail

update() {
  at=$(mktemp --directory)
  trap '! pg_ctl status >/dev/null || pg_ctl stop --silent --mode fast --wait >&2; rm -r "$at"' EXIT
  # Nobody else reaches this server: no TCP, a socket in a directory of its own, and one rule to log in there.
  echo 'local all all trust' >"$at/pg_hba.conf"
  settings=("$@" -c listen_addresses= -c unix_socket_directories="$at" -c hba_file="$at/pg_hba.conf")
  export PGHOST=$at PGUSER=${POSTGRES_USER:-postgres}
  export PGDATABASE=${POSTGRES_DB:-$PGUSER} PGCTLTIMEOUT=86400 # recovery takes its time, as it would below
  pg_ctl start --silent --wait --options "$(printf '%q ' "${settings[@]}")" >&2
  standby=$(psql --no-psqlrc --quiet --tuples-only --no-align --command 'select pg_is_in_recovery()')
  [ "$standby" = t ] || /usr/local/share/pgratelimit/update.sh >&2 # a standby gets it from its primary
}

if [ "${1:-}" = --update ]; then # as the server's user
  shift
  update "$@"
  exit
fi

[ "${1:0:1}" != - ] || set -- postgres "$@"
if [ "${1:-}" = postgres ] && [ -s "$PGDATA/PG_VERSION" ]; then
  as=()
  [ "$(id -u)" != 0 ] || as=(setpriv --reuid postgres --regid postgres --init-groups)
  "${as[@]}" "$0" --update "${@:2}" &
  trap 'kill $!; wait $! || true; exit 143' TERM INT # docker stop meanwhile: else the first process ignores it
  wait $! || echo '
pgratelimit: NOT BROUGHT UP TO DATE. The error is above; the server starts with what is installed.
To see it again: docker restart. pgratelimit works as before.
' >&2
  trap - TERM INT
fi
exec docker-entrypoint.sh "$@"

#!/usr/bin/env bash
# Begins the next migration, when the newest is released: make migration NAME=what_it_does
set -euo pipefail
cd "$(dirname "$0")"
newest=$(ls [0-9]*.sql | tail -1)
old=${newest%%_*} new=$(printf %03d $((10#${newest%%_*} + 1)))
name=${new}_$1.sql
grep -qs " $newest$" released.sha256 || { echo "$newest is not released: change it, or its files." >&2; exit 1; }

rm "snapshots/$old"
cp -r ../sql "snapshots/$old"
rm "snapshots/$old"/*.go
ln -s ../../sql "snapshots/$new"

cat >"include/$name" <<EOF
-- What migration $new changes in tables and types.

-- Acquires wait behind this migration, so it does not wait for long: it fails with 55P03, and can be run again.
set local lock_timeout = '3s';
-- The names of functions that go, and of those whose arguments or columns change.
set local ratelimit.dropped = '';
EOF
prepare() { # TASK
  echo "select pg_catalog.set_config('ratelimit.task', '$1', true), pg_catalog.set_config('ratelimit.known', '$((10#$new))', true);"
  echo '{{ template "include/prepare.sql" }}'
}
{ sed '/{{ end -}}/q' "$newest"; cat; } >"$name" <<EOF
$(prepare install)
{{ template "include/$name" }}
{{ install_snapshot "$new" }}

---- create above / drop below ----

$(prepare uninstall)
set local lock_timeout = '3s';
set local ratelimit.dropped = '';
{{ install_snapshot "$old" }}
EOF
sed -i "s/'ratelimit.known', '[0-9]*'/'ratelimit.known', '$((10#$new))'/" psql/*.sql
sed -i '/prologue\.sql$/i\
select v.version operator(pg_catalog.<) '$((10#$new))' as pgratelimit_next from ratelimit.version as v \\gset\
\\if :pgratelimit_next\
\\ir ../include/'"$name"'\
\\endif' psql/install.sql
echo "Write $name, include/$name, the version in sql/version.sql, and a section of CHANGELOG.md."

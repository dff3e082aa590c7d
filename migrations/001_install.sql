{{ if false }}
\reset
\set ON_ERROR_STOP on
do $$
begin
  raise exception 'this file is a migration for tern, and psql would run its way back too'
    using hint = 'Run migrations/psql/install.sql instead.';
end;
$$;
{{ end -}}
-- All that the first release has. It is one migration, because the public functions go into the schema that heads the session's
-- search_path, and tern resets the session after each migration.
select pg_catalog.set_config('ratelimit.task', 'install', true), pg_catalog.set_config('ratelimit.known', '1', true);
{{ template "include/prepare.sql" }}
{{ template "include/001_tables.sql" }}
{{ install_snapshot "001" }}

---- create above / drop below ----

{{ template "include/remove.sql" }}
comment on schema ratelimit is null;  -- the schema stays, with the version table

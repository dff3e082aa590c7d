-- The release of the installed functions.
create or replace function ratelimit_version()
  returns text
  language sql
  immutable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select '0.2.0'
$$;
comment on function ratelimit_version() is
  'The release of pgratelimit that is installed.';

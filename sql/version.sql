create or replace function ratelimit_version()
  returns text
  language sql
  immutable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select '0.3.0'
$$;
comment on function ratelimit_version() is
'Returns the release of pgratelimit that is installed.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: owner.';

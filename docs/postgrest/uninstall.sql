-- Removes ratelimit_pre_request() and its settings; running it again is harmless. Switch db-pre-request off first, or PostgREST
-- fails every request. To uninstall the package removes them, too.
--
-- The next line makes psql end with status 3 on an error. Leave it out with any other client.
\set ON_ERROR_STOP on

do $$
declare
  v_path text := pg_catalog.current_setting('search_path');
  v_home text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspname
    into v_home
    from pg_proc as p
    join pg_namespace as n on n.oid = p.pronamespace
    join pg_namespace as package on package.nspname = 'ratelimit' and package.nspowner = p.proowner
   where p.proname = 'ratelimit_pre_request';
  if found then
    execute format('drop function %I.ratelimit_pre_request()', v_home);
  end if;
  if to_regclass('ratelimit.pre_request') is not null then
    drop table ratelimit.pre_request;
  end if;
  perform set_config('search_path', v_path, true);
end;
$$;

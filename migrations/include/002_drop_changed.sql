-- Remembers who may execute the functions that ratelimit.changed names, for 002_grant_changed.sql, and drops them.
do $drop$
declare
  v_path   text := pg_catalog.current_setting('search_path');
  v_home   text;
  v_grants jsonb := '[]';
  v_proc   record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspname
    into strict v_home
    from pg_proc as p
    join pg_namespace as n on n.oid = p.pronamespace
    join pg_namespace as package on package.nspname = 'ratelimit' and package.nspowner = p.proowner
   where p.proname = 'ratelimit_acquire'
     and p.prorettype = 'ratelimit.decision'::regtype;
  for v_proc in
    select p.oid::regprocedure as signature, p.proname, p.proacl, p.proowner
      from pg_proc as p
     where p.pronamespace = quote_ident(v_home)::regnamespace
       and p.proname = any (string_to_array(current_setting('ratelimit.changed'), ' '))
  loop
    v_grants := v_grants || coalesce((
      select jsonb_agg(jsonb_build_object('name', v_proc.proname, 'grantable', a.is_grantable,
                                          'grantee', case a.grantee when 0 then 'public' else a.grantee::regrole::text end))
        from aclexplode(v_proc.proacl) as a
       where a.grantee <> v_proc.proowner), '[]');
    execute format('drop routine %s', v_proc.signature);
  end loop;
  perform set_config('ratelimit.grants', v_grants::text, true);
  perform set_config('ratelimit.home', v_home, true);
  perform set_config('search_path', v_path, true);
end;
$drop$;

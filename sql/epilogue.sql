-- Checks that all functions of the package belong to the owner of schema ratelimit. Revokes the grants that
-- default privileges gave on new functions. Functions that existed before keep their grants, also those that the prologue dropped.
do $epilogue$
declare
  v_owner oid;
  v_path  text := pg_catalog.current_setting('search_path');
  v_home  text := pg_catalog.current_schema();
  v_role  text;
  v_proc  record;
  v_had   oid[] := pg_catalog.string_to_array(pg_catalog.current_setting('ratelimit.preexisting'), ',')::oid[];
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspowner into v_owner from pg_catalog.pg_namespace as n where n.nspname = 'ratelimit';

  for v_proc in
    select p.oid, p.oid::pg_catalog.regprocedure as signature, p.proowner, p.proacl
      from pg_catalog.pg_proc as p
     where p.pronamespace = 'ratelimit'::pg_catalog.regnamespace
        or p.pronamespace = pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace
       and pg_catalog.starts_with(p.proname, 'ratelimit_')
  loop
    if v_proc.proowner <> v_owner then
      raise exception 'a function of the package belongs to another role'
        using errcode = '42501',
              detail  = pg_catalog.format('%s belongs to %s; schema ratelimit belongs to %s.', v_proc.signature,
                                          v_proc.proowner::pg_catalog.regrole, v_owner::pg_catalog.regrole),
              hint    = 'Drop the function if it was planted; install as the owner of schema ratelimit.';
    end if;
    continue when v_proc.oid = any (v_had);
    for v_role in
      select distinct case a.grantee when 0 then 'public' else a.grantee::pg_catalog.regrole::text end
        from pg_catalog.aclexplode(coalesce(v_proc.proacl, pg_catalog.acldefault('f', v_owner))) as a
       where a.grantee <> v_owner
    loop
      execute pg_catalog.format('revoke all on routine %s from %s', v_proc.signature, v_role);
    end loop;
  end loop;
  for v_proc in
    select p.oid::regprocedure as signature, g.grantee, bool_or(g.grantable) as grantable
      from jsonb_to_recordset(current_setting('ratelimit.grants')::jsonb) as g (name text, grantee text, grantable boolean)
      join pg_proc as p on p.proname = g.name and p.pronamespace in ('ratelimit'::regnamespace, quote_ident(v_home)::regnamespace)
     group by p.oid, g.grantee
  loop
    execute format('grant execute on routine %s to %s%s', v_proc.signature, v_proc.grantee,
                   case when v_proc.grantable then ' with grant option' end);
  end loop;
  perform pg_catalog.set_config('search_path', v_path, true);
end;
$epilogue$;

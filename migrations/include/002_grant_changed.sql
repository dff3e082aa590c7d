-- Grants again what was granted on the functions that were dropped, and no more. Who may call ratelimit_acquire_many may call
-- ratelimit_acquire_packed, which is the same in another form.
do $grant$
declare
  v_path  text := pg_catalog.current_setting('search_path');
  v_proc  record;
  v_grant record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_proc in
    select p.oid::regprocedure as signature, p.proname, p.proowner,
           coalesce(p.proacl, acldefault('f', p.proowner)) as acl
      from pg_proc as p
     where p.pronamespace = quote_ident(current_setting('ratelimit.home'))::regnamespace
       and p.proname = any (string_to_array(current_setting('ratelimit.changed') || ' ratelimit_acquire_packed', ' '))
  loop
    for v_grant in
      select distinct case a.grantee when 0 then 'public' else a.grantee::regrole::text end as grantee
        from aclexplode(v_proc.acl) as a
       where a.grantee <> v_proc.proowner
    loop
      execute format('revoke all on function %s from %s', v_proc.signature, v_grant.grantee);
    end loop;
    for v_grant in
      select g.grantee, bool_or(g.grantable) as grantable
        from jsonb_to_recordset(current_setting('ratelimit.grants')::jsonb) as g (name text, grantee text, grantable boolean)
       where g.name = case v_proc.proname when 'ratelimit_acquire_packed' then 'ratelimit_acquire_many' else v_proc.proname end
       group by g.grantee
    loop
      execute format('grant execute on function %s to %s%s', v_proc.signature, v_grant.grantee,
                     case when v_grant.grantable then ' with grant option' end);
    end loop;
  end loop;
  perform set_config('search_path', v_path, true);
end;
$grant$;

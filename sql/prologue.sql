-- Decides where the public functions go, and refuses to install over objects of another role.
--
-- A first install takes the schema that heads search_path and wants it free of ratelimit_* functions: to replace a planted function would
-- leave the role that planted it as owner. A later install goes to the schema that has the functions. The setting ratelimit.preexisting
-- lists the functions that existed before, for this transaction only. The epilogue clears the grants of all others.
--
-- A migration lists in ratelimit.dropped the names of functions that go, and of those that come again with other arguments or columns,
-- which cannot be replaced. They are dropped here, and the epilogue grants again what was granted on the latter.
do $prologue$
declare
  v_owner  oid;
  v_first  text := pg_catalog.current_schema();
  v_home   text;
  v_proc   record;
  v_grants jsonb := '[]';
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspowner into v_owner from pg_catalog.pg_namespace as n where n.nspname = 'ratelimit';
  if pg_catalog.pg_get_userbyid(v_owner) <> current_user then
    raise exception 'schema ratelimit belongs to another role'
      using errcode = '42501',
            detail  = pg_catalog.format('It belongs to %s.', v_owner::pg_catalog.regrole),
            hint    = 'Install as its owner, or drop the schema if it was planted.';
  end if;

  if pg_catalog.to_regprocedure('ratelimit.clock()') is null then
    v_home := v_first;
    if v_home is null then
      raise exception 'no schema to install into'
        using errcode = '3F000',
              hint    = 'Put an existing schema at the head of search_path, for example public.';
    end if;
    if exists (select from pg_catalog.pg_proc as p
                where p.pronamespace = pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace
                  and pg_catalog.starts_with(p.proname, 'ratelimit_')) then
      raise exception 'functions named ratelimit_* exist already'
        using errcode = '42723',
              detail  = pg_catalog.format('Schema %I has them, and they are not of this package.', v_home),
              hint    = 'Drop or rename them, or install with another schema at the head of search_path.';
    end if;
  else
    begin
      select n.nspname into strict v_home
        from pg_catalog.pg_proc as p
        join pg_catalog.pg_namespace as n on n.oid = p.pronamespace
       where p.proname = 'ratelimit_version'
         and p.pronargs = 0
         and p.proowner = v_owner;
    exception
      when no_data_found or too_many_rows then
        raise exception 'the installed functions were not found'
          using errcode = '42883',
                detail  = 'Exactly one function ratelimit_version() should belong to the owner of schema ratelimit.',
                hint    = 'Restore its owner, or drop the copy.';
    end;
  end if;
  if not pg_catalog.has_schema_privilege(pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace, 'create') then
    raise exception 'the role may not create functions in their schema'
      using errcode = '42501',
            detail  = pg_catalog.format('The functions go to schema %I, on which role %I has no CREATE.', v_home, current_user),
            hint    = pg_catalog.format('Run as its owner: grant create on schema %I to %I;', v_home, current_user);
  end if;

  for v_proc in
    select p.oid::regprocedure as signature, p.proname, p.proacl
      from pg_proc as p
     where p.pronamespace in (quote_ident(v_home)::regnamespace, 'ratelimit'::regnamespace)
       and p.proowner = v_owner
       and p.proname = any (string_to_array(current_setting('ratelimit.dropped', true), ' '))
  loop
    v_grants := v_grants || coalesce((
      select jsonb_agg(jsonb_build_object('name', v_proc.proname, 'grantable', a.is_grantable,
                                          'grantee', case a.grantee when 0 then 'public' else a.grantee::regrole::text end))
        from aclexplode(v_proc.proacl) as a
       where a.grantee <> v_owner), '[]');
    execute format('drop routine %s', v_proc.signature);
  end loop;
  perform set_config('ratelimit.dropped', '', true);
  perform set_config('ratelimit.grants', v_grants::text, true);

  perform pg_catalog.set_config('ratelimit.preexisting',
    (select coalesce(pg_catalog.string_agg(p.oid::text, ','), '')
       from pg_catalog.pg_proc as p
      where p.pronamespace in (pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace, 'ratelimit'::pg_catalog.regnamespace)), true);
  perform pg_catalog.set_config('search_path', pg_catalog.quote_ident(v_home) || ', pg_temp', true);
end;
$prologue$;

-- Decides where the public functions go, and refuses to install over objects of another role.
--
-- A first install takes the schema that heads search_path and wants it free of ratelimit_* functions: to replace a planted function would
-- leave the role that planted it as owner. A later install goes to the schema that has the functions. The setting ratelimit.preexisting
-- lists the functions that existed before, for this transaction only. The epilogue clears the grants of all others.
do $prologue$
declare
  v_owner oid;
  v_first text := pg_catalog.current_schema();
  v_home  text;
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

  perform pg_catalog.set_config('ratelimit.preexisting',
    (select coalesce(pg_catalog.string_agg(p.oid::text, ','), '')
       from pg_catalog.pg_proc as p
      where p.pronamespace in (pg_catalog.quote_ident(v_home)::pg_catalog.regnamespace, 'ratelimit'::pg_catalog.regnamespace)), true);
  perform pg_catalog.set_config('search_path', pg_catalog.quote_ident(v_home) || ', pg_temp', true);
end;
$prologue$;

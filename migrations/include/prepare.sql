-- What every installer begins with, and uninstall.sql. From here to the end of the transaction they take turns. Afterwards schema
-- ratelimit has a version table, and nothing that is not of this package.
--
-- Two settings, made for the transaction, say what is to be done: ratelimit.task (install or uninstall), and ratelimit.known, the newest
-- version that the installer knows.
--
-- Code of another role must not run with the rights of the role that installs; a trigger on the version table would. So objects of
-- several roles in the schema are refused, and so is a schema of another role. A schema that CREATE EXTENSION made is left to ALTER
-- EXTENSION and DROP EXTENSION. The exception is an install that has nothing to do: it only reads the version from a plain table, and
-- that runs no code.
do $prepare$
declare
  v_path     text    := pg_catalog.current_setting('search_path');
  v_home     text    := pg_catalog.current_schema();
  v_known    integer;
  v_installs boolean := pg_catalog.current_setting('ratelimit.task', true) operator(pg_catalog.=) 'install';
  v_schema   oid;
  v_owner    oid;
  v_version  integer;
  v_member   boolean;  -- of the extension
  v_object   text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  v_known := nullif(current_setting('ratelimit.known', true), '');
  if v_known is null then  -- the settings ended with the statement that made them
    raise exception 'this file needs a transaction'
      using errcode = '25P01',
            hint    = 'Begin one first, or run: psql --single-transaction.';
  end if;
  perform pg_advisory_xact_lock(9628173550095224);  -- as tern does
  select n.oid, n.nspowner into v_schema, v_owner from pg_namespace as n where n.nspname = 'ratelimit';
  if not found then
    if v_installs and not has_database_privilege(current_database(), 'create') then
      raise exception 'the role may not create schema ratelimit'
        using errcode = '42501',
              detail  = format('Role %I has no CREATE on database %I.', current_user, current_database()),
              hint    = format('Run as its owner: grant create on database %I to %I;', current_database(), current_user)
                        || case when not has_schema_privilege(quote_ident(v_home)::regnamespace, 'create')
                                then format(' And as the owner of the schema: grant create on schema %I to %I;', v_home, current_user)
                                else '' end;
    elsif v_installs and not has_schema_privilege(quote_ident(v_home)::regnamespace, 'create') then
      raise exception 'the role may not create functions in their schema'
        using errcode = '42501',
              detail  = format('The functions go to schema %I, on which role %I has no CREATE.', v_home, current_user),
              hint    = format('Run as its owner: grant create on schema %I to %I;', v_home, current_user);
    elsif v_installs then
      create schema ratelimit;
    end if;
  elsif exists (select from pg_class as c where c.relnamespace = v_schema and c.relowner <> v_owner) then
    raise exception 'schema ratelimit holds objects of several roles'
      using errcode = '42501',
            detail  = 'They would run with your rights.',
            hint    = 'Drop what does not belong to the owner of the schema.';
  else
    v_member := exists (select
                          from pg_depend as d
                         where d.classid = 'pg_namespace'::regclass
                           and d.objid = v_schema
                           and d.refclassid = 'pg_extension'::regclass
                           and d.deptype = 'e')
                and current_setting('ratelimit.extends', true) is distinct from 'on';  -- set by the extension's scripts
    if exists (select
                 from pg_class as c
                 join pg_attribute as a on a.attrelid = c.oid
                where c.relnamespace = v_schema
                  and c.relname = 'version'
                  and c.relkind = 'r'
                  and not c.relrowsecurity
                  and a.attname = 'version'
                  and a.atttypid = 'integer'::regtype
                  and has_schema_privilege(v_schema, 'usage')
                  and has_table_privilege(c.oid, 'select')) then
      select v.version into v_version from only ratelimit.version as v;
    end if;
    if (v_member or pg_get_userbyid(v_owner) <> current_user) and (v_version >= v_known and v_installs) is not true then
      if v_member then
        raise exception 'pgratelimit is an extension in this database'
          using errcode = '55000',
                hint    = case when v_installs then 'Run: alter extension pgratelimit update' else 'Run: drop extension pgratelimit' end;
      end if;
      raise exception 'schema ratelimit belongs to another role'
        using errcode = '42501',
              detail  = format('It belongs to %s.', v_owner::regrole),
              hint    = format('Connect as %1$s, for example with PGOPTIONS=''-c role=%1$s''; or drop the schema if it was planted.', v_owner::regrole);
    end if;
  end if;

  if v_version > v_known then
    raise exception 'a newer schema is installed'
      using errcode = '55000',
            detail  = format('Schema version %s is installed; this release knows versions up to %s.', v_version, v_known),
            hint    = 'Use the release that installed it, or a later one.';
  elsif v_installs and coalesce(v_version, 0) = 0 then
    if to_regclass('ratelimit.schema_version') is not null then
      raise exception 'a development version of pgratelimit is installed'
        using errcode = '55000',
              detail  = 'It was never released: nothing upgrades it, and uninstall.sql removes it.',
              hint    = 'Run uninstall.sql of this release, which removes it with its policies and buckets, and install again.';
    end if;
    select pg_describe_object(d.classid, d.objid, d.objsubid)
      into v_object
      from pg_depend as d
     where d.refclassid = 'pg_namespace'::regclass
       and d.refobjid = v_schema
       and (d.classid, d.objid) is distinct from ('pg_class'::regclass, to_regclass('ratelimit.version'))
     limit 1;
    if found then
      raise exception 'schema ratelimit is not empty'
        using errcode = '42P06',
              detail  = format('It holds %s, which is not of this package.', v_object),
              hint    = 'Drop or move what the schema holds, or drop the schema if it was planted.';
    end if;
    if v_version is null and to_regclass('ratelimit.version') is null then
      create table ratelimit.version (version int4 not null);
      insert into ratelimit.version values (0);
    end if;
  end if;
  perform set_config('search_path', v_path, true);
end;
$prepare$;

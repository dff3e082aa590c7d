-- Installs ratelimit_pre_request(), which PostgREST calls before each request, and its settings. Run it as the owner of the
-- package, in the database that has it. It can be run again: the settings and the grants stay. docs/postgrest.md says how
-- to switch it on.
--
-- The next line makes psql end with status 3 on an error. Leave it out with any other client.
\set ON_ERROR_STOP on

begin;
set local client_min_messages = warning;

-- Finds the schema that has the functions of the package, and puts it at the head of search_path until the end.
do $home$
declare
  v_owner oid;
  v_home  text;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  select n.nspowner into v_owner from pg_namespace as n where n.nspname = 'ratelimit';
  select n.nspname
    into v_home
    from pg_proc as p
    join pg_namespace as n on n.oid = p.pronamespace
   where p.proname = 'ratelimit_enforce'
     and p.proowner = v_owner;
  if v_home is null then
    raise exception 'pgratelimit is not installed in this database, or is too old'
      using errcode = '55000',
            detail  = format('Database %I has no function ratelimit_enforce of the owner of schema ratelimit.', current_database()),
            hint    = 'Install it first: psql -f migrations/psql/install.sql, or make install DATABASE_URL=...';
  elsif pg_get_userbyid(v_owner) <> current_user then
    raise exception 'schema ratelimit belongs to another role'
      using errcode = '42501',
            detail  = format('It belongs to %s.', v_owner::regrole),
            hint    = format('Run this file as %s.', v_owner::regrole);
  elsif exists (select from pg_proc as p
                 where p.proname = 'ratelimit_pre_request'
                   and p.pronamespace = quote_ident(v_home)::regnamespace
                   and p.proowner <> v_owner) then
    raise exception 'ratelimit_pre_request belongs to another role'
      using errcode = '42501',
            hint    = 'Drop the function if it was planted.';
  end if;
  perform set_config('ratelimit.pre_request_is_new',
                     (not exists (select from pg_proc as p
                                   where p.proname = 'ratelimit_pre_request'
                                     and p.pronamespace = quote_ident(v_home)::regnamespace))::text, true);
  perform set_config('search_path', quote_ident(v_home) || ', pg_temp', true);
end;
$home$;

-- Without rows no request is limited.
create table if not exists ratelimit.pre_request (
  role               text    collate "C" not null,
  policy             text    collate "C" not null,
  by_subject         boolean not null default true,
  forwarded_hop      integer,
  refuse_without_key boolean not null default false,
  constraint pre_request_pkey primary key (role),
  constraint pre_request_forwarded_hop_check check (forwarded_hop > 0)
);
comment on table ratelimit.pre_request is
  'How requests of PostgREST are limited: one row for each role, and one for all others.';
comment on column ratelimit.pre_request.role is
  'The database role of the request, such as anon; * is every role without a row of its own.';
comment on column ratelimit.pre_request.policy is
  'The policy of the buckets.';
comment on column ratelimit.pre_request.by_subject is
  'Whether the key is the sha256 of the subject of the JWT, if there is one.';
comment on column ratelimit.pre_request.forwarded_hop is
  'Otherwise the key is this address in X-Forwarded-For, counted from the right: 1 with one proxy; null does not look there.';
comment on column ratelimit.pre_request.refuse_without_key is
  'What happens to a request that has neither: it is refused, or it passes.';

-- Limits the request that PostgREST is about to serve, as the settings for its role say. current_user is the owner here, so
-- the role comes from the setting.
--
-- Locks and writes: as ratelimit_acquire; nothing in a read-only transaction.
create or replace function ratelimit_pre_request()
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_settings pre_request;
begin
  select s.* into v_settings
    from pre_request as s
   where s.role in (current_setting('role'), '*')
   order by s.role = '*'
   limit 1;
  if found then
    perform limit_request(v_settings.policy, v_settings.by_subject, v_settings.forwarded_hop, v_settings.refuse_without_key);
  end if;
end;
$$;
comment on function ratelimit_pre_request() is
  'Limit the request that PostgREST is about to serve, as table ratelimit.pre_request says.';

-- Default privileges may have granted rights to other roles.
do $private$
declare
  v_path  text := pg_catalog.current_setting('search_path');
  v_home  text := pg_catalog.current_schema();
  v_grant record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  for v_grant in
    select o.object, case a.grantee when 0 then 'public' else a.grantee::regrole::text end as grantee
      from (select format('function %I.ratelimit_pre_request()', v_home), coalesce(p.proacl, acldefault('f', p.proowner)), p.proowner
              from pg_proc as p
             where p.proname = 'ratelimit_pre_request'
               and p.pronamespace = quote_ident(v_home)::regnamespace
            union all
            select 'table ratelimit.pre_request', c.relacl, c.relowner
              from pg_class as c
             where c.oid = 'ratelimit.pre_request'::regclass) as o (object, acl, owner)
     cross join aclexplode(o.acl) as a
     where a.grantee <> o.owner
       and current_setting('ratelimit.pre_request_is_new')::boolean
     group by o.object, a.grantee
  loop
    execute format('revoke all on %s from %s', v_grant.object, v_grant.grantee);
  end loop;
  perform set_config('search_path', v_path, true);
end;
$private$;

commit;

-- The roles, and what they need beside the package.
\getenv password RATELIMIT_APP_PASSWORD

-- pg_cron runs the owner's jobs only if that may log in. Without a password it cannot, but where pg_hba.conf says trust.
select 'create role pgratelimit login'
 where not exists (select from pg_roles where rolname = 'pgratelimit')
\gexec
select 'create role ratelimit_app nologin'
 where not exists (select from pg_roles where rolname = 'ratelimit_app')
\gexec
\if :{?password}
  alter role ratelimit_app login password :'password';
\endif

grant create on database :"DBNAME" to pgratelimit;
grant create on schema public to pgratelimit;
set client_min_messages = warning;
create extension if not exists pg_cron;
grant usage on schema cron to pgratelimit;

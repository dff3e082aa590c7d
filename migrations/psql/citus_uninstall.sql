-- Removes pgratelimit from all nodes of a Citus cluster, with all policies and buckets. For psql, on the coordinator:
--
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -f citus_uninstall.sql
--
-- An object outside the package that depends on one of it stops the removal.
--
-- Generated from sql/: make psql.
call citus_cleanup_orphaned_resources();  -- shards that were moved may have left their old copies
begin transaction isolation level read committed;
set local client_min_messages = warning;
do $uninstall$
declare
  v_function record;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);  -- operators of PostgreSQL only
  perform set_config('citus.multi_shard_modify_mode', 'sequential', true);
  for v_function in
    select p.oid::regprocedure as signature
      from pg_proc as p
      join pg_namespace as n on n.nspname = 'ratelimit' and n.nspowner = p.proowner
     where p.pronamespace = n.oid
        or starts_with(p.proname, 'ratelimit_')
     order by p.pronamespace = n.oid
  loop
    execute format('drop routine %s', v_function.signature);
  end loop;
  drop table if exists ratelimit.pre_request;
end;
$uninstall$;
drop type if exists ratelimit.part;
drop type if exists ratelimit.asked, ratelimit.charged;
drop table ratelimit.ephemeral_idempotency_keys, ratelimit.ephemeral_buckets, ratelimit.idempotency_keys, ratelimit.buckets,
           ratelimit.overrides, ratelimit.shard, ratelimit.policies, ratelimit.schema_version;
drop type ratelimit.decision, ratelimit.reservation, ratelimit.partial_decision, ratelimit.packed, ratelimit.retired_decision;
drop schema ratelimit;
commit;

-- Lists the policies, as defined.
--
-- Locks:  nothing.
-- Writes: nothing.
create or replace function ratelimit_policies()
  returns table (policy text, capacity bigint, refill bigint, every interval,
                 stepped boolean, durable boolean, remember interval, shadow boolean)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select p.name, p.capacity, p.refill, p.every, p.stepped, p.durable, p.remember, p.shadow
    from policies as p
   order by p.name
$$;
comment on function ratelimit_policies() is
  'List the policies, one row each, as defined.';

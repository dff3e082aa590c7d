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
'Lists the policies, by name.
The columns are the arguments of ratelimit_define_policy.
capacity: whole tokens.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: administrator or monitoring.';

create or replace function ratelimit_policies()
  returns table (policy text, capacity bigint, refill bigint, every interval,
                 stepped boolean, durable boolean, remember interval, shadow boolean,
                 period interval, time_zone text, anchor timestamp)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select p.name, p.capacity, case when (p.calendar).period is null then p.refill end, case when (p.calendar).period is null then p.every end,
         case when (p.calendar).period is null then p.stepped end, p.durable, p.remember, p.shadow,
         (p.calendar).period, (p.calendar).time_zone, (p.calendar).anchor
    from policies as p
   order by p.name
$$;
comment on function ratelimit_policies() is
'Lists the policies, by name.
The columns are the arguments of ratelimit_define_policy.
capacity: whole tokens.
refill: null for a quota, as every and stepped are.
period: null unless the policy is a quota, as time_zone and anchor are.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: administrator or monitoring.';

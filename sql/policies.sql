create or replace function ratelimit_policies()
  returns table (policy text, capacity bigint, refill bigint, every interval,
                 stepped boolean, durable boolean, remember interval, shadow boolean,
                 period interval, time_zone text, anchor timestamp, lease interval, history interval, changed_at timestamptz, changed_by text)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select p.name, p.capacity, case when p.kind = 'tokens' then p.refill end, case when p.kind = 'tokens' then p.every end,
         case when p.kind = 'tokens' then p.stepped end, p.durable, case when p.kind <> 'slots' then p.remember end, p.shadow,
         p.period, p.time_zone, p.anchor, p.lease, nullif(p.history, '0'), p.changed_at, p.changed_by
    from policies as p
   order by p.name
$$;
comment on function ratelimit_policies() is
'Lists the policies, by name.
The columns are the arguments of ratelimit_define_policy, and who changed the policy when.
capacity: whole tokens, or slots.
refill: null for a quota and for slots, as every and stepped are.
remember: null for slots.
period: null unless the policy is a quota, as time_zone and anchor are.
lease: null unless the policy lends slots.
history: null unless the policy is a quota that keeps its usage.
changed_at: when ratelimit_define_policy last changed something of the policy.
changed_by: who did: the role of the session, and after a slash the role that SET ROLE chose, if any.
Errors: none.
Locks: nothing.
Writes: nothing.
Role: administrator or monitoring.';

-- The statements of clean-up for one table each; cleanup_slots.sql has those for slots. The names are those of the tables. On Citus
-- they are those of shards, and of the copies of policies and overrides on the node. So the statements are made at run time.
-- Locks and writes: as cleanup_batch.

create or replace function ratelimit.full_after(policy ratelimit.policies, level bigint, refilled_at timestamptz, now timestamptz)
  returns bigint language sql immutable parallel safe
as $$
  select case
    when policy.kind = 'quota' then ratelimit.quota_unused_after(policy, level, refilled_at, now)
    else least(coalesce(ratelimit.wait_until(policy.full_level, level, refilled_at, now, policy), 86400000000), 86400000000)
  end
$$;
comment on function ratelimit.full_after(ratelimit.policies, bigint, timestamptz, timestamptz) is
  'Microseconds until clean-up looks at a bucket by the numbers of a policy; 0 if it is full by them.';

-- Removes due buckets that are full or have no policy, and postpones the other due buckets. A bucket is full if it is by each of the
-- numbers that may apply next: those of the policy, those with what stays of the override, and those with what ends, too. One of a quota
-- with a history is full once nothing is used in the period of its key, and its period is closed.
create or replace function ratelimit.cleanup_buckets(
    in buckets regclass, in usage regclass, in policies regclass, in overrides regclass, in max_rows integer, in now timestamptz, in due_before timestamptz,
    out read bigint, out deleted bigint)
  language plpgsql volatile
as $$
begin
  execute format($sql$
    with due as materialized (
      select b.ctid as row_id,
             greatest(0, case when p.id is not null then greatest(
               case when p.history is null then full_after(row(p.*)::ratelimit.policies, b.level, b.refilled_at, $1) end,
               case when o.stays or p.history is not null then
                 full_after(with_override(row(p.*)::ratelimit.policies, row(o.*)::ratelimit.overrides, 'infinity'), b.level, b.refilled_at, $1)
               end,
               case when o.expires_at > $1 then
                 full_after(with_override(row(p.*)::ratelimit.policies, row(o.*)::ratelimit.overrides, $1), b.level, b.refilled_at, $1)
               end,
               case when b.paused_until > $1 then least(microseconds(b.paused_until - $1), 86400000000)::bigint end) end) as wait_us,
             case when p.history is not null then
               with_override(row(p.*)::ratelimit.policies, row(o.*)::ratelimit.overrides, 'infinity')
             end as quota
        from %1$s as b
        left join %2$s as p on p.id = b.policy_id
        left join %3$s as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key
       where b.due_at <= $2
       order by b.due_at
       limit $3
         for update of b skip locked
    ), removed as (
      delete from %1$s as b
       where b.ctid = any (array(select d.row_id from due as d where d.wait_us = 0))
      returning b.*, b.ctid as row_id
    ), closed as (  -- as of usage.sql
      insert into %4$s as c (policy_id, key, began, ended, expires_at, used)
      select r.policy_id, r.key, r.began, r.ended, kept_until(r.ended, r.quota), -r.level / 1000000
        from (select r.*, period_began(r.counts_from, r.turns, r.last) as began, greatest((r.turns).turns_at, (r.last).ended) as ended
                from (select r.*, d.quota, turns_of(d.quota, r.refilled_at) as turns,
                             (select row(u.*)::ratelimit.usage from %4$s as u where u.policy_id = r.policy_id and u.key = r.key order by u.began desc limit 1) as last
                        from removed as r
                        join due as d on d.row_id = r.row_id and (d.quota).id is not null
                       where r.level < 0 and (d.quota).history <> interval '0'
                      offset 0) as r
              offset 0) as r
      on conflict (policy_id, key, began) do update set used = c.used + excluded.used
    ), postponed as (
      update %1$s as b
         set due_at = $1 + duration(d.wait_us)
        from due as d
       where b.ctid = d.row_id
         and d.wait_us > 0
    )
    select (select count(*) from due), (select count(*) from removed)
  $sql$, buckets, policies, overrides, usage)
     into read, deleted
    using now, due_before, max_rows;
end;
$$;
comment on function ratelimit.cleanup_buckets(regclass, regclass, regclass, regclass, integer, timestamptz, timestamptz) is
  'Removes or postpones due buckets, and answers how many were due and how many were removed.';

create or replace function ratelimit.cleanup_expired(rows regclass, max_rows integer, due_before timestamptz)
  returns bigint language plpgsql volatile
as $$
declare
  v_deleted bigint;
begin
  execute format($sql$
    delete from %1$s as k
     where k.ctid = any (array(select d.ctid
                                 from %1$s as d
                                where d.expires_at <= $1
                                order by d.expires_at
                                limit $2
                                  for update skip locked))
  $sql$, rows)
    using due_before, max_rows;
  get diagnostics v_deleted = row_count;
  return v_deleted;
end;
$$;
comment on function ratelimit.cleanup_expired(regclass, integer, timestamptz) is
  'Removes expired rows of a table, and answers how many.';

create or replace function ratelimit.cleanup_orphans(rows regclass, policies regclass, max_rows integer)
  returns bigint language plpgsql volatile
as $$
declare
  v_deleted bigint;
begin
  execute format($sql$
    with recursive ids (id) as (  -- one index probe for each policy that has rows
      (select t.policy_id from %1$s as t order by t.policy_id limit 1)
      union all
      select (select t.policy_id from %1$s as t where t.policy_id > i.id order by t.policy_id limit 1)
        from ids as i
       where i.id is not null
    ), gone as materialized (
      select i.id from ids as i where not exists (select from %2$s as p where p.id = i.id)
    )
    delete from %1$s as t
     where t.ctid = any (array(select o.ctid
                                 from gone as g
                                cross join lateral (select u.ctid
                                                      from %1$s as u
                                                     where u.policy_id = g.id
                                                       for update skip locked) as o
                                limit $1))
  $sql$, rows, policies)
    using max_rows;
  get diagnostics v_deleted = row_count;
  return v_deleted;
end;
$$;
comment on function ratelimit.cleanup_orphans(regclass, regclass, integer) is
  'Removes rows whose policy was dropped, at most max_rows, and answers how many.';

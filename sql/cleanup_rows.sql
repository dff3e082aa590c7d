-- The statements of clean-up for one table each; cleanup_slots.sql has those for slots. The names are those of the tables. On Citus
-- they are those of shards, and of the copies of policies and overrides on the node. So the statements are made at run time.
-- Locks and writes: as cleanup_batch.

-- Removes due buckets that are full or have no policy, and postpones the other due buckets.
create or replace function ratelimit.cleanup_buckets(
    in buckets regclass, in policies regclass, in overrides regclass, in max_rows integer, in now timestamptz, in due_before timestamptz,
    out read bigint, out deleted bigint)
  language plpgsql volatile
as $$
begin
  execute format($sql$
    with due as materialized (
      select b.ctid as row_id,
             p.id is null
             or (b.paused_until > $1) is not true and case
                  when p.kind = 'quota' then
                    used_level(b.level, b.refilled_at, (turning_if_known(p.period, p.months, p.time_zone, p.anchor, $1)).turned_at) = 0
                    and (o.key is null
                         or used_level(b.level, b.refilled_at, (turning_if_known(p.period, p.months, o.time_zone, o.anchor, $1)).turned_at) = 0)
                  else
                    wait_for(p.full_level, b.level, b.refilled_at, $1, p.every_us, p.tick_us, p.tick_gain, p.round_up) = 0
                    and (o.key is null or wait_for(o.full_level, b.level, b.refilled_at, $1, o.every_us, o.tick_us, o.tick_gain, o.round_up) = 0)
                end as removable
        from %1$s as b
        left join %2$s as p on p.id = b.policy_id
        left join %3$s as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key and o.expires_at > $1
       where b.due_at <= $2
       order by b.due_at
       limit $3
         for update of b skip locked
    ), removed as (
      delete from %1$s as b
       where b.ctid = any (array(select d.row_id from due as d where d.removable))
      returning 1
    ), postponed as (
      update %1$s as b
         set due_at = (select case
                                when p.kind = 'quota' then
                                  coalesce(greatest((turning_if_known(p.period, p.months, p.time_zone, p.anchor, $1)).turns_at,
                                                    case when o.key is not null then
                                                      (turning_if_known(p.period, p.months, o.time_zone, o.anchor, $1)).turns_at
                                                    end),
                                           $1 + duration(86400000000))
                                else
                                  $1 + duration(least(greatest(coalesce(wait_for(p.full_level, b.level, b.refilled_at, $1, p.every_us, p.tick_us, p.tick_gain, p.round_up), 86400000000),
                                                           case when o.key is not null then
                                                             coalesce(wait_for(o.full_level, b.level, b.refilled_at, $1, o.every_us, o.tick_us, o.tick_gain, o.round_up), 86400000000)
                                                           end,
                                                           microseconds(b.paused_until - $1)::bigint),
                                                  86400000000))
                              end
                                 from %2$s as p
                                 left join %3$s as o on p.overridden and o.policy_id = b.policy_id and o.key = b.key
                                                             and o.expires_at > $1
                                where p.id = b.policy_id)
       where b.ctid = any (array(select d.row_id from due as d where d.removable is not true))
    )
    select (select count(*) from due), (select count(*) from removed)
  $sql$, buckets, policies, overrides)
     into read, deleted
    using now, due_before, max_rows;
end;
$$;
comment on function ratelimit.cleanup_buckets(regclass, regclass, regclass, integer, timestamptz, timestamptz) is
  'Removes or postpones due buckets, and answers how many were due and how many were removed.';

create or replace function ratelimit.cleanup_idempotency_keys(idempotency_keys regclass, max_rows integer, due_before timestamptz)
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
  $sql$, idempotency_keys)
    using due_before, max_rows;
  get diagnostics v_deleted = row_count;
  return v_deleted;
end;
$$;
comment on function ratelimit.cleanup_idempotency_keys(regclass, integer, timestamptz) is
  'Removes expired idempotency keys, and answers how many.';

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

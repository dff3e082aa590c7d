-- Usage: what quotas with a history have counted, a row of usage for each period of a key that is closed and in which anything was used.
--
-- A period is closed by the first write after its turn, in one transaction with it, or by clean-up. To close it is to insert the row and
-- to leave nothing used in the bucket. So nothing is counted twice, and a calendar that is changed back makes nothing count again.
--
-- The row of the bucket has the instant from which it counts, counts_from: the last turn when the first write of the period was made. A
-- closed period begins there, and ends at the first turn after the last write, by the calendar as of the closing; but it begins where the
-- last closed period of the key ends, if that is later. If nothing is left between, what was used is added to that one. So the periods of
-- a key never overlap, whatever happens to its calendar or to the clock.
--
-- A quota whose history was ended has a history of 0: its periods are closed as before, and nothing is kept.
create or replace function ratelimit.period_began(counts_from timestamptz, turns ratelimit.turns, last ratelimit.usage)
  returns timestamptz language sql immutable parallel safe
as $$
  select case when last.ended >= turns.turns_at then last.began else greatest(coalesce(counts_from, turns.turned_at), last.ended) end
$$;
comment on function ratelimit.period_began(timestamptz, ratelimit.turns, ratelimit.usage) is
  'When a period began that is closed after the last one of its key; turns are those around the last write.';

create or replace function ratelimit.counts_from(quota ratelimit.policies, now timestamptz)
  returns timestamptz language sql immutable parallel safe
as $$
  select case when quota.history is not null then (ratelimit.turns_of(quota, now)).turned_at end
$$;
comment on function ratelimit.counts_from(ratelimit.policies, timestamptz) is
  'From when a bucket counts whose row is created; null without a history.';

-- A day or a month of the history may be longer or shorter elsewhere, so it is counted in the time zone of the key.
create or replace function ratelimit.kept_until(ended timestamptz, quota ratelimit.policies)
  returns timestamptz language sql immutable parallel safe
as $$
  select ((ended at time zone quota.time_zone) + quota.history) at time zone quota.time_zone
$$;
comment on function ratelimit.kept_until(timestamptz, ratelimit.policies) is
  'From when on clean-up removes a closed period.';

-- Closes the period of a key if it is over, and so begins the one that runs, since the answer. Whoever writes the bucket of a quota with a
-- history calls this before. If there was no row, another session may still commit one of a period that is over: the caller must not
-- write a row that was written before the answer.
--
-- Locks:  the bucket.
-- Writes: the bucket and usage, if the period is over.
create or replace function ratelimit.close_period(policy_id bigint, key text, now timestamptz)
  returns timestamptz language plpgsql volatile
as $$
declare
  v_now         alias for now;
  v_key         text collate "C" := key;
  v_quota       ratelimit.policies;
  v_numbers     ratelimit.numbers;
  v_turned_at   timestamptz;
  v_turns       ratelimit.turns;  -- around the last write
  v_level       bigint;
  v_refilled_at timestamptz;
  v_counts_from timestamptz;
  v_last        ratelimit.usage;
  v_began       timestamptz;
  v_ended       timestamptz;
  v_used        bigint;
  v_expires_at  timestamptz;
begin
  select p.* into v_quota from policies as p where p.id = close_period.policy_id;
  v_numbers   := numbers_of_key(v_quota, v_key, now);
  v_quota     := v_numbers.policy;
  v_turned_at := (v_numbers.turns).turned_at;
  select b.level, b.refilled_at, b.counts_from into v_level, v_refilled_at, v_counts_from
    from buckets as b
   where b.policy_id = v_quota.id and b.key = v_key
     for update;
  if (v_quota.history is not null and v_refilled_at < v_turned_at) is not true then
    return v_turned_at;
  end if;
  update buckets as b
     set level = 0, refilled_at = v_now, counts_from = v_turned_at, room = null
   where b.policy_id = v_quota.id and b.key = v_key;
  if v_level >= 0 or v_quota.history = interval '0' then
    return v_turned_at;
  end if;
  select u.* into v_last from usage as u where u.policy_id = v_quota.id and u.key = v_key order by u.began desc limit 1;
  v_turns      := turns_of(v_quota, v_refilled_at);
  v_began      := period_began(v_counts_from, v_turns, v_last);
  v_ended      := greatest(v_turns.turns_at, v_last.ended);
  v_used       := -v_level / 1000000;
  v_expires_at := kept_until(v_ended, v_quota);
  insert into usage as u (policy_id, key, began, ended, expires_at, used)
  values (v_quota.id, v_key, v_began, v_ended, v_expires_at, v_used)
  on conflict on constraint usage_pkey do update set used = u.used + excluded.used;
  return v_turned_at;
end;
$$;
comment on function ratelimit.close_period(bigint, text, timestamptz) is
  'Closes the period of a key of a quota with a history if it is over.';

-- Closes the period of a key whose calendar is about to change. Clean-up then looks when the next turn is: it may be nearer.
create or replace function ratelimit.change_calendar(policy ratelimit.policies, key text, now timestamptz)
  returns void language plpgsql volatile
as $$
declare
  v_policy alias for policy;
  v_now    alias for now;
  v_key    text collate "C" := key;
begin
  perform close_period(policy.id, v_key, now);
  update buckets as b set due_at = least(b.due_at, v_now) where b.policy_id = v_policy.id and b.key = v_key;
end;
$$;
comment on function ratelimit.change_calendar(ratelimit.policies, text, timestamptz) is
  'Prepares the bucket of a quota with a history for another calendar of its key.';

-- The rows of ratelimit_usage, which has columns named like its arguments: PL/pgSQL refuses them. EXECUTE, since a plain query would take its
-- columns key, began, ended and used for variables. A bucket counts if its period runs, or is to be closed.
create or replace function ratelimit.periods_of(in of_policy text, in of_key text, in since timestamptz, in until timestamptz, in at_most integer,
    out policy text, out key text, out began timestamptz, out ended timestamptz, out used bigint, out closed boolean)
  returns setof record
  language plpgsql
  stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_policy ratelimit.policies := policy_named(of_policy);
begin
  if since >= until then
    perform refuse('since', since::text, 'Pass an instant before until, or null for no bound.');
  elsif v_policy.kind = 'slots' then
    perform refuse_slots(v_policy.name);  -- raises 22023
  elsif v_policy.kind <> 'quota' or not v_policy.durable then
    raise exception 'invalid policy' using
      errcode = '22023',
      detail  = format('Policy %L is not a durable quota.', v_policy.name),
      hint    = 'Only durable quotas have periods: ratelimit_define_policy(policy, capacity, period => ''1 month'', history => ''2 years'').';
  end if;
  return query execute $sql$
    select $1, p.key, p.began, p.ended, sum(p.used)::bigint, bool_and(p.closed)
      from (select u.key, u.began, u.ended, u.used, true as closed
              from usage as u
             where u.policy_id = $7 and ($2 is null or u.key = $2 collate "C")
            union all
            select b.key, period_began(b.counts_from, b.turns, b.last), greatest((b.turns).turns_at, (b.last).ended), -b.level / 1000000, false
              from (select b.key, b.level, b.counts_from, turns_of((b.n).policy, b.refilled_at) as turns, l.last
                      from (select b.*, numbers_of_key($8, b.key, $6) as n
                              from buckets as b
                             where b.policy_id = $7 and b.level < 0 and ($2 is null or b.key = $2 collate "C")
                            offset 0) as b
                      left join (select distinct on (u.key) u.key, row(u.*)::ratelimit.usage as last
                                   from usage as u
                                  where u.policy_id = $7 and ($2 is null or u.key = $2 collate "C")
                                  order by u.key, u.began desc) as l on l.key = b.key
                     where ($8).history <> interval '0' or b.refilled_at >= ((b.n).turns).turned_at
                    offset 0) as b) as p
     where (p.began < $4) is not false and (p.ended > $3) is not false
     group by p.key, p.began, p.ended
     order by p.key, p.began
     limit $5
  $sql$ using of_policy, of_key, since, until, at_most, clock(), v_policy.id, v_policy;
end;
$$;
comment on function ratelimit.periods_of(text, text, timestamptz, timestamptz, integer) is
  'The periods of a quota in which anything was used, at most at_most of them, by key.';

create or replace function ratelimit_usage(
    policy   text,
    key      text        default null,
    since    timestamptz default null,
    until    timestamptz default null,
    max_rows integer     default 1000)
  returns table (policy text, key text, began timestamptz, ended timestamptz, used bigint, closed boolean)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $2, $5);
  select * from periods_of($1, $2, $3, $4, $5)
$$;
comment on function ratelimit_usage(text, text, timestamptz, timestamptz, integer) is
'Lists what a durable quota has counted, by key and period: of the periods that its history has kept, and of the last one.
Periods in which nothing was used are left out.
key: null lists all keys.
since: lists the periods that end after it. null: all.
until: lists the periods that begin before it. null: all.
max_rows: 1 or more.
used: whole tokens: what was granted, charged and settled, less what was refunded. It may be above the capacity.
closed: the period is over, and used changes no more. A period that is over and not yet closed has closed false: the next write of the key
  closes it, or clean-up within minutes.
Errors: 22023 for a bad argument and for a policy that is not a durable quota, RL001 for an unknown policy.
Locks: nothing.
Writes: nothing.
Role: administrator.';

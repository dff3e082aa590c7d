-- The rows of ratelimit_status. That has columns named like its arguments, which PL/pgSQL refuses.
--
-- A standby cannot read ephemeral buckets. Even a statement that names their table fails there, so the statement is made at run time.
-- If an ephemeral policy is asked for, it is 0A000: to list no bucket would say that all are full.
create or replace function ratelimit.emptiest_buckets(in of_policy text, in of_key text, in at_most integer,
    out policy text, out key text, out remaining bigint, out retry_after interval, out reset_after interval, out capacity bigint,
    out overridden boolean, out share numeric)
  returns setof record
  language plpgsql
  stable
  set search_path = ratelimit, pg_temp
as $$
declare
  v_rows constant text := $sql$
    select s.name, s.key, whole_tokens(s.level_now),
           duration(wait_past_end(1, s.level, s.refilled_at, $4, (s.n).policy, (s.n).ends_at, s.turns, (s.n).after)),
           duration(wait_past_end(null, s.level, s.refilled_at, $4, (s.n).policy, (s.n).ends_at, s.turns, (s.n).after)),
           ((s.n).policy).capacity, s.overridden, s.share
      from (select u.*, level_now(u.level, u.refilled_at, $4, (u.n).policy, u.turns) as level_now,
                   level_now(u.level, u.refilled_at, $4, (u.n).policy, u.turns) / greatest(((u.n).policy).full_level, 1) as share
              from (select u.*, turns_of((u.n).policy, $4) as turns
                      from (select p.name, b.key, b.level, b.refilled_at, o.key is not null as overridden,
                                   numbers_by(row(p.*)::ratelimit.policies, row(o.*)::ratelimit.overrides, $4) as n
                              from policies as p
                              join (table buckets union all table ephemeral_buckets) as b on b.policy_id = p.id
                              left join overrides as o on p.overridden and o.policy_id = p.id and o.key = b.key and (o.stays or o.expires_at > $4)
                             where ($1 is null or p.name = $1 collate "C")
                               and ($2 is null or b.key = $2 collate "C")
                            offset 0) as u
                    offset 0) as u
             order by share, u.name, u.key
             limit $3) as s
     order by s.share, s.name, s.key
  $sql$;
begin
  if pg_is_in_recovery() then
    perform refuse_ephemeral(p) from policies as p where p.name = of_policy collate "C";  -- raises 0A000
  end if;
  return query execute case when pg_is_in_recovery() then replace(v_rows, ' union all table ephemeral_buckets', '') else v_rows end
    using of_policy, of_key, at_most, clock();
end;
$$;
comment on function ratelimit.emptiest_buckets(text, text, integer) is
  'The buckets that have rows, the emptiest first, at most at_most of them.';

create or replace function ratelimit.refuse_ephemeral(policy ratelimit.policies)
  returns void language plpgsql stable
as $$
begin
  if not policy.durable then
    raise exception 'ephemeral buckets cannot be read on a standby'
      using errcode = '0A000',
            detail  = format('Policy %L is ephemeral. This server is a standby.', policy.name),
            hint    = 'Ask the primary.';
  end if;
end;
$$;
comment on function ratelimit.refuse_ephemeral(ratelimit.policies) is
  'Raises 0A000 for an ephemeral policy; the server is a standby.';

create or replace function ratelimit_status(policy text default null, max_rows integer default 100, key text default null)
  returns table (policy text, key text, remaining bigint, retry_after interval, reset_after interval, capacity bigint, overridden boolean)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, $3, $2);
  select s.policy, s.key, s.remaining, s.retry_after, s.reset_after, s.capacity, s.overridden
    from (select * from emptiest_buckets($1, $3, $2)
          union all
          select * from fullest_slots($1, $3, $2)) as s
   order by s.share, s.policy collate "C", s.key collate "C"
   limit $2
$$;
comment on function ratelimit_status(text, integer, text) is
'Lists the buckets that have rows, the emptiest first by the share of the capacity that a bucket holds, and among them the keys of
  which slots are held.
A bucket without a row is full. The call reads every bucket, or every bucket of the policy or the key. On a standby it
  lists durable policies only.
policy: null lists the buckets of all policies.
max_rows: 1 or more.
key: null lists all keys.
remaining: tokens, or the slots that nobody holds.
retry_after: the time until the bucket holds 1 token, or 1 slot is free; null for never.
overridden: whether the key has an override.
Errors: 22023 for a bad argument, RL001 for an unknown policy, 0A000 for an ephemeral policy on a standby.
Locks: nothing.
Writes: nothing.
Role: monitoring.';

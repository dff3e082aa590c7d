-- Lists the buckets that have rows, the emptiest first: by the share of their capacity that they hold. retry_after is the
-- time until the bucket holds a token. overridden tells that the key has numbers of its own. Buckets without a row are full.
--
-- It reads every bucket, of one policy if given.
-- Locks:  nothing.
-- Writes: nothing.
create or replace function ratelimit_status(policy text default null, max_rows integer default 100)
  returns table (policy text, key text, remaining bigint, retry_after interval, reset_after interval, capacity bigint, overridden boolean)
  language sql
  stable
  security definer
  set search_path = ratelimit, pg_temp
as $$
  select check_listing($1, null, $2);
  select s.name, s.key, whole_tokens(s.level_now),
         duration(case when s.capacity > 0 then {{ template "wait_for" (dict "target" "microtokens(1)" "bucket" "s." "policy" "s.") }} end),
         duration({{ template "wait_for" (dict "target" "s.full_level" "bucket" "s." "policy" "s.") }}),
         s.capacity, s.overridden
    from (select u.*, {{ template "refilled_level" (dict "bucket" "u." "policy" "u.") }} as level_now
            from (select p.name, b.key, b.level, b.refilled_at, c.v_now, o.key is not null as overridden
                         {{- template "include/numbers.sql" }}
                    from policies as p
                    join (table buckets union all table ephemeral_buckets) as b on b.policy_id = p.id
                   cross join (select clock() as v_now offset 0) as c
                    left join overrides as o on p.overridden and o.policy_id = p.id and o.key = b.key and o.expires_at > c.v_now
                   where $1 is null or p.name = $1 collate "C"
                  offset 0) as u
           order by {{ template "refilled_level" (dict "bucket" "u." "policy" "u.") }} / greatest(u.full_level, 1), u.name, u.key
           limit $2) as s
   order by s.level_now / greatest(s.full_level, 1), s.name, s.key
$$;
comment on function ratelimit_status(text, integer) is
  'List the buckets that have rows, the emptiest first, at most max_rows of them; reads every bucket.';

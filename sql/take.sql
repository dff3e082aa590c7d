-- The fast path of requests about many buckets. take charges them in one lean statement, and does not look first.
-- What it does not charge is left to decide_in_order. covers is the look before, for requests of several elements,
-- which are granted only if every bucket covers.
--
-- Elements for the same bucket are summed beforehand. take charges a bucket that covers the sum, and so grants all its
-- elements. It leaves alone a bucket that covers less, one without a row, one with an element that is not about 1 to
-- 2147483647 tokens, and one that another session changed while the statement waited for it. (Some minor releases of
-- PostgreSQL charge the changed row, if it still covers the sum.)
--
-- take is for one policy without overrides and with small numbers (arithmetic.sql), which are locals. take_of_policies is
-- for any policies, whose numbers are columns, and costs more for a bucket.
--
-- Locks:  take locks the bucket rows that it charges, in the order of policy and key, durable ones first. The order does not
--         depend on a choice of the planner: a row found by ctid is read on the inside of a nested loop, and the outside
--         comes sorted. lock_buckets locks in the same order. covers locks nothing.
-- Writes: take writes these rows.
{{- /* What is asked of each bucket, in the order of policy and key, with the policy's numbers, or those of the override. places
       are the positions of the elements. twice tells whether a request names the bucket twice. */ -}}
{{ define "sums" -}}
select s.*, p.id as policy_id, p.durable, p.shadow, p.remember_us
                     {{- template "include/numbers.sql" }}
                from (select e.policy, e.key, {{ template "total" }} as total, array_agg(e.place) as places,
                             bool_or(e.twice) as twice
                        from (select u.policy collate "C" as policy, u.key collate "C" as key, u.cost, u.place,
                                     {{ template "tokens" }} as tokens,
                                     u.request = lag(u.request) over (partition by u.policy collate "C", u.key collate "C" order by u.place) as twice
                                from unnest(policies, keys, costs, requests) with ordinality as u (policy, key, cost, request, place)) as e
                       group by e.policy, e.key
                      having {{ template "askable" }}) as s
                join policies as p on p.name = s.policy
                left join lateral (select o.* from overrides as o where o.policy_id = p.id and o.key = s.key offset 0) as o
                  on p.overridden and o.expires_at > v_now
               order by s.policy, s.key
              offset 0
{{- end }}
{{ define "tokens" }}greatest(0, least(u.cost, 2147483647))::integer{{ end }}{{/* the sum of bigints would be numeric */}}
{{ define "total" }}least(sum(e.tokens), 9000000000001){{ end }}{{/* above every capacity, and in microtokens a bigint */}}
{{ define "askable" }}bool_and((e.cost between 1 and 2147483647) is true){{ end }}
{{- /* Whether bucket b covers the total of u. Most do by their stored level, which is cheaper to tell. */ -}}
{{ define "covers" -}}
(least(b.level, u.capacity * 1000000) >= microtokens(u.total)
           or {{ template "refilled_level" (dict "bucket" "b." "policy" "u.") }} >= microtokens(u.total))
{{- end }}
-- The policy has no overrides. places is empty if its numbers are not small, as arithmetic.sql has it, and null if no bucket
-- was charged.
create or replace function ratelimit.take(
    in  policy ratelimit.policies, in keys text[], in costs bigint[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[])
  language plpgsql
  volatile
as $$
{{- /* Charges the buckets in the order of key, and answers those of one element. u.places are the positions of the elements,
       and u.wanted is what they ask for together. Most buckets cover it by their stored level, which is cheaper to tell.
       The argument is the name of the table. */ -}}
{{ define "take" -}}
with taken as (
      update {{ . }} as b
         set level       = {{ template "refilled_level_small" (dict "bucket" "b.") }} - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, v_tick)
        from (select e.key, {{ template "total" }} * 1000000 as wanted, array_agg(e.place) as places, count(*) as size
                from (select u.key collate "C" as key, u.cost, u.place,
                             {{ template "tokens" }} as tokens
                        from unnest(keys, costs) with ordinality as u (key, cost, place)
                       order by u.key collate "C", u.place) as e
               group by e.key
              having {{ template "askable" }}
               order by e.key) as u
       where b.ctid = (select b.ctid
                         from {{ . }} as b
                        {{ template "include/newest.sql" (dict "key" "u.key") }})
         and (least(b.level, v_full_level) >= u.wanted
           or b.level > -v_full_level and {{ template "refilled_level_small" (dict "bucket" "b.") }} >= u.wanted)
      returning u.places, u.size, u.wanted, b.level, b.refilled_at
    )
    select array_agg(t.places[1]) filter (where t.size = 1), array_agg(t.level / 1000000) filter (where t.size = 1),
           array_agg({{ template "wait_below_small" (dict "target" "v_full_level" "level" "t.level"
             "elapsed_us" "case when t.refilled_at = v_now then 0 else microseconds(v_now - t.refilled_at)::bigint end") }})
             filter (where t.size = 1),
           array_agg(row(t.places, t.wanted, t.level, t.refilled_at)::charged) filter (where t.size > 1)
      into places, remaining, reset_us, v_shared
      from taken as t
{{- end }}
declare
  v_policy     alias for take.policy;
  v_now        alias for take.now;
  v_tick       interval := policy.tick;
  v_tick_us    bigint   := policy.tick_us::bigint;
  v_full_level bigint   := policy.full_level::bigint;
  v_divisor    numeric  := gcd(policy.tick_gain, policy.every_us);
  v_gain       bigint   := div(policy.tick_gain, v_divisor)::bigint;
  v_per        bigint   := div(policy.every_us, v_divisor)::bigint;
  v_fill_ticks double precision := policy.full_level::double precision * v_per / nullif(v_gain, 0);
  v_ticks      bigint;
  v_shared     ratelimit.charged[];  -- buckets of several elements
  v_bucket     ratelimit.charged;
  v_place      bigint;
  v_level      bigint;    -- the bucket after the element
  v_refilled_at timestamptz;
  v_elapsed_us bigint;
begin
  if (policy.full_level::double precision * (2 * v_per + 1) + v_gain < 9e18 and (v_fill_ticks + 1) * v_tick_us < 4.7e14) is false then
    places := '{}';
    return;
  end if;
  v_ticks := floor(2 * v_fill_ticks + 1)::bigint;
  if policy.durable then
    {{ template "take" "buckets" }};
  else
    {{ template "take" "ephemeral_buckets" }};
  end if;
  if v_shared is not null then
    foreach v_bucket in array v_shared loop
      v_level       := v_bucket.level + v_bucket.wanted;
      v_refilled_at := v_bucket.refilled_at;
      v_elapsed_us  := microseconds(v_now - v_refilled_at)::bigint;
      foreach v_place in array v_bucket.places loop
        v_level   := v_level - microtokens(costs[v_place]);
        places    := places || v_place;
        remaining := remaining || v_level / 1000000;
        reset_us  := reset_us || {{ template "wait_below_small" (dict "target" "v_full_level" "level" "v_level" "elapsed_us" "v_elapsed_us") }};
      end loop;
    end loop;
  end if;
end;
$$;
comment on function ratelimit.take(ratelimit.policies, text[], bigint[], timestamptz) is
  'Charges the buckets of one policy that cover all that is asked of them, and answers their elements.';

-- For requests of several elements, of which others may be waiting for the same bucket: take_of_policies would not charge
-- a bucket that it waited for. This waits first, and take_of_policies no longer needs to. It answers with the ids of the
-- policies whose buckets it locked, or with null if a bucket has no row: if one was created later, it would be out of order.
create or replace function ratelimit.lock_buckets(policies text[], keys text[], ephemeral boolean)
  returns bigint[]
  language plpgsql
  volatile
as $$
{{- /* The arguments are the name of the table, and which policies have their buckets there. */ -}}
{{ define "lock_buckets_of_policies" -}}
select case when bool_and(b.locked is true) then array_agg(distinct u.policy_id) end
            into v_ids
            from (select p.id as policy_id, s.key
                    from (select distinct u.policy collate "C" as policy, u.key collate "C" as key
                            from unnest(policies, keys) as u (policy, key)) as s
                    join policies as p on p.name = s.policy
                   where {{ .kind }}
                   order by s.policy, s.key
                  offset 0) as u
            left join lateral (select true as locked
                                 from {{ .buckets }} as b
                                {{ template "include/newest.sql" (dict "policy_id" "u.policy_id" "key" "u.key") }}
                                  for update) as b on true;
{{- end }}
declare
  v_ids bigint[];
begin
  if ephemeral then
    {{ template "lock_buckets_of_policies" (dict "buckets" "ephemeral_buckets" "kind" "not p.durable") }}
  else
    {{ template "lock_buckets_of_policies" (dict "buckets" "buckets" "kind" "p.durable") }}
  end if;
  return v_ids;
end;
$$;
comment on function ratelimit.lock_buckets(text[], text[], boolean) is
  'Locks the buckets of the durable or of the ephemeral policies, in order.';

-- The answers are in the order of places, each with its policy as it was then. locked is null, or has the ids of the
-- policies whose buckets are locked.
create or replace function ratelimit.take_of_policies(
    in  policies text[], in keys text[], in costs bigint[], in requests bigint[], in ephemeral boolean, in locked bigint[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[], out shadows boolean[],
    out policy_ids bigint[], out remember_us bigint[])
  language plpgsql
  volatile
as $$
{{- /* The arguments are the name of the table, and which policies have their buckets there. */ -}}
{{ define "take_of_policies" -}}
with taken as (
      update {{ .buckets }} as b
         set level       = {{ template "refilled_level" (dict "bucket" "b." "policy" "u.") }} - microtokens(u.total),
             refilled_at = refilled_until(b.refilled_at, v_now, u.tick)
        from ({{ template "sums" }}) as u
       where {{ .durable }}
         and b.ctid = (select b.ctid
                         from {{ .buckets }} as b
                        {{ template "include/newest.sql" (dict "policy_id" "u.policy_id" "key" "u.key") }})
         and {{ template "covers" }}
      returning u.*, b.level, b.refilled_at
    ), granted as (  -- one row for each element of the buckets that were charged
      select t.places[1] as place, t.level, t.refilled_at, t.capacity, t.shadow, t.policy_id, t.remember_us, t.every_us, t.tick_us, t.full_level, t.tick_gain, t.round_up
        from taken as t
       where cardinality(t.places) = 1
      union all
      select e.place, e.level + microtokens(e.total - sum(e.cost) over (partition by e.bucket order by e.request)), e.refilled_at,
             e.capacity, e.shadow, e.policy_id, e.remember_us, e.every_us, e.tick_us, e.full_level, e.tick_gain, e.round_up
        from (select u.place, costs[u.place]::integer as cost, coalesce(requests[u.place], u.place) as request,
                     t.places[1] as bucket, t.level, t.total, t.refilled_at, t.capacity, t.shadow, t.policy_id, t.remember_us, t.every_us, t.tick_us, t.full_level, t.tick_gain, t.round_up
                from taken as t
               cross join lateral unnest(t.places) as u (place)
               where cardinality(t.places) > 1) as e
    )
    select array_agg(g.place), array_agg(whole_tokens(g.level)),
           array_agg({{ template "wait_below" (dict "target" "g.full_level" "level" "g.level" "policy" "g."
             "elapsed_us" "case when g.refilled_at = v_now then 0 else microseconds(v_now - g.refilled_at) end") }}),
           array_agg(g.capacity), array_agg(g.shadow), array_agg(g.policy_id), array_agg(g.remember_us)
      into places, remaining, reset_us, capacities, shadows, policy_ids, remember_us
      from (select * from granted order by place) as g
{{- end }}
declare
  v_now alias for take_of_policies.now;
begin
  if ephemeral then
    {{ template "take_of_policies" (dict "buckets" "ephemeral_buckets" "durable" "not u.durable and (u.policy_id = any (locked)) is not false") }};
  else
    {{ template "take_of_policies" (dict "buckets" "buckets" "durable" "u.durable and (u.policy_id = any (locked)) is not false") }};
  end if;
end;
$$;
comment on function ratelimit.take_of_policies(text[], text[], bigint[], bigint[], boolean, bigint[], timestamptz) is
  'Charges the buckets that cover all that is asked of them: of the durable or of the ephemeral policies.';

-- covered is false, too, if a request names a bucket twice: decide_in_order answers both elements with the sum. durable
-- and ephemeral tell which policies there are.
create or replace function ratelimit.covers(
    in  policies text[], in keys text[], in costs bigint[], in requests bigint[], in now timestamptz,
    out covered boolean, out durable boolean, out ephemeral boolean)
  language plpgsql
  stable
as $$
declare
  v_now alias for covers.now;
begin
  select sum(cardinality(u.places)) = cardinality(keys) and bool_and(u.twice is not true and (d.covers or e.covers) is true),
         coalesce(bool_or(u.durable), false), coalesce(bool_or(not u.durable), false)
    into covered, durable, ephemeral
    from ({{ template "sums" }}) as u
    left join lateral (select {{ template "covers" }} as covers
                         from buckets as b
                        {{ template "include/newest.sql" (dict "policy_id" "u.policy_id" "key" "u.key") }}) as d on u.durable
    left join lateral (select {{ template "covers" }} as covers
                         from ephemeral_buckets as b
                        {{ template "include/newest.sql" (dict "policy_id" "u.policy_id" "key" "u.key") }}) as e on not u.durable;
end;
$$;
comment on function ratelimit.covers(text[], text[], bigint[], bigint[], timestamptz) is
  'Whether every bucket covers all that is asked of it.';

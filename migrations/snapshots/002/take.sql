-- The fast path of requests about many buckets. take charges them in one lean statement, and does not look first.
-- What it does not charge is left to decide_in_order. look is for requests of several elements, which are granted only if
-- every bucket covers what is charged to it.
--
-- Each function is about one policy. Elements for the same bucket are summed beforehand: asked has what they ask of each
-- bucket, in the order of key. take charges a bucket that covers the sum, and so grants all its elements. It leaves alone a
-- bucket that covers less, one without a row, one with an element that is not about 1 to 2147483647 tokens, and one that
-- another session changed while the statement waited for it. (Some minor releases of PostgreSQL charge the changed row, if
-- it still covers the sum.)
--
-- row_ids is parallel to asked, and has the row ids of the buckets if the caller knows them. A bucket that was changed since
-- is left alone, too. By now its row id may be that of another bucket, so the policy and the key are compared.
--
-- Locks:  take and take_any lock the bucket rows that they charge, in the order of key. The order does not depend on a
--         choice of the planner: a row found by ctid is read on the inside of a nested loop, and the outside comes sorted.
--         lock_buckets locks in the same order. look locks nothing.
-- Writes: take and take_any write these rows.
{{- /* What is asked of each bucket: the rows of asked, in order. size is the number of elements, and places are their positions
       in the batch. wanted, in microtokens, is what they ask for together. The argument is a list of the columns that name a
       bucket: key, or policy and key. */ -}}
{{ define "asked" -}}
select {{ range . }}e.{{ . }}, {{ end }}least(sum(e.cost), 9000000000001) * 1000000 as wanted,{{/* above every capacity, and a bigint */}}
                     array_agg(e.place) as places, count(*) as size
                from (select {{ range . }}u.{{ . }} collate "C" as {{ . }}, {{ end }}u.place,
                             case when u.cost between 1 and 2147483647 then u.cost::integer end as cost{{/* the sum of bigints would be numeric */}}
                        from unnest({{ if has "policy" . }}policies, {{ end }}keys, costs)
                             with ordinality as u ({{ range . }}{{ . }}, {{ end }}cost, place)
                       order by {{ range . }}u.{{ . }} collate "C", {{ end }}u.place) as e
               group by e.{{ join ", e." . }}
              having count(e.cost) = count(*)
               order by e.{{ join ", e." . }}
{{- end }}
{{- /* The row id of bucket b. The argument is the name of the table. */ -}}
{{ define "newest_row" -}}
(select b.ctid
                         from {{ . }} as b
                        {{ template "include/newest.sql" (dict "key" "u.key") }})
{{- end }}
{{- /* Whether bucket b covers u.wanted. Most do by their stored level, which is cheaper to tell. The argument is the prefix of the
       policy's columns. */ -}}
{{ define "covers" -}}
(least(b.level, {{ . }}capacity * 1000000) >= u.wanted
           or {{ template "refilled_level" (dict "bucket" "b." "policy" .) }} >= u.wanted)
{{- end }}
{{- /* The policy with the numbers that apply to bucket u of a policy with overrides. */ -}}
{{ define "overridden" -}}
coalesce((select overridden(v_policy, o) from overrides as o
                                   where o.policy_id = v_policy.id and o.key = u.key collate "C" and o.expires_at > v_now), v_policy)
{{- end }}

-- Without asked, all elements of the batch are about this policy. Then the update sums them, which costs less than to pass
-- sums. places is null if no bucket was charged, and capacities if all buckets have that of the policy. take_any takes over if
-- the policy has overrides, or if its numbers are not small, as arithmetic.sql has it.
create or replace function ratelimit.take(
    in  policy ratelimit.policies, in keys text[], in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql
  volatile
as $$
{{- /* Charges the buckets, and answers those of one element. The arguments are the name of the table, and whether the sums are
       in asked. */ -}}
{{ define "take" -}}
with taken as (
      update {{ .buckets }} as b
         set level       = {{ template "refilled_level_small" (dict "bucket" "b.") }} - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, v_tick),
             room        = null
        from {{ if .asked -}} unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
       where b.ctid = coalesce(u.row_id, {{ template "newest_row" .buckets }})
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
{{- else -}} ({{ template "asked" (list "key") }}) as u
       where b.ctid = {{ template "newest_row" .buckets }}
{{- end }}
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
  if policy.overridden
     or (policy.full_level::double precision * (2 * v_per + 1) + v_gain < 9e18 and (v_fill_ticks + 1) * v_tick_us < 4.7e14) is false then
    if asked is null then
      asked := array(select row(u.*)::asked from ({{ template "asked" (list "key") }}) as u);
    end if;
    select t.* into places, remaining, reset_us, capacities from take_any(policy, costs, asked, row_ids, v_now) as t;
    return;
  end if;
  v_ticks := floor(2 * v_fill_ticks + 1)::bigint;
  if policy.durable and asked is null then
    {{ template "take" (dict "buckets" "buckets" "asked" false) }};
  elsif policy.durable then
    {{ template "take" (dict "buckets" "buckets" "asked" true) }};
  elsif asked is null then
    {{ template "take" (dict "buckets" "ephemeral_buckets" "asked" false) }};
  else
    {{ template "take" (dict "buckets" "ephemeral_buckets" "asked" true) }};
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
comment on function ratelimit.take(ratelimit.policies, text[], bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Charges the buckets of one policy that cover all that is asked of them, and answers their elements.';

-- As take, whatever the numbers of the policy and its overrides are; it costs more for a bucket. Nothing is charged if the
-- policy has changed since it was read: it and its overrides, which this reads, are as of one instant.
create or replace function ratelimit.take_any(
    in  policy ratelimit.policies, in costs bigint[], in asked ratelimit.asked[], in row_ids tid[], in now timestamptz,
    out places bigint[], out remaining bigint[], out reset_us bigint[], out capacities bigint[])
  language plpgsql
  volatile
as $$
{{- /* The argument is the name of the table. */ -}}
{{ define "take_any" -}}
with taken as (
      update {{ . }} as b
         set level       = {{ template "refilled_level" (dict "bucket" "b." "policy" "(u.p).") }} - u.wanted,
             refilled_at = refilled_until(b.refilled_at, v_now, (u.p).tick),
             room        = null
        from (select u.*, {{ template "overridden" }} as p
                from unnest(asked, row_ids) as u (key, wanted, places, size, row_id)
               where (select p = v_policy from policies as p where p.id = v_policy.id)
              offset 0) as u
       where b.ctid = coalesce(u.row_id, {{ template "newest_row" . }})
         and v_policy.id is not distinct from b.policy_id and u.key is not distinct from b.key  -- with =, the planner might use the index
         and {{ template "covers" "(u.p)." }}
      returning u.*, b.level, b.refilled_at
    )
    select array_agg(u.place), array_agg(whole_tokens(u.level)),
           array_agg({{ template "wait_below" (dict "target" "(u.p).full_level" "level" "u.level" "elapsed_us" "microseconds(v_now - u.refilled_at)" "policy" "(u.p).") }}),
           array_agg((u.p).capacity)
      into places, remaining, reset_us, capacities
      from (select e.place, t.p, t.refilled_at,
                   t.level + t.wanted - microtokens(sum(costs[e.place]::integer) over (partition by t.places[1] order by e.place)) as level
              from taken as t
             cross join lateral unnest(t.places) as e (place)) as u
{{- end }}
declare
  v_policy alias for take_any.policy;
  v_now    alias for take_any.now;
begin
  if policy.durable then
    {{ template "take_any" "buckets" }};
  else
    {{ template "take_any" "ephemeral_buckets" }};
  end if;
end;
$$;
comment on function ratelimit.take_any(ratelimit.policies, bigint[], ratelimit.asked[], tid[], timestamptz) is
  'Does what take does, for a policy with overrides or large numbers.';

-- row_ids is null if a bucket does not cover what is asked of it. contended is a guess: another session changes or locks a
-- bucket. Its transaction is in xmax, which says nothing if it has been rolled back, or if it is in xmin, too: then it locked
-- the bucket, wrote it, and has committed.
create or replace function ratelimit.look(
    in  policy ratelimit.policies, in asked ratelimit.asked[], in now timestamptz,
    out row_ids tid[], out contended boolean)
  language plpgsql
  stable
as $$
{{- /* The arguments are the name of the table, and whether the policy has overrides. */ -}}
{{ define "look" -}}
select case when bool_and(b.covers is true) then array_agg(b.ctid) end, bool_or(b.contended)
      into row_ids, contended
      from {{ if .overridden -}}
(select u.*, {{ template "overridden" }} as p from unnest(asked) as u (key, wanted, places, size) offset 0) as u
{{- else -}}
unnest(asked) as u (key, wanted, places, size)
{{- end }}
      left join lateral (select b.ctid, b.xmax <> 0 and b.xmax <> b.xmin as contended, {{ template "covers" (ternary "(u.p)." "v_policy." .overridden) }} as covers
                           from {{ .buckets }} as b
                          {{ template "include/newest.sql" (dict "key" "u.key") }}) as b on true;
{{- end }}
declare
  v_policy alias for look.policy;
  v_now    alias for look.now;
begin
  if policy.durable and policy.overridden then
    {{ template "look" (dict "buckets" "buckets" "overridden" true) }}
  elsif policy.durable then
    {{ template "look" (dict "buckets" "buckets" "overridden" false) }}
  elsif policy.overridden then
    {{ template "look" (dict "buckets" "ephemeral_buckets" "overridden" true) }}
  else
    {{ template "look" (dict "buckets" "ephemeral_buckets" "overridden" false) }}
  end if;
end;
$$;
comment on function ratelimit.look(ratelimit.policies, ratelimit.asked[], timestamptz) is
  'The row ids of the buckets of one policy if all cover what is asked of them, and whether other sessions are at them.';

-- For requests of several elements, of which others may be waiting for the same bucket: take would not charge a bucket that
-- it waited for. This waits first, and take no longer needs to. The answer is null if a bucket has no row: if one was created
-- later, it would be out of order.
create or replace function ratelimit.lock_buckets(policy ratelimit.policies, asked ratelimit.asked[])
  returns tid[]
  language plpgsql
  volatile
as $$
{{- /* The argument is the name of the table. */ -}}
{{ define "lock_asked" -}}
select case when bool_and(b.ctid is not null) then array_agg(b.ctid) end
      into v_row_ids
      from unnest(asked) as u (key, wanted, places, size)
      left join lateral (select b.ctid
                           from {{ . }} as b
                          {{ template "include/newest.sql" (dict "key" "u.key") }}
                            for update) as b on true;
{{- end }}
declare
  v_policy  alias for lock_buckets.policy;
  v_row_ids tid[];
begin
  if policy.durable then
    {{ template "lock_asked" "buckets" }}
  else
    {{ template "lock_asked" "ephemeral_buckets" }}
  end if;
  return v_row_ids;
end;
$$;
comment on function ratelimit.lock_buckets(ratelimit.policies, ratelimit.asked[]) is
  'Locks the buckets of one policy, in order, and answers with their row ids.';

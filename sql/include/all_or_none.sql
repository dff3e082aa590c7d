{{- /* Fast path of acquire_in_order. Each bucket must either cover all its requests or fail even its cheapest one.
       It returns a row for each request, or no row; v_answered tells which. Without rows the caller rolls back. That is
       so if
         - a bucket has no row, or covers only some of its requests,
         - another session changed or removed a granting bucket since the snapshot (denied buckets are neither locked
           nor checked again),
         - the idempotency key of a granted request is live or not valid (an expired one is overwritten),
         - the idempotency key of a denied request is live or not valid,
         - the updates ended at v_stale_at or later, because they waited for a bucket.
       Two granted requests on one bucket under one idempotency key raise cardinality_violation, and the caller rolls
       back, too.

       The steps of the statement:
         found       a row for each bucket, in the order of key: its requests, their total cost, the cheapest of them, the
                     running totals, and the bucket's row as the snapshot has it. The running totals run over the whole
                     batch, not from 0 for each bucket: only their differences within a bucket are used. array_agg
                     keeps the order of its input, which the window function has sorted
         clear       one row if every bucket exists and covers all its requests or none; else no row, and nothing is taken
         taken       locks and updates the buckets that cover all, in the order of found. ctid finds the row version that
                     was read without another look into the index. xmin is compared, too: after a wait for the row, not
                     every minor release of PostgreSQL compares ctid again, and a newer version differs in xmin
         granted     a row for each granted request, with the level that it left
         denied      a row for each denied request
         remembered  a row for each idempotency key stored; a live one is left out

       Levels are compared with costs as level / 1000000: the costs in microtokens might exceed bigint, and a numeric
       product is dearer than this quotient. Every cost is 1 or more here, so it does not matter that the quotient of a
       level below zero is rounded towards zero.

       The scalar subqueries of the last WHERE are evaluated after all updates and all inserts of idempotency keys. Only
       then do the rows come out. That matters because rows that RETURN QUERY has taken are not taken back when a later
       error rolls the statement back.

       offset 0 keeps a subquery apart. Its computed columns are then columns to the query around it, as inlining of
       arithmetic.sql needs. In the lookup of denied idempotency keys, it makes the planner look up one key at a time.

       The arguments buckets and keys are the names of the tables. keys is empty when no request has an idempotency key. */ -}}
{{ if .keys }}v_expires_at := v_now + duration(v_policy.remember_us);
        {{ end }}return query
      with found as materialized (
        select w.*, b.row_id, b.version, b.level, b.refilled_at,
               {{ template "refilled_level" (dict "bucket" "b.") }} as level_now
          from (select a.key, sum(a.cost) as total, min(a.cost) as cheapest,
                       array_agg(a.request) as requests, array_agg(a.total) as totals
                  from (select u.key collate "C" as key, u.cost::integer as cost, u.request,
                               sum(u.cost::integer)  -- of integers: the sum of bigints would be numeric
                                 over (order by u.key collate "C", u.request rows unbounded preceding) as total
                          from unnest(keys, costs) with ordinality as u (key, cost, request)) as a
                 group by a.key
                 order by a.key) as w
         cross join lateral (select b.ctid as row_id, b.xmin as version, b.level, b.refilled_at
                               from {{ .buckets }} as b
                              {{ template "include/newest.sql" (dict "policy_id" "v_policy.id" "key" "w.key") }}) as b
      ), clear as materialized (
        select count(*) filter (where f.level_now / 1000000 >= f.total) as granting
          from found as f
        having sum(cardinality(f.requests)) = cardinality(keys)
           and bool_and(f.level_now / 1000000 >= f.total or f.level_now / 1000000 < f.cheapest)
      ), taken as (
        update {{ .buckets }} as b
           set level       = f.level_now - microtokens(f.total),
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick)
          from found as f
         where f.level_now / 1000000 >= f.total
           and exists (select from clear)
           and b.ctid = f.row_id
           and b.xmin = f.version
        returning f.requests, f.totals, b.level, b.refilled_at
      ), granted as (
        select g.request, g.level,
               {{ template "wait_below" (dict "target" "v_policy.full_level" "level" "g.level" "elapsed_us" "microseconds(v_now - g.refilled_at)") }} as reset_us
          from (select r.request, r.level + microtokens(r.last - r.total) as level, r.refilled_at
                  from (select unnest(t.requests) as request, unnest(t.totals) as total,
                               t.totals[cardinality(t.totals)] as last, t.level, t.refilled_at
                          from taken as t) as r
                offset 0) as g
      ), denied as (
        select d.request, d.level_now as level,
               case
                 when d.cost <= v_policy.capacity then {{ template "wait_for" (dict "target" "microtokens(d.cost)" "bucket" "d.") }}
               end as retry_us,
               {{ template "wait_for" (dict "target" "v_policy.full_level" "bucket" "d.") }} as reset_us
          from (select r.request, costs[r.request] as cost, r.level, r.refilled_at, r.level_now
                  from (select unnest(f.requests) as request, f.level, f.refilled_at, f.level_now
                          from found as f
                         where f.level_now / 1000000 < f.cheapest
                           and exists (select from clear)) as r
                offset 0) as d
      ){{ if .keys }}, remembered as (
        insert into {{ .keys }} as k
               (policy_id, key, idempotency_key, cost, remaining, reset_after, capacity, expires_at)
        select v_policy.id, keys[g.request], idempotency_keys[g.request], costs[g.request],
               whole_tokens(g.level), duration(g.reset_us), v_policy.capacity, v_expires_at
          from granted as g
         where is_name(idempotency_keys[g.request])
        {{ template "include/remember.sql" . }}
        returning 1
      ){{ end }}
      select requests[a.request], a.allowed, whole_tokens(a.level), duration(a.retry_us), duration(a.reset_us),
             v_policy.capacity, false, null::text, null::text, null::text, null::text
        from (select g.request, true as allowed, g.level, 0::bigint as retry_us, g.reset_us
                from granted as g
              union all
              select d.request, false, d.level, d.retry_us, d.reset_us
                from denied as d
              offset 0) as a
       where (select count(*) = (select c.granting from clear as c) and clock() < v_stale_at from taken)
         {{- if .keys }}
         and (select count(idempotency_keys[g.request]) from granted as g) = (select count(*) from remembered)
         and not exists (select from denied as d
                          where not is_name(idempotency_keys[d.request]))
         and not exists (select from denied as d
                          cross join lateral (select k.expires_at
                                                from {{ .keys }} as k
                                               where k.policy_id       = v_policy.id
                                                 and k.key             = keys[d.request] collate "C"
                                                 and k.idempotency_key = idempotency_keys[d.request] collate "C"
                                              offset 0) as k
                          where k.expires_at > v_now)
         {{- end }};
      v_answered := found;

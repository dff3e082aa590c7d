-- Takes from several buckets if every one covers what is charged to it, and otherwise from none.
--
-- decisions[n] is the answer about the bucket of element n, for all that this request charges to it: allowed and
-- retry_after as if that bucket were asked alone, remaining and reset_after as they are after the whole request.
-- retry_after is the longest of them. binding is the element that decides: of a denial the one with the longest wait, of a
-- grant the one that covers the fewest repeats of its charge. remaining, reset_after and capacity are those of binding.
-- Buckets of shadow policies count for retry_after and binding only if there are no others.
--
-- A bucket that remembers the idempotency key answers as it did, and is not charged again; the others are asked. replayed
-- is true if the request is granted, a bucket remembers the key, and nothing was charged; and if it is denied only because a
-- grant of ratelimit_reserve has still to wait.
--
-- policies, keys and costs have one element for each bucket, 1000 at most. A bucket may be named twice. Without costs
-- every cost is 1. An element of cost 0 looks at its bucket.
--
-- The steps, for a request without an idempotency key whose buckets have rows:
--   1. One statement reads all buckets, durable ones first, in the order of policy and key. It works out what a grant would
--      leave in each that covers by its stored level. Mostly all do, and none is named twice.
--   2. Then one update for each table charges the buckets that still are as they were read. A bucket that another session has
--      changed is charged by its present level. If the update waited for it, it holds the lock; if not, nothing waits for
--      the lock, because that would be out of order.
--   3. Otherwise each bucket is read again with all that an answer needs. If one does not cover, the answer is the denial.
--      If all do, each is charged in the same order, if it still covers.
-- If a bucket no longer covers, all charges are rolled back; after step 2 step 3 follows.
-- acquire_batch decides what these steps do not: there it is a batch of one request.
--
-- Locks:  a grant holds its bucket rows and its idempotency keys until the caller's transaction ends. A denial holds none.
-- Writes: the same rows. A denial writes nothing.
create or replace function ratelimit_acquire_all(
    in  policies        text[],
    in  keys            text[],
    in  costs           bigint[] default null,
    in  idempotency_key text     default null,
    out allowed         boolean,
    out remaining       bigint,
    out retry_after     interval,
    out reset_after     interval,
    out capacity        bigint,
    out replayed        boolean,
    out shadowed        boolean,
    out binding         integer,
    out decisions       ratelimit.decision[])
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set plan_cache_mode = force_generic_plan  -- as in acquire_batch
  set enable_seqscan = off    -- likewise
  set enable_hashjoin = off   -- likewise
  set enable_mergejoin = off  -- likewise
  set enable_tidscan = on     -- likewise
  set jit = off               -- likewise
as $$
{{- /* The binding element has the least rank: the repeats of its charge, or the wait below zero. Those of shadows are above all others,
       also with a debt of 9000000000000 tokens. The argument is the prefix of the policy's columns. */ -}}
{{ define "rank_of_shadow" }}{{ . }}shadow::integer * 20000000000000{{ end }}
{{ define "binds" }}v_least is null or {{ .rank }} < v_least or {{ .rank }} = v_least and {{ .element }} < binding{{ end }}
{{- /* The row of element u.n of policy p in one table. The arguments are its name, and which policies have their buckets there. */ -}}
{{ define "row_of" -}}
select b.ctid as row_id, b.level, b.refilled_at
                                          from {{ .buckets }} as b
                                         where {{ .kind }} and b.policy_id = p.id and b.key = keys[u.n] collate "C"
{{- end }}
{{- /* Step 2 for one table. The arguments are its name, and which policies have their buckets there. */ -}}
{{ define "charge_as_read" -}}
for v_taken in
          update {{ .buckets }} as b
             set level = r.level_after, refilled_at = r.refilled_until
            from unnest(v_readings) as r
           where {{ .kind }} and b.ctid = r.row_id and b.level = r.level and b.refilled_at = r.refilled_at
          returning r.element, r.decision, r.rank
        loop
          v_charged                  := v_charged + 1;
          decisions[v_taken.element] := v_taken.decision;
          if {{ template "binds" (dict "rank" "v_taken.rank" "element" "v_taken.element") }} then
            v_least := v_taken.rank;
            binding := v_taken.element;
          end if;
        end loop
{{- end }}
{{ define "charge_in" -}}
{{ if .at_once -}}
perform from {{ .buckets }} as b where b.policy_id = v_policy.id and b.key = v_key for no key update skip locked;
            if not found then
              raise exception sqlstate 'RL00T';
            end if;
            {{ end -}}
{{ template "include/charge.sql" . }}
{{- end }}
{{- /* Charges element v_n to its bucket, of v_policy, if that covers it. The argument at_once tells not to wait for its lock. */ -}}
{{ define "charge_if_covered" -}}
v_key    := keys[v_n];
          v_wanted := microtokens(v_costs[v_n]);
          if v_policy.durable then
            {{ template "charge_in" (dict "buckets" "buckets" "at_once" .at_once) }}
          else
            {{ template "charge_in" (dict "buckets" "ephemeral_buckets" "at_once" .at_once) }}
          end if;
          if not found then
            raise exception sqlstate 'RL00T';  -- rolls back to the last begin; caught below, so no caller sees it
          end if;
          v_reset_us     := {{ template "wait_below" (dict "target" "v_policy.full_level" "level" "v_level" "elapsed_us" "microseconds(v_now - v_refilled_at)") }};
          decisions[v_n] := grant_of(v_level, v_reset_us, v_policy.capacity);
{{- end }}
declare
  v_count       integer := cardinality(policies);
  v_costs       bigint[];
  v_simple      boolean;    -- the steps above decide the request
  v_enough      boolean;    -- the buckets cover by their stored levels, and none is named twice
  v_readings    reading[];  -- the elements in the order of policy and key
  v_reading     reading;
  v_charged     integer := 0;  -- elements that were charged to buckets as read
  v_taken       record;
  v_n           integer;
  v_policy      policies;
  v_override    overrides;
  v_key         text collate "C";
  v_cost        bigint;
  v_now         timestamptz;
  v_wanted      bigint;
  v_level       bigint;
  v_refilled_at timestamptz;
  v_retry_us    bigint;
  v_reset_us    bigint;
  v_has_row     boolean;
  v_rows        boolean := true;  -- the buckets that cover have rows
  v_retries_us  bigint[];   -- of step 3, by element
  v_rank        bigint;
  v_least       bigint;
  v_batch       packed;
begin
  if (v_count between 1 and 1000) is not true then
    perform check_length('policies', v_count, v_count);
    perform refuse('policies', v_count || ' elements long', 'Pass 1 to 1000 elements.');
  end if;
  v_costs  := case when costs is null then array_fill(1::bigint, array[v_count]) else costs end;
  v_simple := (cardinality(keys) = v_count and cardinality(v_costs) = v_count and idempotency_key is null) is true;
  if v_simple then
    v_now    := clock();
    allowed  := true;
    shadowed := false;
    -- A bucket that is named twice follows itself. That a row of the other table has the same id only makes it slower.
    select array_agg(e.reading), bool_and((e.reading).row_id is not null and e.again is not true) into v_readings, v_enough
      from (select e.reading, (e.reading).row_id = lag((e.reading).row_id) over in_order as again
              from generate_series(1, v_count) as u (n)
             cross join lateral (select row(u.n, p, p.durable, b.row_id, b.level, b.refilled_at, b.level_after, b.refilled_until,
                                            grant_of(b.level_after, b.reset_us, p.capacity),
                                            {{ template "rank_of_shadow" "p." }} + tokens_above_debt(b.level_after) / v_costs[u.n])::reading as reading
                                   from policies as p
                                   left join lateral (select b.*, {{ template "wait_below" (dict "target" "p.full_level" "level" "b.level_after" "policy" "p."
                                                               "elapsed_us" "case when b.refilled_until = v_now then 0 else microseconds(v_now - b.refilled_until) end") }} as reset_us
                                                        from (select b.*, {{ template "refilled_level" (dict "bucket" "b." "policy" "p.") }} - microtokens(v_costs[u.n]) as level_after,
                                                                     refilled_until(b.refilled_at, v_now, p.tick) as refilled_until
                                                                from ({{ template "row_of" (dict "buckets" "buckets" "kind" "p.durable") }}
                                                                      union all
                                                                      {{ template "row_of" (dict "buckets" "ephemeral_buckets" "kind" "not p.durable") }}) as b
                                                               where v_costs[u.n] > 0 and not p.overridden
                                                                 and least(b.level, p.capacity * 1000000) >= microtokens(least(v_costs[u.n], 9000000000001))
                                                              offset 0) as b
                                                      offset 0) as b on true
                                  where p.name = policies[u.n] collate "C"
                                 offset 0) as e
            window in_order as (order by (e.reading).durable desc, policies[u.n] collate "C", keys[u.n] collate "C")
             order by (e.reading).durable desc, policies[u.n] collate "C", keys[u.n] collate "C"
            offset 0) as e;
    v_simple := coalesce(cardinality(v_readings) = v_count, false);  -- all policies are known

    if v_simple and v_enough then
      begin
        {{ template "charge_as_read" (dict "buckets" "buckets" "kind" "r.durable") }};
        if v_charged < v_count then
          {{ template "charge_as_read" (dict "buckets" "ephemeral_buckets" "kind" "not r.durable") }};
        end if;
        if v_charged < v_count then
          foreach v_reading in array v_readings loop
            v_n      := v_reading.element;
            v_policy := v_reading.policy;
            continue when decisions[v_n] is not null;
            {{ template "charge_if_covered" (dict "at_once" true) }}
          end loop;
        end if;
      exception when sqlstate 'RL00T' then
        v_enough := false;
      end;
    end if;

    if v_simple and not v_enough then
      v_now := clock();  -- step 2 may have waited
      v_key := null;
      for v_i in 1..v_count loop
        v_reading := v_readings[v_i];
        v_n       := v_reading.element;
        if not acceptable(keys[v_n], v_costs[v_n]) or v_costs[v_n] = 0 or keys[v_n] = v_key and (v_reading.policy).id = v_policy.id then
          v_simple := false;
          exit;
        end if;
        v_policy := v_reading.policy;
        v_key    := keys[v_n];
        v_cost   := v_costs[v_n];
        if v_policy.overridden then
          {{ template "include/override.sql" }}
          v_readings[v_i].policy := v_policy;
        end if;
        if v_policy.durable then
          {{ template "include/look.sql" (dict "buckets" "buckets") }}
        else
          {{ template "include/look.sql" (dict "buckets" "ephemeral_buckets") }}
        end if;
        v_retries_us[v_n] := v_retry_us;
        if v_policy.shadow and v_retry_us is distinct from 0 then
          shadowed       := true;
          decisions[v_n] := shadow_of(v_level, v_reset_us, v_policy.capacity);
        else
          allowed        := allowed and v_retry_us is not distinct from 0;
          v_rows         := v_rows and (v_has_row or v_retry_us is distinct from 0);
          decisions[v_n] := answer_of(v_level, v_retry_us, v_reset_us, v_policy.capacity);
        end if;
      end loop;
      v_simple := v_simple and (v_rows or not allowed);
      if v_simple and allowed then
        begin
          foreach v_reading in array v_readings loop
            v_n      := v_reading.element;
            v_policy := v_reading.policy;
            continue when v_retries_us[v_n] is distinct from 0;  -- a shadow
            {{ template "charge_if_covered" (dict) }}
          end loop;
        exception when sqlstate 'RL00T' then
          v_simple := false;
        end;
      end if;
    end if;
  end if;

  if v_simple then
    replayed := false;
    shadowed := shadowed and allowed;
    if v_charged < v_count then
      v_least := null;
      foreach v_reading in array v_readings loop
        v_n    := v_reading.element;
        v_rank := {{ template "rank_of_shadow" "(v_reading.policy)." }}
                  + case
                      when allowed then repeats(decisions[v_n].remaining, v_costs[v_n])
                      when (v_reading.policy).shadow then 0
                      else -coalesce(v_retries_us[v_n], 9223372036854775807)
                    end;
        if {{ template "binds" (dict "rank" "v_rank" "element" "v_n") }} then
          v_least := v_rank;
          binding := v_n;
        end if;
      end loop;
    end if;
  else
    v_batch := acquire_batch(policies, keys, costs, array[v_count], case when idempotency_key is not null then array[idempotency_key] end);
    if v_batch.refused is not null then
      raise exception using errcode = v_batch.error_codes[1], message = v_batch.error_messages[1],
                            detail  = v_batch.error_details[1], hint = v_batch.error_hints[1];
    end if;
    allowed   := v_batch.requests_allowed[1];
    replayed  := v_batch.requests_replayed[1];
    shadowed  := v_batch.requests_shadowed[1];
    binding   := v_batch.bindings[1];
    decisions := decisions_of(v_batch.elements, v_batch.remaining, v_batch.retry_after_us, v_batch.reset_after_us, v_batch.capacity,
                              v_batch.replayed, v_batch.shadowed);
  end if;
  remaining   := decisions[binding].remaining;
  retry_after := case when allowed then interval '0' else decisions[binding].retry_after end;
  reset_after := decisions[binding].reset_after;
  capacity    := decisions[binding].capacity;
end;
$$;
comment on function ratelimit_acquire_all(text[], text[], bigint[], text) is
  'Take from several buckets if every one covers its cost, and otherwise from none.';

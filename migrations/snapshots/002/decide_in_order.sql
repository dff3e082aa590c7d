-- Decides requests one after another at one instant, whatever they ask for. The fast path is take; this is the rest.
--
-- The arguments are parallel arrays of elements. The elements of a request follow each other and have its number in
-- requests. idempotency_keys is null, or has the key of the request in each element. elements has their numbers in the
-- batch. joint asks for the answers of whole requests, too.
--
-- The steps of a round:
--   1. Lock the buckets that this round may write, and create their rows. The first round locks none.
--   2. Read the clock, and then by one snapshot the policies, overrides, buckets and idempotency keys.
--   3. Decide all requests in order, in memory.
--   4. Write each bucket once, and remove the rows of step 1 that nothing was taken from. The first round writes only new
--      rows. A second round locks the buckets that are wanted if one of them has a row, or if an idempotency key is denied
--      where a row would be created: it may have been granted since, and the row that says so removed. A later round locks
--      all buckets if it wants one that is not locked, or if another session stored an idempotency key first. Each further
--      round is due to another session.
-- If a round that locked rows takes nothing, its locks and rows are rolled back, and the answers stay.
--
-- All that take from more than one bucket lock them in one order: durable policies first, then by policy and key. To
-- create a row is part of the order, because an INSERT waits for whoever has the row already. So calls that are
-- transactions of their own never deadlock. If the caller has charged buckets already (taken), a grant here would break
-- the order: RL00T tells the caller to undo and to ask again.
--
-- Locks:  the buckets of the requests that are granted; all buckets, if other sessions interfered.
-- Writes: buckets and idempotency keys of granted requests.
create or replace function ratelimit.decide_in_order(
    policies text[], keys text[], costs bigint[], requests bigint[], idempotency_keys text[], elements bigint[], joint boolean, taken boolean)
  returns ratelimit.packed
  language plpgsql
  volatile
as $$
{{- /* Each of these is about the buckets v_from to v_to, which are those of v_policy. The argument is the name of the table. */ -}}
{{ define "lock_buckets" -}}
for v_b in 1..cardinality(v_key) loop
              continue when not v_lock[v_b] or v_b not between v_from and v_to;
              loop
                perform from {{ . }} as b
                  {{ template "include/newest.sql" (dict "key" "v_key[v_b]") }}
                   for update;
                exit when found;
                insert into {{ . }} (policy_id, key, level, refilled_at, due_at)
                values (v_policy.id, v_key[v_b], microtokens(v_numbers[v_b].capacity), v_now, v_now)
                on conflict on constraint {{ . }}_pkey do nothing;
                v_created[v_b] := found;
                exit when found;
              end loop;
            end loop;
{{- end }}
{{ define "write_buckets" -}}
update {{ . }} as b
             set level = u.level, refilled_at = u.refilled_at, room = null
            from unnest(v_key[v_from:v_to], v_level[v_from:v_to], v_refilled_at[v_from:v_to], v_wanted[v_from:v_to])
                 as u (key, level, refilled_at, wanted)
           where u.wanted
             and b.ctid = (select b.ctid
                             from {{ . }} as b
                            {{ template "include/newest.sql" (dict "key" "u.key") }});
{{- end }}
{{ define "remove_bucket" -}}
delete from {{ . }} as b where b.policy_id = v_policy.id and b.key = v_key[v_b];
{{- end }}
{{ define "create_buckets" -}}
insert into {{ . }} (policy_id, key, level, refilled_at, due_at)
          select v_policy.id, u.key, u.level, u.refilled_at,
                 u.refilled_at + least(duration({{ template "wait_below" (dict "target" "(u.p).full_level" "level" "u.level" "elapsed_us" "0" "policy" "(u.p).") }}),
                                       interval '24 hours')
            from (select u.*, v_numbers[v_from + u.n - 1] as p
                    from unnest(v_key[v_from:v_to], v_level[v_from:v_to], v_refilled_at[v_from:v_to], v_wanted[v_from:v_to], v_has_row[v_from:v_to])
                         with ordinality as u (key, level, refilled_at, wanted, has_row, n)
                  offset 0) as u
           where u.wanted and not u.has_row
           order by u.key collate "C"
          on conflict on constraint {{ . }}_pkey do nothing;
{{- end }}
declare
  v_count       integer := cardinality(keys);
  -- Parallel to the elements.
  charges       bigint[];       -- what the request charges to the bucket
  remaining     bigint[];       -- the answers
  retry_us      bigint[];
  reset_us      bigint[];
  capacities    bigint[];
  replayed      boolean[];
  shadowed      boolean[];
  watching      boolean[];      -- the policy is a shadow
  granted       boolean[];      -- the request is granted; null: refused
  charged       boolean[];      -- the request charges a bucket
  v_bucket      integer[];      -- the number of its bucket
  v_same        integer[];      -- the first element of the request on the same bucket
  v_twin        integer[];      -- the last element of an earlier request on the same bucket, under the same idempotency key
  v_bad         boolean[];      -- an argument is out of range
  v_known       ratelimit.idempotency_keys[];  -- the grant that a live idempotency key remembers
  v_kept        boolean[];      -- its grant is to be remembered
  v_fits        boolean[];
  v_then_level  bigint[];       -- the bucket after the request: what it held, ...
  v_then_at     timestamptz[];  -- ... and when
  -- Parallel to each other: the requests that are refused, and their errors.
  refused        bigint[];
  error_codes    text[];
  error_messages text[];
  error_details  text[];
  error_hints    text[];
  -- Parallel to the buckets, which are in the order of policy and key.
  v_key         text[] collate "C";
  v_level       bigint[];       -- as stored, until a request is granted
  v_refilled_at timestamptz[];
  v_level_now   bigint[];
  v_has_row     boolean[];
  v_numbers     ratelimit.policies[];
  v_wanted      boolean[];      -- a request takes from it
  v_lock        boolean[];      -- the next round locks it
  v_created     boolean[];      -- this round has created its row, which stands for none until it is written
  -- Parallel to the policies, in the order of name.
  v_names       text[] collate "C";
  v_first       integer[];      -- the number of its first bucket
  v_policies    ratelimit.policies[];
  v_ids         bigint[];
  v_locked      bigint[];       -- the ids by which this round has locked the buckets
  v_durable     integer[];      -- the numbers of durable policies
  v_in_order    integer[];      -- the numbers of all known policies, durable ones first

  v_next        integer;        -- the number of a policy
  v_policy      ratelimit.policies;
  v_from        integer;
  v_to          integer;
  v_now         timestamptz;
  v_round       integer := 0;
  v_start       integer;        -- the first element of a request
  v_end         integer;        -- the last
  v_i           integer;
  v_earlier     integer;
  v_b           integer;
  v_refusal     integer[];      -- by kind of error: the first element that has it
  v_error       record;
  v_granted     boolean;
  v_charged     boolean;
  v_changes     boolean;        -- a row that exists is to change
  v_misses      boolean;        -- an idempotency key is denied by a bucket that is wanted
  v_places      bigint[];
  v_written     bigint;
  v_packed      ratelimit.packed;
  v_over        boolean := false;  -- answered, and the locks are to be rolled back
begin
  select array_agg(s.bucket::integer order by s.place), array_agg(s.charge order by s.place), array_agg(s.same::integer order by s.place),
         array_agg(s.twin::integer order by s.place), array_agg(s.bad order by s.place)
    into v_bucket, charges, v_same, v_twin, v_bad
    from (select e.place, dense_rank() over (order by e.policy, e.key) as bucket,
                 least(sum(greatest(e.cost, 0)) over same, 9223372036854775807)::bigint as charge,
                 min(e.place) over same as same,
                 case when e.idempotency_key is not null then
                   max(e.place) over (partition by e.policy, e.key, e.idempotency_key order by e.request
                                      range between unbounded preceding and 1 preceding)
                 end as twin,
                 (acceptable(e.key, e.cost) and is_name(e.policy) and is_name(e.idempotency_key) is not false) is not true as bad
            from (select u.policy collate "C" as policy, u.key collate "C" as key, u.cost,
                         u.idempotency_key collate "C" as idempotency_key, u.request, u.place
                    from unnest(policies, keys, costs, idempotency_keys, requests)
                         with ordinality as u (policy, key, cost, idempotency_key, request, place)) as e
          window same as (partition by e.policy, e.key, e.request)) as s;
  select array_agg(b.key order by b.policy, b.key) into v_key
    from (select distinct u.policy collate "C" as policy, u.key collate "C" as key from unnest(policies, keys) as u (policy, key)) as b;
  select array_agg(p.name order by p.first), array_agg(p.first order by p.first) into v_names, v_first
    from (select u.policy collate "C" as name, min(u.bucket) as first
            from unnest(policies, v_bucket) as u (policy, bucket)
           group by 1) as p;
  v_first := v_first || cardinality(v_key) + 1;

  -- A round that is rolled back gives back this lock with all others, and the next one begins with buckets. A migration
  -- locks in the other order: policies first.
  {{ block "lock_policies" . }}lock table policies in access share mode;{{ end }}

  <<rounds>>
  loop
    v_round := v_round + 1;
    if v_round = 1000 then
      raise exception 'the buckets changed at every look'
        using errcode = '40001',
              hint    = 'Try again.';
    end if;
    begin
      v_created := array_fill(false, array[cardinality(v_key)]);
      if v_round > 1 then
        v_now := clock();
        foreach v_next in array v_in_order loop
          v_policy := v_policies[v_next];
          v_from   := v_first[v_next];
          v_to     := v_first[v_next + 1] - 1;
          if v_policy.durable then
            {{ template "lock_buckets" "buckets" }}
          else
            {{ template "lock_buckets" "ephemeral_buckets" }}
          end if;
        end loop;
      end if;

      v_now         := clock();  -- the locks may have waited
      v_locked      := v_ids;
      v_ids         := '{}';
      v_in_order    := '{}';
      v_durable     := '{}';
      select l.policies, l.known, l.numbers, l.levels, l.refilled_at, l.levels_now, l.has_row
        into v_policies, v_known, v_numbers, v_level, v_refilled_at, v_level_now, v_has_row
        from look_at_buckets(v_names, v_first, v_key, v_created, v_bucket, charges, idempotency_keys, v_now) as l;
      for v_part in 1..cardinality(v_names) loop
        v_policy      := v_policies[v_part];
        v_ids[v_part] := v_policy.id;
        if v_policy.durable then  -- durable policies first
          v_in_order := v_durable || v_part || v_in_order[cardinality(v_durable) + 1:];
          v_durable  := v_durable || v_part;
        elsif v_policy.durable is not null then
          v_in_order := v_in_order || v_part;
        end if;
      end loop;

      refused        := null;
      error_codes    := null;
      error_messages := null;
      error_details  := null;
      error_hints    := null;
      if v_round > 1 and v_ids is distinct from v_locked then  -- a policy was defined anew since the locks
        v_lock := array_fill(true, array[cardinality(v_key)]);
        raise exception sqlstate 'RL00A';
      end if;
      v_fits         := array_fill(null::boolean, array[v_count]);
      replayed       := v_fits;
      shadowed       := v_fits;
      watching       := v_fits;
      granted        := v_fits;
      charged        := v_fits;
      v_kept         := array_fill(false, array[v_count]);
      v_then_level   := array_fill(null::bigint, array[v_count]);
      v_then_at      := array_fill(null::timestamptz, array[v_count]);
      v_wanted       := array_fill(false, array[cardinality(v_key)]);
      v_changes      := false;
      v_end          := 0;
      while v_end < v_count loop
        v_start   := v_end + 1;
        v_end     := v_start;
        v_granted := true;
        v_charged := false;
        v_refusal := '{}';
        while requests[v_end + 1] = requests[v_start] loop
          v_end := v_end + 1;
        end loop;

        -- Each element: refused, replayed, or does it fit?
        for v_i in v_start..v_end loop
          v_b := v_bucket[v_i];
          if v_bad[v_i] then
            v_refusal[1] := coalesce(v_refusal[1], v_i);
            continue;
          elsif v_numbers[v_b].id is null then
            v_refusal[2] := coalesce(v_refusal[2], v_i);
            continue;
          end if;
          if charges[v_i] > 0 and v_twin[v_i] is not null and v_known[v_i] is null then
            -- Granted and remembered by an earlier request of this call? Its own twins come before it.
            v_earlier := v_twin[v_i];
            while v_earlier is not null and not v_kept[v_earlier] loop
              v_earlier := v_twin[v_earlier];
            end loop;
            if v_earlier is not null and charges[v_earlier] <> charges[v_i] then
              v_known[v_i] := row(null, charges[v_earlier], null, null, null, null, null, idempotency_keys[v_i], null, null, null)::ratelimit.idempotency_keys;
            elsif v_earlier is not null then
              replayed[v_i]     := true;
              v_then_level[v_i] := v_then_level[v_earlier];
              v_then_at[v_i]    := v_then_at[v_earlier];
              v_fits[v_i]       := true;
              watching[v_i]     := v_numbers[v_b].shadow;
              continue;
            end if;
          end if;
          if v_known[v_i].cost <> charges[v_i] then
            v_refusal[3] := coalesce(v_refusal[3], v_i);
            continue;
          elsif v_known[v_i].settled is not null then
            v_refusal[4] := coalesce(v_refusal[4], v_i);
            continue;
          end if;
          replayed[v_i] := v_known[v_i].cost is not null;
          watching[v_i] := v_numbers[v_b].shadow;
          if replayed[v_i] then
            v_fits[v_i] := left_us(v_known[v_i], v_now) = 0;  -- a reserved grant may have to wait
          else
            v_fits[v_i] := charges[v_i] = 0 or charges[v_i] <= v_numbers[v_b].capacity and microtokens(charges[v_i]) <= v_level_now[v_b];
          end if;
          v_granted     := v_granted and (v_fits[v_i] or watching[v_i]);
        end loop;

        v_i := coalesce(v_refusal[1], v_refusal[2], v_refusal[3], v_refusal[4]);
        if v_i is not null then
          select r.* into v_error
            from refusal(policies[v_i], keys[v_i], case when v_bad[v_i] then costs[v_i] else charges[v_i] end,
                         decide_in_order.idempotency_keys[v_i], v_known[v_i]) as r;
          refused        := refused || requests[v_i];
          error_codes    := error_codes || v_error.error_code;
          error_messages := error_messages || v_error.error_message;
          error_details  := error_details || v_error.error_detail;
          error_hints    := error_hints || v_error.error_hint;
          for v_i in v_start..v_end loop
            granted[v_i] := null;
            v_fits[v_i]  := null;
          end loop;
          continue;
        end if;

        for v_i in v_start..v_end loop
          v_b := v_bucket[v_i];
          if v_granted and v_fits[v_i] and not replayed[v_i] and charges[v_i] > 0 then
            v_charged := true;
            if v_same[v_i] = v_i then
              if not v_wanted[v_b] then
                v_wanted[v_b] := true;
                v_changes     := v_changes or v_has_row[v_b];
                v_refilled_at[v_b] := refilled_until(v_refilled_at[v_b], v_now, v_numbers[v_b].tick);
              end if;
              v_level_now[v_b] := v_level_now[v_b] - microtokens(charges[v_i]);
              v_level[v_b]     := v_level_now[v_b];
            end if;
            v_kept[v_i] := decide_in_order.idempotency_keys[v_i] is not null;
          end if;
          shadowed[v_i] := not v_fits[v_i] and watching[v_i];
          if v_then_level[v_i] is null then
            v_then_level[v_i] := v_level[v_b];
            v_then_at[v_i]    := v_refilled_at[v_b];
          end if;
        end loop;
        for v_i in v_start..v_end loop
          granted[v_i] := v_granted;
          charged[v_i] := v_charged;
        end loop;
      end loop;

      -- The answers.
      select array_agg(a.remaining order by a.place), array_agg(a.retry_us order by a.place),
             array_agg(a.reset_us order by a.place), array_agg(a.capacity order by a.place)
        into remaining, retry_us, reset_us, capacities
        from (select e.place,
                     case
                       when (e.known).cost is not null then (e.known).remaining
                       else whole_tokens({{ template "refilled_level" (dict "bucket" "e." "policy" "(e.p).") }})
                     end as remaining,
                     case
                       when e.fits or (e.p).shadow then 0
                       when (e.known).cost is not null then left_us(e.known, v_now)
                       when e.charge <= (e.p).capacity then {{ template "wait_for" (dict "target" "microtokens(e.charge)" "bucket" "e." "policy" "(e.p).") }}
                     end as retry_us,
                     case
                       when (e.known).cost is not null then microseconds((e.known).reset_after)::bigint
                       else {{ template "wait_for" (dict "target" "(e.p).full_level" "bucket" "e." "policy" "(e.p).") }}
                     end as reset_us,
                     coalesce((e.known).capacity, (e.p).capacity) as capacity
                from (select u.*, v_numbers[u.bucket] as p, v_known[u.place] as known
                        from unnest(v_bucket, charges, v_fits, v_then_level, v_then_at)
                             with ordinality as u (bucket, charge, fits, level, refilled_at, place)
                      offset 0) as e) as a;

      if not true = any (v_wanted) then  -- nothing to take
        exit rounds when v_round = 1;
        v_over := true;
        raise exception sqlstate 'RL00A';  -- rolls back to the begin above; caught below, so no caller sees it
      end if;
      v_misses := idempotency_keys is not null
                  and exists (select from unnest(v_bucket, v_fits, idempotency_keys) as u (bucket, fits, idempotency_key)
                               where not u.fits and u.idempotency_key is not null and v_wanted[u.bucket]);
      if taken then
        raise exception sqlstate 'RL00T';
      elsif v_round = 1 and (v_changes or v_misses) then
        v_lock := v_wanted;
        raise exception sqlstate 'RL00A';
      elsif v_round > 1 and exists (select from unnest(v_wanted, v_lock) as u (wanted, locked) where u.wanted and not u.locked) then
        v_lock := array_fill(true, array[cardinality(v_key)]);
        raise exception sqlstate 'RL00A';
      end if;

      foreach v_next in array v_in_order loop
        v_policy := v_policies[v_next];
        v_from   := v_first[v_next];
        v_to     := v_first[v_next + 1] - 1;
        for v_b in v_from..v_to loop
          continue when not v_created[v_b] or v_wanted[v_b];
          if v_policy.durable then
            {{ template "remove_bucket" "buckets" }}
          else
            {{ template "remove_bucket" "ephemeral_buckets" }}
          end if;
        end loop;
        if v_round > 1 and v_policy.durable then
          {{ template "write_buckets" "buckets" }}
        elsif v_round > 1 then
          {{ template "write_buckets" "ephemeral_buckets" }}
        elsif v_policy.durable then
          {{ template "create_buckets" "buckets" }}
        else
          {{ template "create_buckets" "ephemeral_buckets" }}
        end if;
        get diagnostics v_written = row_count;
        if v_written < (select count(*) from unnest(v_wanted[v_from:v_to]) as u (wanted) where u.wanted) then
          v_lock := array_fill(true, array[cardinality(v_key)]);  -- another session created a row, or the policy anew
          raise exception sqlstate 'RL00A';
        end if;
      end loop;
      if true = any (v_kept) then
        for v_part in 1..cardinality(v_names) loop
          v_from   := v_first[v_part];
          v_to     := v_first[v_part + 1] - 1;
          v_places := array(select u.place
                              from unnest(v_bucket, v_kept, v_same) with ordinality as u (bucket, kept, same, place)
                             where u.kept and u.same = u.place and u.bucket between v_from and v_to
                             order by u.bucket, u.place);
          continue when v_places = '{}';
          v_policy := v_policies[v_part];
          if remember(keys, decide_in_order.idempotency_keys, charges, v_now, not v_policy.durable, false, v_places,
                      array_fill(v_policy.id, array[cardinality(v_places)]), array_fill(v_policy.remember_us, array[cardinality(v_places)]),
                      array(select remaining[p.place] from unnest(v_places) as p (place)),
                      array(select capacities[p.place] from unnest(v_places) as p (place)),
                      array(select reset_us[p.place] from unnest(v_places) as p (place))) is not true then
            v_lock := array_fill(true, array[cardinality(v_key)]);
            raise exception sqlstate 'RL00A';
          end if;
        end loop;
      end if;
      exit rounds;
    exception when sqlstate 'RL00A' then
      exit rounds when v_over;
    end;
  end loop;

  select array_agg(elements[a.place]), array_agg(a.remaining), array_agg(a.retry_us), array_agg(a.reset_us), array_agg(a.capacity),
         case when bool_or(a.replayed) then array_agg(a.replayed) end, case when bool_or(a.shadowed) then array_agg(a.shadowed) end
    into v_packed.elements, v_packed.remaining, v_packed.retry_after_us, v_packed.reset_after_us, v_packed.capacity,
         v_packed.replayed, v_packed.shadowed
    from unnest(remaining, retry_us, reset_us, capacities, replayed, shadowed, granted)
         with ordinality as a (remaining, retry_us, reset_us, capacity, replayed, shadowed, granted, place)
   where a.granted is not null;
  if joint then
    -- The binding element: a shadow only if there is no other, then one of cost 0 only if there is no other, then the
    -- fewest repeats of its charge, or the longest wait.
    select array_agg(r.request), array_agg(r.granted),
           array_agg(case when r.granted then r.replayed and not r.charged else r.waits end),
           array_agg(r.granted and r.shadowed), array_agg(r.binding::integer)
      into v_packed.requests, v_packed.requests_allowed, v_packed.requests_replayed, v_packed.requests_shadowed, v_packed.bindings
      from (select a.request, bool_and(a.granted) as granted, bool_or(a.charged) as charged, bool_or(a.replayed) as replayed,
                   bool_or(a.shadowed) as shadowed,
                   bool_and((a.replayed or a.retry_us = 0) is true) as waits,
                   (min(array[a.watching::integer, (a.cost = 0)::integer,
                              case when a.granted then repeats(a.remaining, nullif(a.charge, 0)) else -coalesce(a.retry_us, 9223372036854775807) end,
                              a.place]))[4] - min(a.place) + 1 as binding
              from unnest(requests, costs, charges, remaining, retry_us, replayed, shadowed, watching, granted, charged)
                   with ordinality as a (request, cost, charge, remaining, retry_us, replayed, shadowed, watching, granted, charged, place)
             where a.granted is not null
             group by a.request) as r;
  end if;
  v_packed.refused        := refused;
  v_packed.error_codes    := error_codes;
  v_packed.error_messages := error_messages;
  v_packed.error_details  := error_details;
  v_packed.error_hints    := error_hints;
  return v_packed;
end;
$$;
comment on function ratelimit.decide_in_order(text[], text[], bigint[], bigint[], text[], bigint[], boolean, boolean) is
  'Decides requests one after another at one instant, whatever they ask for.';

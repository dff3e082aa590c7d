-- Citus: take.sql finds rows by their row ids, which a distributed table has not. This does without it.

-- Decides the requests of a batch about one key, one after another, on the node that has its shard. The arguments are those of
-- decide_in_order, of which all elements have this key; joint asks for the answers of whole requests.
--
-- Locks and writes: as ratelimit_acquire for a single request, else as decide_in_order.
create or replace function ratelimit.decide_here(
    key text, policies text[], costs bigint[], requests bigint[], idempotency_keys text[], elements bigint[], joint boolean)
  returns ratelimit.packed
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
  set jit = off             -- the statements take less time than compiling them
as $$
declare
  v_key      text collate "C" := decide_here.key;
  v_decision decision;
  v_packed   packed;
  v_code     text;
  v_message  text;
  v_detail   text;
  v_hint     text;
begin
  if joint or cardinality(policies) > 1 then
    return decide_in_order(policies, array_fill(v_key, array[cardinality(policies)]), costs, requests, idempotency_keys, elements, joint, false);
  end if;
  begin
    v_decision := acquire_here(policies[1], v_key, costs[1], idempotency_keys[1]);
    v_packed.elements       := elements;
    v_packed.remaining      := array[v_decision.remaining];
    v_packed.retry_after_us := array[microseconds(v_decision.retry_after)::bigint];
    v_packed.reset_after_us := array[microseconds(v_decision.reset_after)::bigint];
    v_packed.capacity       := array[v_decision.capacity];
    if v_decision.replayed then
      v_packed.replayed := array[true];
    end if;
    if v_decision.shadowed then
      v_packed.shadowed := array[true];
    end if;
  exception when sqlstate '22023' or sqlstate 'RL001' or sqlstate 'RL002' or sqlstate 'RL004' then
    get stacked diagnostics v_code = returned_sqlstate, v_message = message_text, v_detail = pg_exception_detail, v_hint = pg_exception_hint;
    v_packed := null;
    v_packed.refused        := requests;
    v_packed.error_codes    := array[v_code];
    v_packed.error_messages := array[v_message];
    v_packed.error_details  := array[v_detail];
    v_packed.error_hints    := array[v_hint];
  end;
  return v_packed;
end;
$$;
comment on function ratelimit.decide_here(text, text[], bigint[], bigint[], text[], bigint[], boolean) is
  'Decides the requests of a batch about one key, on the node that has its shard.';

-- Decides many requests, as if each were asked on its own, one after another: those about one key in one call of decide_here, one
-- key after another. A request whose elements have several keys is refused with 0A000, because its buckets may be on several
-- nodes. acquire_packed.sql explains the arguments and the results.
--
-- All that take from more than one bucket lock them in the order of key, and those of one key in the order that
-- decide_in_order describes.
create or replace function ratelimit.acquire_batch(
    policies text[], keys text[], costs bigint[], sizes integer[], idempotency_keys text[])
  returns ratelimit.packed
  language plpgsql
  volatile
  set search_path = ratelimit, pg_temp
as $$
declare
  v_count    integer := cardinality(policies);
  v_requests bigint[];  -- for each element, the number of its request; null without sizes: its own number
  v_misfits  bigint[];  -- requests of a size that is refused
  v_part     record;
  v_error    record;
  v_one      packed;
  v_answers  packed;
  v_replays  boolean := false;
  v_shadows  boolean := false;
  v_i        integer;
begin
  select f.policies, f.keys, f.costs, f.sizes, f.idempotency_keys, f.requests, f.misfits
    into policies, keys, costs, sizes, idempotency_keys, v_requests, v_misfits
    from batch_form(policies, keys, costs, sizes, idempotency_keys) as f;
  v_requests := coalesce(v_requests, array(select generate_series(1, v_count)));

  -- Requests without a key, or with several: the first bad element is their error.
  for v_part in
    select r.request, r.elements, r.place - r.first + 1 as element, e.policy, e.key, e.cost, e.idempotency_key, e.bad
      from (select u.request, bool_or(u.key is null) or count(distinct u.key collate "C") > 1 as strays,
                   coalesce(min(u.place) filter (where u.bad), min(u.place)) as place, min(u.place) as first, count(*) as elements
              from (select q.*, (acceptable(q.key, q.cost) and is_name(q.policy) and is_name(q.idempotency_key) is not false) is not true as bad
                      from unnest(acquire_batch.policies, acquire_batch.keys, acquire_batch.costs, v_requests, acquire_batch.idempotency_keys)
                           with ordinality as q (policy, key, cost, request, idempotency_key, place)) as u
             group by u.request) as r
     cross join lateral (select acquire_batch.policies[r.place] as policy, acquire_batch.keys[r.place] as key, acquire_batch.costs[r.place] as cost,
                                acquire_batch.idempotency_keys[r.place] as idempotency_key,
                                (acceptable(acquire_batch.keys[r.place], acquire_batch.costs[r.place]) and is_name(acquire_batch.policies[r.place])
                                 and is_name(acquire_batch.idempotency_keys[r.place]) is not false) is not true as bad) as e
     where r.strays
     order by r.request
  loop
    if v_part.bad then
      select f.* into v_error from refusal(v_part.policy, v_part.key, v_part.cost, v_part.idempotency_key, null) as f;
      v_error.error_detail := detail_of_element(v_error.error_message, v_error.error_detail, v_part.element, v_part.elements);
    else
      select '0A000' as error_code, 'the buckets of a request must have one key' as error_message,
             format('The keys of request %s may be on several nodes.', v_part.request) as error_detail,
             'Ask for several limits under one key and several policies, or ask for each alone.' as error_hint
        into v_error;
    end if;
    v_answers.refused        := v_answers.refused || v_part.request;
    v_answers.error_codes    := v_answers.error_codes || v_error.error_code;
    v_answers.error_messages := v_answers.error_messages || v_error.error_message;
    v_answers.error_details  := v_answers.error_details || v_error.error_detail;
    v_answers.error_hints    := v_answers.error_hints || v_error.error_hint;
  end loop;

  for v_part in
    select min(u.key) as key, array_agg(u.policy order by u.place) as policies, array_agg(u.cost order by u.place) as costs,
           array_agg(u.request order by u.place) as requests,
           case when acquire_batch.idempotency_keys is not null then array_agg(u.idempotency_key order by u.place) end as idempotency_keys,
           array_agg(u.place order by u.place) as places
      from unnest(acquire_batch.policies, acquire_batch.keys, acquire_batch.costs, v_requests, acquire_batch.idempotency_keys)
           with ordinality as u (policy, key, cost, request, idempotency_key, place)
     where (u.request = any (v_answers.refused)) is not true
     group by u.key collate "C"
     order by u.key collate "C"
  loop
    select d.* into v_one
      from decide_here(v_part.key collate "C", v_part.policies, v_part.costs, v_part.requests, v_part.idempotency_keys, v_part.places, sizes is not null) as d;
    v_answers.elements       := v_answers.elements || v_one.elements;
    v_answers.remaining      := v_answers.remaining || v_one.remaining;
    v_answers.retry_after_us := v_answers.retry_after_us || v_one.retry_after_us;
    v_answers.reset_after_us := v_answers.reset_after_us || v_one.reset_after_us;
    v_answers.capacity       := v_answers.capacity || v_one.capacity;
    v_replays                := v_replays or v_one.replayed is not null;
    v_shadows                := v_shadows or v_one.shadowed is not null;
    if v_one.elements is not null then
      v_answers.replayed := v_answers.replayed || coalesce(v_one.replayed, array_fill(false, array[cardinality(v_one.elements)]));
      v_answers.shadowed := v_answers.shadowed || coalesce(v_one.shadowed, array_fill(false, array[cardinality(v_one.elements)]));
    end if;
    v_answers.requests          := v_answers.requests || v_one.requests;
    v_answers.requests_allowed  := v_answers.requests_allowed || v_one.requests_allowed;
    v_answers.requests_replayed := v_answers.requests_replayed || v_one.requests_replayed;
    v_answers.requests_shadowed := v_answers.requests_shadowed || v_one.requests_shadowed;
    v_answers.bindings          := v_answers.bindings || v_one.bindings;
    v_answers.refused           := v_answers.refused || v_one.refused;
    v_answers.error_codes       := v_answers.error_codes || v_one.error_codes;
    v_answers.error_messages    := v_answers.error_messages || v_one.error_messages;
    v_answers.error_details     := v_answers.error_details || v_one.error_details;
    v_answers.error_hints       := v_answers.error_hints || v_one.error_hints;
  end loop;
  if not v_replays then
    v_answers.replayed := null;
  end if;
  if not v_shadows then
    v_answers.shadowed := null;
  end if;
  if v_misfits is not null then
    v_answers := with_misfits(v_answers, sizes, v_misfits);
  end if;
  return v_answers;
end;
$$;
comment on function ratelimit.acquire_batch(text[], text[], bigint[], integer[], text[]) is
  'Decides many requests, as if each were asked on its own, one after another.';

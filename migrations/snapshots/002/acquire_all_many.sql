-- Decides many requests of several elements in one call, as if ratelimit_acquire_all were called for each, one after
-- another; row n answers request n. The first sizes[1] elements of policies, keys and costs are request 1, and so on.
-- idempotency_keys has one element for each request, or is null.
--
-- A request that ratelimit_acquire_all would refuse has the error in its row and no decision. The other requests are decided
-- all the same.
--
-- Locks and writes: as ratelimit_acquire_packed.
create or replace function ratelimit_acquire_all_many(
    policies         text[],
    keys             text[],
    costs            bigint[],
    sizes            integer[],
    idempotency_keys text[] default null)
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean, shadowed boolean, binding integer, decisions ratelimit.decision[],
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_batch     packed;
  v_decisions ratelimit.decision[];
begin
  if sizes is null then
    perform refuse('sizes', null, 'Pass the number of elements of each request.');
  end if;
  v_batch := acquire_batch(policies, keys, costs, sizes, ratelimit_acquire_all_many.idempotency_keys);
  v_decisions := decisions_of(v_batch.elements, v_batch.remaining, v_batch.retry_after_us, v_batch.reset_after_us, v_batch.capacity,
                              v_batch.replayed, v_batch.shadowed);
  return query
    select r.request, r.allowed, (r.decided).remaining,
           case when r.allowed then interval '0' else (r.decided).retry_after end, (r.decided).reset_after, (r.decided).capacity,
           r.replayed, r.shadowed, r.binding, r.decisions, null::text, null::text, null::text, null::text
      from (select u.*, v_decisions[s.first + u.binding - 1] as decided, v_decisions[s.first:s.first + s.size - 1] as decisions
              from unnest(v_batch.requests, v_batch.requests_allowed, v_batch.requests_replayed, v_batch.requests_shadowed, v_batch.bindings)
                   as u (request, allowed, replayed, shadowed, binding)
              join (select n.request, n.size, (sum(n.size) over (order by n.request))::integer - n.size + 1 as first
                      from unnest(ratelimit_acquire_all_many.sizes) with ordinality as n (size, request)) as s using (request)) as r
    union all
    select e.refused, null, null, null, null, null, null, null, null, null, e.code, e.message, e.detail, e.hint
      from unnest(v_batch.refused, v_batch.error_codes, v_batch.error_messages, v_batch.error_details, v_batch.error_hints)
           as e (refused, code, message, detail, hint)
     order by 1;
end;
$$;
comment on function ratelimit_acquire_all_many(text[], text[], bigint[], integer[], text[]) is
  'Decide many requests of several elements in one call, in the order given, each with its own decision or error.';

-- Shows the answers of acquire_batch as rows.
create or replace function ratelimit_acquire_many(
    policies         text[],
    keys             text[],
    costs            bigint[]  default null,
    idempotency_keys text[]    default null,
    sizes            integer[] default null)
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean, shadowed boolean, binding integer, decisions ratelimit.decision[],
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_batch     packed := acquire_batch(policies, keys, costs, sizes, ratelimit_acquire_many.idempotency_keys);
  v_decisions ratelimit.decision[];
begin
  if sizes is null then
    return query
      select e.element, e.retry_us is not distinct from 0, e.remaining, duration(e.retry_us), duration(e.reset_us), e.capacity,
             coalesce(e.replayed, false), coalesce(e.shadowed, false), null::integer, null::decision[], null::text, null::text, null::text, null::text
        from unnest(v_batch.elements, v_batch.remaining, v_batch.retry_after_us, v_batch.reset_after_us, v_batch.capacity,
                    v_batch.replayed, v_batch.shadowed)
             as e (element, remaining, retry_us, reset_us, capacity, replayed, shadowed)
      union all
      select r.refused, null, null, null, null, null, null, null, null, null, r.code, r.message, r.detail, r.hint
        from unnest(v_batch.refused, v_batch.error_codes, v_batch.error_messages, v_batch.error_details, v_batch.error_hints)
             as r (refused, code, message, detail, hint)
       order by 1;
    return;
  end if;
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
                      from unnest(sizes) with ordinality as n (size, request)) as s using (request)) as r
    union all
    select r.refused, null, null, null, null, null, null, null, null, null, r.code, r.message, r.detail, r.hint
      from unnest(v_batch.refused, v_batch.error_codes, v_batch.error_messages, v_batch.error_details, v_batch.error_hints)
           as r (refused, code, message, detail, hint)
     order by 1;
end;
$$;
comment on function ratelimit_acquire_many(text[], text[], bigint[], text[], integer[]) is
'Decides many requests in one call, as ratelimit_acquire would one after another; with sizes, as ratelimit_acquire_all would.
Row n answers request n. A request with an error does not fail the other requests.
policies: the policy of each request. With sizes, of the elements of request 1, then of request 2, and so on.
keys: as many elements as policies.
costs: whole tokens, 0 or more, as many elements as policies. null: 1 for each element.
idempotency_keys: one for each request, or null. An element can be null.
sizes: the number of elements of each request, 1 to 1000. null: each element is a request.
request: the number of the request, from 1.
binding: as in ratelimit_acquire_all, from 1 within the request. null without sizes.
decisions: as in ratelimit_acquire_all. null without sizes.
error_code: the SQLSTATE of the error of this request, null for a decision. The columns of the decision are null
  beside an error.
Errors: 22023 for arrays that do not fit together, 25006 in a read-only transaction. error_code has 22023, RL001, RL002
  and RL004.
Locks: the buckets of granted requests and their idempotency keys until the transaction ends, in the order of
  ratelimit_acquire_all. If other sessions change a bucket during the call, buckets of denied requests can stay
  locked, too.
Writes: granted requests write their buckets and idempotency keys.
Role: application.';

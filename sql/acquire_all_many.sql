-- Shows the answers of acquire_batch to requests of several elements as rows.
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
'Decides many requests of several elements in one call, as ratelimit_acquire_all would one after another.
Row n answers request n. A request with an error does not fail the other requests.
policies: the elements of all requests: those of request 1, then those of request 2, and so on.
keys: as many elements as policies.
costs: whole tokens, 0 or more, as many elements as policies. null: 1 for each element.
sizes: the number of elements of each request, 1 to 1000.
idempotency_keys: one for each request, or null. An element can be null.
request: the number of the request, from 1.
allowed: whether every bucket covers its charge.
remaining: of the bucket of the binding element.
retry_after: the longest wait of the elements. Zero if the request is granted; null if an element is always denied.
reset_after: of the bucket of the binding element.
capacity: of the bucket of the binding element.
replayed: as in ratelimit_acquire_all.
shadowed: as in ratelimit_acquire_all.
binding: the number of the element within the request, from 1.
decisions: one decision for each element of the request.
error_code: the SQLSTATE of the error of this request, null for a decision. The columns of the decision are null
  beside an error.
Errors: 22023 for arrays that do not fit together, 25006 in a read-only transaction. error_code has 22023, RL001,
  RL002 and RL004.
Locks: the buckets of granted requests and their idempotency keys until the transaction ends, in the order of
  ratelimit_acquire_all. If other sessions change a bucket during the call, buckets of denied requests can stay
  locked, too.
Writes: granted requests write their buckets and idempotency keys.
Role: application.';

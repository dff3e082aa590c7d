-- Shows the answers of acquire_batch as rows. Requests on different buckets do not affect each other.
create or replace function ratelimit_acquire_many(
    policies         text[],
    keys             text[],
    costs            bigint[] default null,
    idempotency_keys text[]   default null)
  returns table (request bigint, allowed boolean, remaining bigint, retry_after interval, reset_after interval,
                 capacity bigint, replayed boolean, shadowed boolean,
                 error_code text, error_message text, error_detail text, error_hint text)
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
declare
  v_batch packed;
begin
  v_batch := acquire_batch(policies, keys, costs, null, ratelimit_acquire_many.idempotency_keys);
  return query
    select e.element, e.retry_us is not distinct from 0, e.remaining, duration(e.retry_us), duration(e.reset_us), e.capacity,
           coalesce(e.replayed, false), coalesce(e.shadowed, false), null::text, null::text, null::text, null::text
      from unnest(v_batch.elements, v_batch.remaining, v_batch.retry_after_us, v_batch.reset_after_us, v_batch.capacity,
                  v_batch.replayed, v_batch.shadowed)
           as e (element, remaining, retry_us, reset_us, capacity, replayed, shadowed)
    union all
    select r.refused, null, null, null, null, null, null, null, r.code, r.message, r.detail, r.hint
      from unnest(v_batch.refused, v_batch.error_codes, v_batch.error_messages, v_batch.error_details, v_batch.error_hints)
           as r (refused, code, message, detail, hint)
     order by 1;
end;
$$;
comment on function ratelimit_acquire_many(text[], text[], bigint[], text[]) is
'Decides many requests in one call, as ratelimit_acquire would one after another.
Row n answers request n. A request with an error does not fail the other requests.
policies: the policy of each request.
keys: as many elements as policies.
costs: whole tokens, 0 or more, as many elements as policies. null: 1 for each request.
idempotency_keys: as many elements as policies, or null. An element can be null.
request: the number of the request, from 1.
error_code: the SQLSTATE of the error of this request, null for a decision. The columns of the decision are null
  beside an error.
Errors: 22023 for arrays of different lengths, 25006 in a read-only transaction. error_code has 22023, RL001, RL002
  and RL004.
Locks: the buckets of granted requests and their idempotency keys until the transaction ends, in the order of
  ratelimit_acquire_all. If other sessions change a bucket during the call, buckets of denied requests can stay
  locked, too.
Writes: granted requests write their buckets and idempotency keys.
Role: application.';

-- Decides many requests in one call, as if each were acquired on its own, one after another; row n answers
-- request n. Within a bucket, requests are decided in the order given. Requests on different buckets do not
-- affect each other.
--
-- A request that ratelimit_acquire would refuse (unknown policy, bad argument, another cost under its idempotency
-- key, or a grant that was settled) has the error in its row and no decision. The other requests are decided all the same.
--
-- policies and keys are equally long, and so are costs and idempotency_keys unless null. Without costs
-- every cost is 1. Without idempotency_keys no request has one.
--
-- Locks and writes: as ratelimit_acquire for each, in the order that decide_in_order describes.
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
  'Decide many requests in one call, in the order given, each with its own decision or error.';

-- Decides many requests in one call, as if each were asked on its own, one after another. This is the compact form, for
-- clients that combine requests; ratelimit_acquire_many and ratelimit_acquire_all_many give rows to people. The answer is
-- one row of arrays, and times are microseconds.
--
-- Without sizes every element is a request. With sizes the first sizes[1] elements are request 1, and so on: a request is
-- granted when every bucket covers what is charged to it, and otherwise nothing is taken anywhere. Without costs every
-- cost is 1. idempotency_keys has one element for each request.
--
-- elements has the numbers of the elements that have a decision, in no particular order. remaining, retry_after_us (0 when
-- the decision allows, null for never), reset_after_us (null for never) and capacity are parallel to it, and so are replayed
-- and shadowed, which are null if no decision is. With sizes, requests has the numbers of the requests that have a decision;
-- requests_allowed, requests_replayed, requests_shadowed and bindings are parallel to it. bindings counts within the request.
-- refused has the numbers of the requests that have an error instead, or is null; the arrays of errors are parallel to it.
--
-- Locks and writes: as ratelimit_acquire, in the order that decide_in_order describes. So calls that are transactions of
-- their own never deadlock with each other. Several calls in one transaction can.
create or replace function ratelimit_acquire_packed(
    policies         text[],
    keys             text[],
    costs            bigint[]  default null,
    sizes            integer[] default null,
    idempotency_keys text[]    default null)
  returns ratelimit.packed
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
as $$
begin
  return acquire_batch(policies, keys, costs, sizes, idempotency_keys);
end;
$$;
comment on function ratelimit_acquire_packed(text[], text[], bigint[], integer[], text[]) is
  'Decide many requests in one call, for clients that combine them: one row of arrays.';

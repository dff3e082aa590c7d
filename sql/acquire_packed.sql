-- The answers of acquire_batch as they are: the compact form, for clients that combine requests. ratelimit_acquire_many gives rows to
-- people. The columns are explained at the type ratelimit.packed.
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
'Decides many requests in one call and returns one row of arrays, for clients that combine requests.
The arguments are those of ratelimit_acquire_many.
costs: whole tokens, 0 or more. null: 1 for each element.
sizes: the number of elements of each request, 1 to 1000. null: each element is a request.
idempotency_keys: one for each request, or null. An element can be null.
Errors: 22023 for arrays that do not fit together, 25006 in a read-only transaction. error_codes has 22023, RL001,
  RL002 and RL004.
Locks: the buckets of granted requests and their idempotency keys until the transaction ends, in the order of
  ratelimit_acquire_all. If other sessions change a bucket during the call, buckets of denied requests can stay
  locked, too. Calls that are transactions of their own never deadlock with each other.
Writes: granted requests write their buckets and idempotency keys.
Role: application.';

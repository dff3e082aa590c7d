-- A short form of answer(): after a grant, retry_after is 0 and the level is not below 0.
create or replace function ratelimit.granted(level bigint, reset_us bigint, capacity bigint)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (true, level / 1000000, interval '0', ratelimit.duration(reset_us), capacity, false)::ratelimit.decision
$$;
comment on function ratelimit.granted(bigint, bigint, bigint) is
  'The decision of a grant, from the level that it left and the microseconds until the bucket is full.';

create or replace function ratelimit.answer(level bigint, retry_us bigint, reset_us bigint, capacity bigint)
  returns ratelimit.decision language sql immutable parallel safe
as $$
  select (coalesce(retry_us = 0, false), ratelimit.whole_tokens(level), ratelimit.duration(retry_us),
          ratelimit.duration(reset_us), capacity, false)::ratelimit.decision
$$;
comment on function ratelimit.answer(bigint, bigint, bigint, bigint) is
  'A decision from the level now, retry_us (0 means allowed, null means never) and reset_us.';

create or replace function ratelimit.replay(granted ratelimit.idempotency_keys, cost bigint)
  returns ratelimit.decision language plpgsql stable
as $$
begin
  if granted.cost <> cost then
    raise exception 'idempotency key used before with another cost' using
      errcode = 'RL002',
      detail  = format('%L was granted with cost %s and comes back with cost %s.', granted.idempotency_key, granted.cost, cost),
      hint    = 'Repeat a request with its first cost, and give a new request a new key.';
  end if;
  return (true, granted.remaining, interval '0', granted.reset_after, granted.capacity, true)::ratelimit.decision;
end;
$$;
comment on function ratelimit.replay(ratelimit.idempotency_keys, bigint) is
  'The first answer given under an idempotency key, marked replayed; RL002 when the cost differs.';

-- ratelimit_acquire_many reports an error in the row of its request. So this function catches the errors of the
-- checks. granted is the remembered grant whose cost differs; null means that the policy is unknown, unless an
-- argument is bad.
create or replace function ratelimit.refusal(
    in  policy text, in key text, in cost bigint, in idempotency_key text, in granted ratelimit.idempotency_keys,
    out error_code text, out error_message text, out error_detail text, out error_hint text)
  language plpgsql
as $$
begin
  perform ratelimit.check_request(policy, key, cost, idempotency_key);
  if granted is null then
    perform ratelimit.unknown_policy(policy);
  else
    perform ratelimit.replay(granted, cost);
  end if;
exception when sqlstate '22023' or sqlstate 'RL001' or sqlstate 'RL002' then
  get stacked diagnostics error_code    = returned_sqlstate,
                          error_message = message_text,
                          error_detail  = pg_exception_detail,
                          error_hint    = pg_exception_hint;
end;
$$;
comment on function ratelimit.refusal(text, text, bigint, text, ratelimit.idempotency_keys) is
  'The error ratelimit_acquire would raise, as a row.';

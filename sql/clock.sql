-- The one clock. Volatile and without SET or SECURITY DEFINER, so that it is inlined and free.
create or replace function ratelimit.clock()
  returns timestamptz
  language sql
  volatile
  parallel safe
as $$
  select clock_timestamp()
$$;
comment on function ratelimit.clock() is
  'The time every decision is made by: the server''s wall clock, never the transaction''s.';

-- The one clock. It is inlined, and so costs nothing, because it has neither SET nor SECURITY DEFINER and
-- declares the volatility of clock_timestamp().
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

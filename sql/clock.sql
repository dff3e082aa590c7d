-- The clock of every decision, and of the rows that are due for clean-up. Only the deadline of clean-up uses
-- clock_timestamp() directly. The function is inlined, and so costs nothing, because it has neither SET nor
-- SECURITY DEFINER and declares the volatility of clock_timestamp().
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

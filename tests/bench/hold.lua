-- What Redis has to do to lend a slot until a lease ends.
--
-- KEYS[1] is a sorted set: the holders by the ends of their leases, in microseconds of Redis' clock. ARGV is the holder, the
-- capacity and the microseconds of a lease. ZREM releases. A holder that holds begins its lease anew.
--
-- The answer begins with 1 if the slot was lent, and with 0 if not. Then come the slots that remain.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local held, capacity = redis.call('ZCARD', KEYS[1]), tonumber(ARGV[2])
if held >= capacity and not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return {0, capacity - held}
end
held = held + redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[3] / 1000))
return {1, capacity - held}

-- What Redis has to do to take from several buckets if every one covers its cost, and otherwise from none.
--
-- KEYS are the buckets, each named once. ARGV has three numbers for each: its capacity, the microseconds in which it
-- gains a token, and the cost. A key holds the time at which its bucket is full again, in microseconds; a bucket
-- without a key is full. Times are exact below 2^53 microseconds, or 285 years.
--
-- The answer begins with 1 if the tokens were taken, and with 0 if not. Then come three numbers for each bucket: whole
-- tokens that remain, microseconds until it covers the cost, and microseconds until it is full.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local stored = redis.call('MGET', unpack(KEYS))

local allowed, before, after, waits = 1, {}, {}, {}
for i = 1, #KEYS do
  local capacity, gain, cost = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
  before[i] = math.max(tonumber(stored[i] or 0), now)
  after[i] = before[i] + cost * gain
  waits[i] = math.max(0, after[i] - capacity * gain - now)
  if waits[i] > 0 then
    allowed = 0
  end
end

local answer = {allowed}
for i = 1, #KEYS do
  local capacity, gain = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1])
  local full_at = before[i]
  if allowed == 1 then
    full_at = after[i]
    if full_at > now then
      redis.call('SET', KEYS[i], full_at, 'PX', math.ceil((full_at - now) / 1000))
    end
  end
  answer[3 * i - 1] = math.floor(capacity - (full_at - now) / gain)
  answer[3 * i] = waits[i]
  answer[3 * i + 1] = full_at - now
end
return answer

-- Renews a lease that is still held, in all the sets that it stands in. A lease that has been cleared away stays away:
-- its slot may be somebody else's by now.
--
-- KEYS  the sets
-- ARGV  the lease's id, its length in microseconds
-- reply the number of sets that still hold it

local held = 0
for _, key in ipairs(KEYS) do
  if redis.call('ZSCORE', key, ARGV[1]) then
    redis.call('ZADD', key, string.format('%d', now + ARGV[2]), ARGV[1])
    expire(key, now + ARGV[2])
    held = held + 1
  end
end
return held

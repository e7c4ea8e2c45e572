-- Says that a gateway lives, and counts those that do: while Redis is away each of them counts its share of the limits.
--
-- KEYS  the set of gateways, each with the moment from which it no longer counts
-- ARGV  the gateway's id, microseconds for which it counts
-- reply the number of gateways that count

local key, ends = KEYS[1], now + ARGV[2]
local gone = redis.call('ZCOUNT', key, '-inf', string.format('%d', now))
if gone > 0 then
  redis.call('ZREMRANGEBYRANK', key, '0', string.format('%d', gone - 1))
end
redis.call('ZADD', key, string.format('%d', ends), ARGV[1])
expire(key, ends)
return redis.call('ZCARD', key)

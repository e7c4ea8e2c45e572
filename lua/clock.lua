-- Time is Redis's own: read once, so that all limits of a request see the same moment. No gateway's clock has a say.
-- A point in time is in microseconds since the Unix epoch, about 1.8e15: below 2^53, so a Lua number holds it exactly.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- Every key ends when nothing in it counts any more. The time is absolute, from the same clock as the decision: a
-- relative one would be counted from a moment that may lie a little earlier, and a key that ends early forgets.
local function expire(key, at)
  redis.call('PEXPIREAT', key, string.format('%d', math.ceil(at / 1000) + 1))
end

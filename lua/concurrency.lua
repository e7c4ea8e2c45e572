-- Requests in flight: a sorted set of leases, each with the moment at which it ends if nobody renews it. A gateway that
-- is killed leaves its slots taken until that moment and no longer.
--
-- The key has a name of its own (`...:leases`), so that no string of another algorithm is ever met here.

local TRY_AGAIN = 1000000
-- Ended leases that one call clears away: a bound, whatever a dead gateway has left.
local CLEAR = 64

local concurrency = {}

-- The number of slots that are taken. Ended leases no longer count, cleared away or not.
function concurrency.open(key)
  return redis.call('ZCOUNT', key, '(' .. integer(now), '+inf')
end

-- Returns wait, remaining, next. A request takes one slot, whatever it costs.
function concurrency.judge(taken, rule)
  return taken < rule.limit and 0 or TRY_AGAIN, math.max(rule.limit - taken, 0), 0
end

-- Returns remaining, next.
function concurrency.charge(key, taken, rule)
  local ended = math.min(redis.call('ZCARD', key) - taken, CLEAR)
  if ended > 0 then
    redis.call('ZREMRANGEBYRANK', key, 0, integer(ended - 1))
  end
  redis.call('ZADD', key, integer(now + rule.lease), rule.id)
  expire(key, now + rule.lease)
  return math.max(rule.limit - taken - 1, 0), 0
end

-- A refusal takes no slot, so the leases end when they would have.
function concurrency.ends()
  return now
end

-- Requests in flight: a sorted set of leases, each with the moment at which it ends if nobody renews it. A gateway
-- that is killed leaves its slots taken until that moment and no longer.
--
-- The key has a name of its own (`...:leases`), so that no string of another algorithm is ever met here.

-- Arguments from the `at`-th on: limit, microseconds of a lease, its id. Returns the slots, judged. A request takes
-- one slot, whatever it costs. Ended leases no longer count, cleared away or not.
local function slots_look(key, at)
  local limit = tonumber(ARGV[at])
  local taken = redis.call('ZCOUNT', key, string.format('(%d', now), '+inf')
  return {
    form = 99, key = key, limit = limit, lease = tonumber(ARGV[at + 1]), id = ARGV[at + 2], taken = taken,
    wait = taken < limit and 0 or 1000000, remaining = math.max(limit - taken, 0), next = 0,
  }
end

local function slots_charge(slots)
  local key, ends = slots.key, now + slots.lease
  -- One call clears a few ended leases away: a bound, whatever a dead gateway has left.
  local ended = math.min(redis.call('ZCARD', key) - slots.taken, 64)
  if ended > 0 then
    redis.call('ZREMRANGEBYRANK', key, '0', string.format('%d', ended - 1))
  end
  redis.call('ZADD', key, string.format('%d', ends), slots.id)
  expire(key, ends)
  slots.remaining = math.max(slots.limit - slots.taken - 1, 0)
end

-- Settles a charge after the answer: the request turned out to cost less than was taken for it, or more. Nothing is
-- judged. Given back are units of that charge only, and only while they count; what comes on top is charged now.
--
-- KEYS  the limits that were charged, all with the same hash tag
-- ARGV  when that was (`now` of the reply), the units that were taken, those that the request did cost, then the
--       fields of each limit, as for decide.lua
-- reply the number of limits

local charged, reserved, spent = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local back, more = math.max(reserved - spent, 0), math.max(spent - reserved, 0)

local function settle_ring(log)
  if more > 0 then
    -- No exact limit is larger than 10,000: more units decide nothing, and the oldest make room.
    local units = math.min(more, 10000)
    log.dead = math.max(log.dead, log.count + units - 10000)
    if log.dead >= log.count then
      log.count = 0
    else
      log.oldest = ring_time(log, log.dead)
    end
    ring_charge(log, units)
    return
  end
  if log.count == 0 then
    return
  end
  -- The units of that charge stand next to each other, with its time.
  local tick = math.ceil((charged - log.base) / log.tick)
  local first, behind = ring_until(log, tick - 1), ring_until(log, tick)
  local units = math.min(back, behind - first)
  if units == 0 then
    return
  end
  local newer = log.count - behind
  if newer > 0 then
    local moved = ring_run(log, behind, newer)
    local place = (log.head + behind - units) % log.places
    local till_end = 4 * (log.places - place)
    redis.call('SETRANGE', log.key, string.format('%d', 30 + 4 * place), string.sub(moved, 1, till_end))
    if #moved > till_end then
      redis.call('SETRANGE', log.key, '30', string.sub(moved, till_end + 1))
    end
  end
  log.bytes, log.count = '', log.count - units
  log.newest = log.count > 0 and ring_time(log, log.count - 1) or 0
  redis.call('SETRANGE', log.key, '0', ring_header(log))
end

local function settle_buckets(log)
  if more > 0 then
    -- A bucket that holds the largest of all limits decides what any larger sum would.
    local here = log.used > 0 and log.current == log.last and buckets_sum(log, log.last) or 0
    local units = math.min(more, 100000000000000 - here)
    if units > 0 then
      buckets_charge(log, units)
    end
    return
  end
  local i = math.floor((charged - log.base) / log.width)
  if log.used > 0 and charged > log.moved and i >= log.oldest and i <= log.last then
    local sum = buckets_sum(log, i)
    local units = math.min(back, sum)
    buckets_put(log, i, sum - units)
    -- What has left the window stays in the total, and may be the oldest, until its place is taken.
    log.total, log.oldest = log.total - units, log.written
    redis.call('SETRANGE', log.key, '0', buckets_header(log))
  end
end

local function settle_bucket(bucket)
  if more > 0 or bucket.level < bucket.full then
    local deepest = math.floor((bucket.level - bucket.full + bucket_depth(bucket.rate)) / bucket.unit)
    bucket.level = math.min(bucket.level + back * bucket.unit, bucket.full) - math.min(more, deepest) * bucket.unit
    bucket_charge(bucket, 0)
  end
end

local function settle_quota(used)
  if more > 0 then
    quota_charge(used, math.min(more, 9007199254740991 - used.units))
  elseif used.units > 0 and used.start <= charged then
    quota_charge(used, -math.min(back, used.units))
  end
end

local at = 4
for i = 1, #KEYS do
  local key, form = KEYS[i], string.byte(ARGV[at])
  local state
  if form == 119 then
    state = ring_look(key, at + 1, 1)
    at = at + 4
  elseif form == 98 then
    state = buckets_look(key, at + 1, 1)
    at = at + 4
  elseif form == 116 then
    state = bucket_look(key, at + 1, 1)
    at = at + 4
  elseif form == 113 then
    state = quota_look(key, at + 1, 1)
    at = at + 6
  else
    error('TOLLGATE slots are given back, and not settled')
  end
  if state.form == 119 then
    settle_ring(state)
  elseif state.form == 98 then
    settle_buckets(state)
  elseif state.form == 116 then
    settle_bucket(state)
  else
    settle_quota(state)
  end
end
return #KEYS

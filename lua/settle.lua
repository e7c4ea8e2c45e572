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
    ring_put(log, behind - units, ring_run(log, behind, newer))
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
  if form == 119 then
    local log = ring_look(key, at + 1, 1)
    -- An edited window may have left it in buckets.
    if log.form == 119 then
      settle_ring(log)
    else
      settle_buckets(log)
    end
  elseif form == 98 then
    settle_buckets(buckets_look(key, at + 1, 1))
  elseif form == 116 then
    settle_bucket(bucket_look(key, at + 1, 1))
  elseif form == 113 then
    settle_quota(quota_look(key, at + 1, 1))
  else
    error('TOLLGATE slots are given back, and not settled')
  end
  at = at + (form == 113 and 6 or 4)
end
return #KEYS

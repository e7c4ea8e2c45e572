-- What is needed once in a long while: a limit was edited and its log changes form, Redis's clock has stepped back,
-- a ring has grown old. Written at once, charge or not. The usual script leaves this file out; see state.lua.

rare = {}

-- Admissions as { time, units }, oldest first, those that still count in a window of `per`.
local function history_of(form, log, per)
  local history = {}
  local function remember(at, units)
    if units > 0 and at + per > now then
      -- Rounded up to a tick, the time of an admission may lie a little ahead; it was not after now.
      history[#history + 1] = { math.min(at, now), units }
    end
  end
  if form == 119 then
    for i = 0, log.count - 1 do
      remember(log.base + ring_time(log, i) * log.tick, 1)
    end
  elseif log.used > 0 then
    for i = log.oldest, log.last do
      -- All that is known is the bucket; its end is taken, so that nothing is forgotten too early.
      remember(log.base + math.min((i + 1) * log.width - 1, log.newest), buckets_sum(log, i))
    end
  end
  return history
end

-- Where the clock has stepped back behind the newest admission, time stands still for the log until it goes on from
-- there.
local function stand_still(form, log)
  local newest = form == 119 and log.newest * log.tick or log.newest
  if form == 119 and math.ceil((now - log.base) / log.tick) >= log.newest or now - log.base >= newest then
    return
  end
  if form == 119 and (log.count > 0 and ring_time(log, log.count - 1) or 0) ~= log.newest then
    error('TOLLGATE damaged state')
  end
  if form == 98 then
    log.moved = math.max(log.moved, log.base + newest)
  end
  log.base = now - newest
  redis.call('SETRANGE', log.key, '0', form == 119 and ring_header(log) or buckets_header(log))
  expire(log.key, now + log.per * 2)
end

-- Writes a ring whole, from its times. SET takes the key's expiry away, so it gets one again.
local function rewrite_ring(log, times)
  log.head, log.count, log.places, log.newest = 0, #times, 8, times[#times] or 0
  while log.places < #times do
    log.places = log.places * 2
  end
  local packed = {}
  for i, time in ipairs(times) do
    packed[i] = struct.pack('>I4', time)
  end
  log.bytes = ring_header(log) .. table.concat(packed)
  redis.call('SET', log.key, log.bytes)
  expire(log.key, now + log.per * 2)
end

local function ring_of(history, log)
  local times = {}
  log.base = history[1] and history[1][1] or now
  for _, admission in ipairs(history) do
    for _ = 1, admission[2] do
      times[#times + 1] = math.ceil((admission[1] - log.base) / log.tick)
    end
  end
  rewrite_ring(log, times)
end

local function buckets_of(history, log)
  local sums, packed = {}, {}
  log.base, log.newest, log.total, log.oldest = history[1] and history[1][1] or now, 0, 0, 0
  log.moved = now
  for _, admission in ipairs(history) do
    log.newest = admission[1] - log.base
    -- All of it lies within one window, and so in 61 buckets.
    local place = math.floor(log.newest / log.width) % 61
    -- No limit is larger than 1e14, so a bucket of so many decides what any larger sum would, which has no room.
    local sum = math.min((sums[place] or 0) + admission[2], 100000000000000)
    log.total = log.total + sum - (sums[place] or 0)
    sums[place] = sum
  end
  for place = 0, 60 do
    packed[place + 1] = struct.pack('>I6', sums[place] or 0)
  end
  log.bytes = buckets_header(log) .. table.concat(packed)
  redis.call('SET', log.key, log.bytes)
  expire(log.key, now + log.per * 2)
end

-- Brings what is stored into a form that an exact window can use, which no unit is lost by: the limit may be raised
-- again. Says whether that are buckets. `log` is the ring as read, if it was one.
function rare.ring(log, form)
  if form == 98 then
    local found = { key = log.key, per = log.per, bytes = redis.call('GETRANGE', log.key, '0', '415') }
    buckets_read(found)
    stand_still(form, found)
    buckets_use(found)
    local width = math.ceil(log.per / 60)
    if found.width >= width then
      return found.used > 0
    end
    local history = history_of(form, found, log.per)
    if #history == 0 then
      ring_of(history, log)
      return false
    end
    found.width = width
    buckets_of(history, found)
    return true
  end
  stand_still(form, log)
  if log.tick < log.fresh_tick then
    local history = history_of(form, log, log.per)
    log.tick = log.fresh_tick
    ring_of(history, log)
  elseif math.ceil((now - log.base) / log.tick) > 3221225472 then
    -- The base moves to the oldest admission that counts.
    local times, first = {}, ring_until(log, (now - log.per - log.base) / log.tick)
    if first < log.count then
      local shift = ring_time(log, first)
      for i = first, log.count - 1 do
        times[#times + 1] = ring_time(log, i) - shift
      end
      log.base = log.base + shift * log.tick
      rewrite_ring(log, times)
    end
  end
  return false
end

-- Brings what is stored into buckets of the right width. `log` is the buckets as read, if it was some.
function rare.buckets(log, form)
  local found, width = log, math.ceil(log.per / 60)
  if form == 119 then
    found = { key = log.key, per = log.per, bytes = log.bytes }
    ring_read(found)
  end
  stand_still(form, found)
  if form == 119 or log.width < width then
    if form == 98 then
      buckets_use(log)
    end
    local history = history_of(form, found, log.per)
    log.width = width
    buckets_of(history, log)
  end
end

-- Nothing is credited for a step back, and refilling goes on from now. The level stays in the units it was written in:
-- what an edited limit makes of it is not for ever.
function rare.bucket(bucket, unit, level)
  redis.call('SET', bucket.key, struct.pack('>BBddd', 1, 116, unit, level, now))
  local worth = unit == bucket.unit and level or math.floor(level / unit) * bucket.unit
  expire(bucket.key, now + math.ceil((bucket.full - math.min(worth, bucket.full)) / bucket.rate))
end

-- A clock that has stepped back by more than a period: what was used counts in this one, and not in all that come until
-- the clock is there again.
function rare.quota(used, units)
  redis.call('SET', used.key, struct.pack('>BBdd', 1, 113, used.start, units))
  expire(used.key, used.finish)
  return used.start
end

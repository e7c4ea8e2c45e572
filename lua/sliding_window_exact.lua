-- The exact sliding window of src/limit/algorithm/sliding_window.rs, which has the proof: a ring of the last
-- admissions.
--
-- 'w': a header of 30 bytes, then the times of admissions, 4 bytes each, in ticks since `base`.
--     header: version, form, head, count, places, newest, tick (u32 each), base (f64)

-- The time of the i-th admission, the oldest being 0.
local function ring_time(log, i)
  local from = 30 + 4 * ((log.head + i) % log.places)
  local bytes = log.bytes
  if from + 4 <= #bytes then
    return (struct.unpack('>I4', bytes, from + 1))
  end
  bytes = redis.call('GETRANGE', log.key, string.format('%d', from), string.format('%d', from + 3))
  if #bytes < 4 then
    error('TOLLGATE damaged state')
  end
  return (struct.unpack('>I4', bytes))
end

-- How many admissions, oldest first, were at `horizon` (in ticks) or before: a galloping search, so the common answers
-- (none, few) are found at once and any answer in 2 * log2(count) reads.
local function ring_until(log, horizon)
  local low, high, step = 0, 0, 1
  while high < log.count and ring_time(log, high) <= horizon do
    low, high, step = high + 1, high + step, step * 2
  end
  high = math.min(high, log.count)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if ring_time(log, middle) <= horizon then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- Reads the header from `log.bytes`, the first 286 bytes. The largest ring has 2^14 places; those that were never used,
-- at its end, may be missing.
local function ring_read(log)
  if #log.bytes < 30 then
    error('TOLLGATE damaged state')
  end
  local _
  _, _, log.head, log.count, log.places, log.newest, log.tick, log.base = struct.unpack('>BBI4I4I4I4I4d', log.bytes)
  if not (log.places >= 8 and log.places <= 16384 and log.count <= log.places and log.head < log.places
    and log.tick >= 1 and log.tick <= 1048576 and math.abs(log.base) <= 4503599627370496
    and #log.bytes >= math.min(286, 30 + 4 * math.min(log.head + log.count, log.places))) then
    error('TOLLGATE damaged state')
  end
end

local function ring_header(log)
  return struct.pack('>BBI4I4I4I4I4d', 1, 119, log.head, log.count, log.places, log.newest, log.tick, log.base)
end

-- Arguments from the `at`-th on: limit, tick, window. Returns the log, judged; nothing when `rare` is needed and not
-- here. A log that an edited limit has left in buckets, or in a coarser tick, stays in them until nothing in it counts:
-- two limits that use it in turns must not make it over at every call.
local function ring_look(key, at, cost)
  local limit, tick, per = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  -- The header and 64 places: callers of small limits need nothing more.
  local log = {
    form = 119, key = key, limit = limit, per = per, fresh_tick = tick, tick = tick,
    bytes = redis.call('GETRANGE', key, '0', '285'),
    head = 0, count = 0, places = 0, newest = 0, base = 0,
    dead = 0, oldest = 0, wait = 0, remaining = limit, next = 0,
  }
  local form = form_of(log.bytes)
  local odd = form == 98
  if form == 119 then
    ring_read(log)
    -- In ticks, rounded up. A base that lies far behind moves long before an offset outgrows a u32.
    local ticks = math.ceil((now - log.base) / log.tick)
    odd = log.tick < tick or ticks < log.newest or ticks > 3221225472
  elseif form and not odd then
    error('TOLLGATE damaged state')
  end
  if odd then
    if not rare then
      return nil
    end
    if rare.ring(log, form) then
      return buckets_look(key, at, cost)
    end
  end
  if log.count > 0 then
    log.dead = ring_until(log, (now - per - log.base) / log.tick)
    local used, leaves = log.count - log.dead, log.base + per - now
    if used == 0 then
      log.count = 0
    else
      log.oldest = ring_time(log, log.dead)
      log.remaining, log.next = math.max(limit - used, 0), leaves + log.oldest * log.tick
      local excess = used + cost - limit
      if excess > 0 and cost <= limit then
        log.wait = leaves + ring_time(log, log.dead + excess - 1) * log.tick
      end
    end
  end
  if cost > limit then
    log.wait = -1
  end
  return log
end

-- `n` admissions from the i-th on, as bytes: two runs at most.
local function ring_run(log, i, n)
  local first = 30 + 4 * ((log.head + i) % log.places)
  local last, edge = first + 4 * n - 1, 29 + 4 * log.places
  local bytes = redis.call('GETRANGE', log.key, string.format('%d', first), string.format('%d', math.min(last, edge)))
  if last > edge then
    bytes = bytes .. redis.call('GETRANGE', log.key, '30', string.format('%d', last - edge + 29))
  end
  if #bytes < 4 * n then
    error('TOLLGATE damaged state')
  end
  return bytes
end

-- Writes admissions, as bytes, at the i-th place and behind it: two runs at most.
local function ring_put(log, i, bytes)
  local place = (log.head + i) % log.places
  local till_end = 4 * (log.places - place)
  if #bytes > till_end then
    redis.call('SETRANGE', log.key, '30', string.sub(bytes, till_end + 1))
    bytes = string.sub(bytes, 1, till_end)
  end
  redis.call('SETRANGE', log.key, string.format('%d', 30 + 4 * place), bytes)
end

-- Room for `cost` more behind the live admissions: a ring twice as large.
local function ring_grow(log, cost)
  local live = ring_run(log, 0, log.count)
  log.head = 0
  while log.places < log.count + cost do
    log.places = log.places * 2
  end
  redis.call('SET', log.key, ring_header(log) .. live)
end

local function ring_charge(log, cost)
  local key, newest = log.key, 0
  if log.count == 0 then
    -- Nothing counts: a new, small ring that begins now.
    log.places, log.tick = 8, log.fresh_tick
    while log.places < cost do
      log.places = log.places * 2
    end
    log.head, log.count, log.newest, log.base, log.oldest = 0, cost, 0, now, 0
    redis.call('SET', key, ring_header(log) .. string.rep('\0', 4 * cost))
  else
    log.head, log.count = (log.head + log.dead) % log.places, log.count - log.dead
    if log.count + cost > log.places then
      ring_grow(log, cost)
    end
    newest = math.ceil((now - log.base) / log.tick)
    ring_put(log, log.count, string.rep(struct.pack('>I4', newest), cost))
    log.count, log.newest = log.count + cost, newest
    redis.call('SETRANGE', key, '0', ring_header(log))
  end
  local leaves = log.base + log.per
  expire(key, leaves + newest * log.tick)
  log.remaining, log.next = math.max(log.limit - log.count, 0), leaves + log.oldest * log.tick - now
end

-- When the last admission no longer counts.
local function ring_ends(log)
  return log.count > 0 and log.base + log.newest * log.tick + log.per or now
end

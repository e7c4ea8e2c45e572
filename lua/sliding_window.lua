-- The sliding window, in the two forms of src/limit/algorithm/sliding_window.rs, which has the proofs.
--
-- 'w', exact: a ring of admission times, 4 bytes each, in ticks since `base`.
--     header: version, form, head, count, places, newest, tick (u32 each), base (f64)
-- 'b', bucketed: sums of admissions in 61 buckets of 6 bytes.
--     header: version, form, width, base, newest, total (f64 each)

local WINDOW = string.byte('w')
local RING, RING_SIZE = '>BBI4I4I4I4I4d', 30
-- Places that are read together with the header: callers of small limits need nothing more.
local NEAR = 64
-- A ring older than so many ticks moves its base, long before an offset outgrows a u32.
local REBASE = 3 * 2 ^ 30

local BUCKETED = string.byte('b')
local BUCKETS, BUCKETS_SIZE = '>BBdddd', 34
local COUNTED = 61
local COUNT, COUNT_SIZE = '>I6', 6

local function read(key, from, length)
  return redis.call('GETRANGE', key, integer(from), integer(from + length - 1))
end

local function write(key, from, bytes)
  redis.call('SETRANGE', key, integer(from), bytes)
end

-- The time of the i-th admission, the oldest being 0.
local function ring_time(ring, i)
  local place = (ring.head + i) % ring.places
  local from = RING_SIZE + 4 * place
  if from + 4 <= #ring.bytes then
    return (struct.unpack('>I4', ring.bytes, from + 1))
  end
  return (struct.unpack('>I4', read(ring.key, from, 4)))
end

local function ring_header(ring)
  return struct.pack(RING, VERSION, WINDOW, ring.head, ring.count, ring.places, ring.newest, ring.tick, ring.base)
end

-- Writes a ring whole, from its times. SET takes the key's expiry away; who calls this gives it one again.
local function ring_rewrite(ring, times)
  ring.head, ring.count = 0, #times
  ring.places = 8
  while ring.places < #times + 1 do
    ring.places = ring.places * 2
  end
  local packed = {}
  for i, time in ipairs(times) do
    packed[i] = struct.pack('>I4', time)
  end
  ring.bytes = ring_header(ring) .. table.concat(packed)
  redis.call('SET', ring.key, ring.bytes)
end

local function ring_times(ring)
  local times = {}
  for i = 0, ring.count - 1 do
    times[#times + 1] = ring_time(ring, i)
  end
  return times
end

-- `now` in ticks, rounded up: what is stored is never earlier than what happened.
local function ring_now(ring)
  return math.ceil((now - ring.base) / ring.tick)
end

-- How many of the oldest admissions have left the window: a galloping search, so the common answers (none, few) are
-- found at once and any answer in 2 * log2(count) reads.
local function ring_dead(ring, per)
  local horizon = (now - per - ring.base) / ring.tick
  local low, high, step = 0, 0, 1
  while high < ring.count and ring_time(ring, high) <= horizon do
    low, high, step = high + 1, high + step, step * 2
  end
  if high > ring.count then
    high = ring.count
  end
  while low < high do
    local middle = math.floor((low + high) / 2)
    if ring_time(ring, middle) <= horizon then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local function ring_open(key, bytes)
  local _, _, head, count, places, newest, tick, base = struct.unpack(RING, bytes)
  return {
    key = key, bytes = bytes,
    head = head, count = count, places = places, newest = newest, tick = tick, base = base,
  }
end

local function buckets_header(buckets)
  return struct.pack(BUCKETS, VERSION, BUCKETED, buckets.width, buckets.base, buckets.newest, buckets.total)
end

local function bucket_count(buckets, i)
  return (struct.unpack(COUNT, buckets.bytes, BUCKETS_SIZE + COUNT_SIZE * (i % COUNTED) + 1))
end

local function buckets_open(key)
  local bytes = read(key, 0, BUCKETS_SIZE + COUNT_SIZE * COUNTED)
  local _, _, width, base, newest, total = struct.unpack(BUCKETS, bytes)
  return { key = key, bytes = bytes, width = width, base = base, newest = newest, total = total }
end

-- The first and the last bucket that count at `now`; the first is beyond the last when none does.
local function buckets_span(buckets)
  local current, last = math.floor((now - buckets.base) / buckets.width), math.floor(buckets.newest / buckets.width)
  return math.max(current - COUNTED + 1, last - COUNTED + 1, 0), last
end

-- Admits `units` at a time relative to the base, clearing the buckets between. `counts` is by place.
local function buckets_add(buckets, counts, at, units)
  local bucket, last = math.floor(at / buckets.width), math.floor(buckets.newest / buckets.width)
  for i = last + 1, math.min(bucket, last + COUNTED) do
    buckets.total = buckets.total - counts[i % COUNTED + 1]
    counts[i % COUNTED + 1] = 0
  end
  buckets.newest = math.max(buckets.newest, at)
  buckets.total = buckets.total + units
  counts[bucket % COUNTED + 1] = counts[bucket % COUNTED + 1] + units
end

local function buckets_rewrite(buckets, counts)
  local packed = {}
  for i = 1, COUNTED do
    packed[i] = struct.pack(COUNT, counts[i])
  end
  buckets.bytes = buckets_header(buckets) .. table.concat(packed)
  redis.call('SET', buckets.key, buckets.bytes)
end

local function no_counts()
  local counts = {}
  for i = 1, COUNTED do
    counts[i] = 0
  end
  return counts
end

-- Admissions as { time, units }, oldest first, those that still count in a window of `per`.
local function history_of(form, log, per)
  local history = {}
  local function remember(at, units)
    if units > 0 and at + per > now then
      -- Rounded up to a tick, the time of an admission may lie a little ahead; it was not after now.
      history[#history + 1] = { math.min(at, now), units }
    end
  end
  if form == 'w' then
    for i = 0, log.count - 1 do
      remember(log.base + ring_time(log, i) * log.tick, 1)
    end
  else
    local first, last = buckets_span(log)
    for i = first, last do
      -- All that is known is the bucket; its end is taken, so that nothing is forgotten too early.
      remember(log.base + math.min((i + 1) * log.width - 1, log.newest), bucket_count(log, i))
    end
  end
  return history
end

-- The log of an edited limit, in its new form.
local function converted(key, rule, history)
  local oldest = history[1] and history[1][1] or now
  if rule.form == 'w' then
    local units, times = 0, {}
    for _, admission in ipairs(history) do
      units = units + admission[2]
    end
    -- Only the newest `limit` units can still decide anything.
    local spare = math.max(units - rule.limit, 0)
    for _, admission in ipairs(history) do
      local dropped = math.min(spare, admission[2])
      spare = spare - dropped
      for _ = 1, admission[2] - dropped do
        times[#times + 1] = math.ceil((admission[1] - oldest) / rule.grain)
      end
    end
    local ring = { key = key, newest = times[#times] or 0, tick = rule.grain, base = oldest }
    ring_rewrite(ring, times)
    return ring
  end
  local buckets = { key = key, width = rule.grain, base = oldest, newest = 0, total = 0 }
  local counts = no_counts()
  for _, admission in ipairs(history) do
    buckets_add(buckets, counts, admission[1] - oldest, admission[2])
  end
  buckets_rewrite(buckets, counts)
  return buckets
end

local sliding_window = {}

-- Reads the log, in the rule's form. Two rare things are written back at once, charge or not: a limit that was edited
-- changes form, and where Redis's clock has stepped back, time stands still for the log until it goes on from there.
function sliding_window.open(key, rule)
  local bytes = read(key, 0, RING_SIZE + 4 * NEAR)
  local form = form_of(bytes)
  local log, grain, newest, stepped_back
  if form == 'w' then
    log = ring_open(key, bytes)
    grain, newest, stepped_back = log.tick, log.newest * log.tick, ring_now(log) < log.newest
  elseif form == 'b' then
    log = buckets_open(key)
    grain, newest, stepped_back = log.width, log.newest, now - log.base < log.newest
  else
    return nil
  end
  if stepped_back then
    log.base = now - newest
    write(key, 0, form == 'w' and ring_header(log) or buckets_header(log))
    expire(key, now + rule.per * 2)
  end
  if form ~= rule.form or grain ~= rule.grain then
    log = converted(key, rule, history_of(form, log, rule.per))
    expire(key, now + rule.per * 2)
  end
  return log
end

local function ring_judge(ring, rule, cost)
  local dead = ring_dead(ring, rule.per)
  ring.dead = dead
  local used = ring.count - dead
  local function until_left(i)
    return ring.base + ring_time(ring, i) * ring.tick + rule.per - now
  end
  local wait, excess = 0, used + cost - rule.limit
  if cost > rule.limit then
    wait = -1
  elseif excess > 0 then
    wait = until_left(dead + excess - 1)
  end
  return wait, math.max(rule.limit - used, 0), used > 0 and until_left(dead) or 0
end

local function buckets_judge(buckets, rule, cost)
  local first, last = buckets_span(buckets)
  local used, current = buckets.total, now - buckets.base
  for i = math.max(last - COUNTED + 1, 0), math.min(first - 1, last) do
    used = used - bucket_count(buckets, i)
  end
  local function until_left(i)
    return (i + COUNTED) * buckets.width - current
  end
  local wait, excess = 0, used + cost - rule.limit
  if cost > rule.limit then
    wait = -1
  elseif excess > 0 then
    local freed, i = 0, first - 1
    while freed < excess do
      i = i + 1
      freed = freed + bucket_count(buckets, i)
    end
    wait = until_left(i)
  end
  if used == 0 then
    return wait, rule.limit, 0
  end
  buckets.oldest = first
  while bucket_count(buckets, buckets.oldest) == 0 do
    buckets.oldest = buckets.oldest + 1
  end
  return wait, math.max(rule.limit - used, 0), until_left(buckets.oldest)
end

-- Returns wait (-1: never), remaining, next.
function sliding_window.judge(log, rule, cost)
  if not log then
    return cost > rule.limit and -1 or 0, rule.limit, 0
  end
  return (rule.form == 'w' and ring_judge or buckets_judge)(log, rule, cost)
end

-- Room for `cost` more behind the live admissions, or a ring twice as large.
local function ring_grow(ring, cost)
  local need = ring.count + cost
  if need <= ring.places then
    return
  end
  local places = ring.places
  while places < need do
    places = places * 2
  end
  -- The live admissions, in order, as bytes: at most two runs.
  local till_end = math.min(ring.count, ring.places - ring.head)
  local bytes = read(ring.key, RING_SIZE + 4 * ring.head, 4 * till_end)
  if till_end < ring.count then
    bytes = bytes .. read(ring.key, RING_SIZE, 4 * (ring.count - till_end))
  end
  ring.head, ring.places = 0, places
  redis.call('SET', ring.key, ring_header(ring) .. bytes)
  ring.bytes = ''
end

local function ring_charge(ring, rule, cost)
  ring.head, ring.count = (ring.head + ring.dead) % ring.places, ring.count - ring.dead
  local oldest
  if ring.count == 0 then
    -- Nothing counts any more: a new, small ring that begins now.
    ring.base, ring.newest, oldest = now, 0, 0
    ring_rewrite(ring, {})
  else
    if ring_now(ring) > REBASE then
      local times = ring_times(ring)
      local shift = times[1]
      for i = 1, #times do
        times[i] = times[i] - shift
      end
      ring.base, ring.newest = ring.base + shift * ring.tick, ring.newest - shift
      ring_rewrite(ring, times)
    end
    oldest = ring_time(ring, 0)
  end
  ring_grow(ring, cost)
  ring.newest = ring_now(ring)
  local entry = struct.pack('>I4', ring.newest)
  local place = (ring.head + ring.count) % ring.places
  local till_end = math.min(cost, ring.places - place)
  write(ring.key, RING_SIZE + 4 * place, string.rep(entry, till_end))
  if till_end < cost then
    write(ring.key, RING_SIZE, string.rep(entry, cost - till_end))
  end
  ring.count = ring.count + cost
  write(ring.key, 0, ring_header(ring))
  expire(ring.key, ring.base + ring.newest * ring.tick + rule.per)
  return math.max(rule.limit - ring.count, 0), ring.base + oldest * ring.tick + rule.per - now
end

local function buckets_charge(buckets, rule, cost)
  local at = now - buckets.base
  local current, last = math.floor(at / buckets.width), math.floor(buckets.newest / buckets.width)
  if current == last and buckets.bytes ~= '' then
    -- The common case: the bucket of the last admission is still the current one.
    buckets.newest, buckets.total = at, buckets.total + cost
    local count = struct.pack(COUNT, bucket_count(buckets, last) + cost)
    write(buckets.key, BUCKETS_SIZE + COUNT_SIZE * (last % COUNTED), count)
    write(buckets.key, 0, buckets_header(buckets))
  else
    local counts = no_counts()
    if buckets.bytes ~= '' then
      for i = 0, COUNTED - 1 do
        counts[i + 1] = bucket_count(buckets, i)
      end
    end
    buckets_add(buckets, counts, at, cost)
    buckets_rewrite(buckets, counts)
  end
  local left = (current + COUNTED) * buckets.width - at
  expire(buckets.key, now + left)
  -- Behind the charge the counted buckets are those of the total.
  local next = buckets.oldest and (buckets.oldest + COUNTED) * buckets.width - at or left
  return math.max(rule.limit - buckets.total, 0), next
end

-- Returns remaining, next.
function sliding_window.charge(key, log, rule, cost)
  if rule.form == 'w' then
    local fresh = {
      key = key, bytes = '',
      head = 0, count = 0, dead = 0, places = 8, newest = 0, tick = rule.grain, base = now,
    }
    return ring_charge(log or fresh, rule, cost)
  end
  local fresh = { key = key, bytes = '', width = rule.grain, base = now, newest = 0, total = 0 }
  return buckets_charge(log or fresh, rule, cost)
end

-- When the last admission no longer counts.
function sliding_window.ends(log, rule)
  if rule.form == 'w' then
    return log.base + log.newest * log.tick + rule.per
  end
  return log.base + (math.floor(log.newest / log.width) + COUNTED) * log.width
end

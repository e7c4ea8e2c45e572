-- The sliding window above 10,000 of src/limit/algorithm/sliding_window.rs, which has the proof: sums of admissions
-- in 61 buckets.
--
-- 'b': a header of 50 bytes, then the buckets' sums, 6 bytes each; bucket i at place i % 61.
--     header: version, form, width, base, newest, total, oldest, moved (f64 each)
-- Units of a charge at `moved` or before do not stand where their time says: they have been moved since.

local function buckets_sum(log, i)
  return (struct.unpack('>I6', log.bytes, 51 + 6 * (i % 61)))
end

local function buckets_put(log, i, sum)
  redis.call('SETRANGE', log.key, string.format('%d', 50 + 6 * (i % 61)), struct.pack('>I6', sum))
end

local function buckets_header(log)
  return struct.pack(
    '>BBdddddd', 1, 98, log.width, log.base, log.newest, log.total, log.oldest, log.moved)
end

-- Reads the header from `log.bytes`, which are all there are.
local function buckets_read(log)
  if #log.bytes < 416 then
    error('TOLLGATE damaged state')
  end
  local _
  _, _, log.width, log.base, log.newest, log.total, log.oldest, log.moved =
    struct.unpack('>BBdddddd', log.bytes)
  if not (log.width >= 1 and log.width <= 4503599627370496 and math.abs(log.base) <= 4503599627370496
    and log.newest >= 0 and log.newest <= 4503599627370496 and log.total >= 0 and log.total <= 9007199254740991
    and log.oldest >= 0 and log.oldest <= log.newest / log.width
    and log.moved >= 0 and log.moved <= 4503599627370496) then
    error('TOLLGATE damaged state')
  end
end

-- Finds what counts: the units, the bucket of now, those of the newest and of the oldest admission.
local function buckets_use(log)
  log.current, log.last = math.floor((now - log.base) / log.width), math.floor(log.newest / log.width)
  -- Buckets that count behind that of now: 60, or fewer for a shorter window in buckets that a longer one has left.
  log.back = math.min(math.ceil(log.per / log.width), 60)
  log.kept = log.current - log.last < 61 and log.total or 0
  log.written = log.oldest
  if log.kept > 0 then
    -- The buckets that are kept no longer are those whose places the buckets since `last` take.
    for i = log.last + 1, log.current do
      log.kept = log.kept - buckets_sum(log, i)
    end
    if log.kept < 0 then
      error('TOLLGATE damaged state')
    end
    log.first = math.max(log.oldest, log.current - 60)
    log.oldest = math.max(log.first, log.current - log.back)
    while log.oldest < log.last and buckets_sum(log, log.oldest) == 0 do
      log.oldest = log.oldest + 1
    end
  end
  log.used = log.kept
  if log.kept > 0 and log.back < 60 then
    log.used = 0
    for i = log.oldest, log.last do
      log.used = log.used + buckets_sum(log, i)
    end
  end
end

-- Arguments from the `at`-th on: limit, width, window. Returns the log, judged; nothing when `rare` is needed and
-- not here.
function buckets_look(key, at, cost)
  local limit, per = tonumber(ARGV[at]), tonumber(ARGV[at + 2])
  -- As the argument between them says, where it is not an exact window that has to do with buckets for a while.
  local width = math.ceil(per / 60)
  local log = {
    form = 98, key = key, limit = limit, per = per, fresh_width = width, width = width,
    bytes = redis.call('GETRANGE', key, '0', '415'),
    base = now, newest = 0, total = 0, oldest = 0, moved = 0,
    used = 0, kept = 0, current = 0, last = 0, back = 60, first = 0, written = 0,
    wait = 0, remaining = limit, next = 0,
  }
  local form = form_of(log.bytes)
  local odd = form == 119
  if form == 98 then
    buckets_read(log)
    odd = log.width < width or now - log.base < log.newest
  elseif form and not odd then
    error('TOLLGATE damaged state')
  end
  if odd then
    if not rare then
      return nil
    end
    rare.buckets(log, form)
  end
  buckets_use(log)
  if log.used > 0 then
    local past = now - log.base
    log.remaining, log.next = math.max(limit - log.used, 0), (log.oldest + log.back + 1) * log.width - past
    local excess = log.used + cost - limit
    if excess > 0 and cost <= limit then
      local i, freed = log.oldest, buckets_sum(log, log.oldest)
      while freed < excess and i < log.last do
        i = i + 1
        freed = freed + buckets_sum(log, i)
      end
      log.wait = (i + log.back + 1) * log.width - past
    end
  end
  if cost > limit then
    log.wait = -1
  end
  return log
end

local function buckets_charge(log, cost)
  local key = log.key
  if log.used == 0 then
    -- Nothing counts: new buckets that begin now.
    log.base, log.newest, log.total, log.oldest, log.current, log.moved = now, 0, cost, 0, 0, 0
    log.width, log.back = log.fresh_width, 60
    redis.call('SET', key, buckets_header(log) .. struct.pack('>I6', cost) .. string.rep('\0', 360))
  else
    local sum = cost
    if log.current == log.last then
      sum = sum + buckets_sum(log, log.last)
    end
    for i = log.last + 1, log.current - 1 do
      buckets_put(log, i, 0)
    end
    buckets_put(log, log.current, sum)
    local oldest = log.oldest
    log.newest, log.total, log.oldest = now - log.base, log.kept + cost, log.first
    redis.call('SETRANGE', key, '0', buckets_header(log))
    log.oldest = oldest
  end
  expire(key, log.base + (log.current + 61) * log.width)
  log.remaining = math.max(log.limit - log.used - cost, 0)
  log.next = log.base + (log.oldest + log.back + 1) * log.width - now
end

-- When the last admission no longer counts.
local function buckets_ends(log)
  return log.used > 0 and log.base + (log.last + 61) * log.width or now
end

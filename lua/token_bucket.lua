-- The token bucket of src/limit/algorithm/token_bucket.rs, which has the promise and the units.
--
-- 't': version, form, credits that make one unit, level in credits, stamp in microseconds (f64 each).

-- The largest way down from a full bucket: what 400 days bring, and what a Lua number holds exactly.
local function bucket_depth(rate)
  return math.min(rate * 34560000000000, 9007199254740991)
end

-- When it is full again.
local function bucket_ends(bucket)
  return now + math.ceil((bucket.full - bucket.level) / bucket.rate)
end

local function bucket_standing(bucket)
  local level, unit = bucket.level, bucket.unit
  bucket.remaining, bucket.next = math.max(math.floor(level / unit), 0), 0
  if level < 0 then
    bucket.next = math.ceil((unit - level) / bucket.rate)
  elseif level < bucket.full then
    bucket.next = math.ceil((unit - level % unit) / bucket.rate)
  end
end

-- Arguments from the `at`-th on: burst, credits of a unit, credits of a microsecond. Returns the bucket at `now`,
-- judged; nothing when `rare` is needed and not here.
local function bucket_look(key, at, cost)
  local burst, unit, rate = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local full = burst * unit
  local bucket = {
    form = 116, key = key, unit = unit, rate = rate, full = full, level = full,
    wait = 0, remaining = burst, next = 0,
  }
  local bytes = redis.call('GET', key)
  if bytes then
    if form_of(bytes) ~= 116 or #bytes < 26 then
      error('TOLLGATE damaged state')
    end
    local _, _, written, level, stamp = struct.unpack('>BBddd', bytes)
    if not (written >= 1 and written <= 9007199254740991 and math.abs(level) <= 9007199254740991
      and stamp >= 0 and stamp <= 4503599627370496) then
      error('TOLLGATE damaged state')
    end
    if stamp > now then
      if not rare then
        return nil
      end
      stamp = now
      rare.bucket(bucket, written, level)
    end
    if written ~= unit then
      level = math.floor(level / written) * unit
    end
    -- Below zero after a request that cost more than it had reserved, as far as bucket_depth allows.
    level = math.max(math.min(level, full), full - bucket_depth(rate))
    local elapsed = now - stamp
    if elapsed < math.ceil((full - level) / rate) then
      bucket.level = level + elapsed * rate
      bucket_standing(bucket)
    end
  end
  if cost > burst then
    bucket.wait = -1
  else
    bucket.wait = math.max(math.ceil((cost * unit - bucket.level) / rate), 0)
  end
  return bucket
end

local function bucket_charge(bucket, cost)
  bucket.level = bucket.level - cost * bucket.unit
  redis.call('SET', bucket.key, struct.pack('>BBddd', 1, 116, bucket.unit, bucket.level, now))
  expire(bucket.key, bucket_ends(bucket))
  bucket_standing(bucket)
end

-- The token bucket of src/limit/algorithm/token_bucket.rs, which has the promise and the units.
--
-- 't': version, form, credits that make one unit, level in credits, stamp in microseconds (f64 each).

local BUCKET, BUCKET_BYTE = '>BBddd', string.byte('t')

local token_bucket = {}

local function level_now(bucket, rule)
  local full = rule.burst * rule.unit
  if not bucket then
    return full
  end
  local level = bucket.level
  if bucket.unit ~= rule.unit then
    level = math.floor(level / bucket.unit) * rule.unit
  end
  level = math.min(level, full)
  local elapsed = now - bucket.stamp
  if elapsed >= math.ceil((full - level) / rule.rate) then
    return full
  end
  return level + elapsed * rule.rate
end

-- When a bucket of this level is full again.
local function full_at(level, rule)
  return now + math.ceil((rule.burst * rule.unit - level) / rule.rate)
end

local function write_bucket(key, unit, level, ends)
  redis.call('SET', key, struct.pack(BUCKET, VERSION, BUCKET_BYTE, unit, level, now))
  expire(key, ends)
end

-- Reads the bucket. Where Redis's clock has stepped back it is written back at once, charge or not: nothing is credited
-- for the step, and refilling goes on from now.
function token_bucket.open(key, rule)
  local bytes = redis.call('GET', key) or ''
  if form_of(bytes) ~= 't' then
    return nil
  end
  local _, _, unit, level, stamp = struct.unpack(BUCKET, bytes)
  local bucket = { unit = unit, level = level, stamp = stamp }
  if stamp > now then
    bucket.stamp = now
    -- The level stays in the units it was written in: what an edited limit makes of it is not for ever.
    write_bucket(key, unit, level, full_at(level_now(bucket, rule), rule))
  end
  return bucket
end

local function standing(level, rule)
  local next = 0
  if level < rule.burst * rule.unit then
    next = math.ceil((rule.unit - level % rule.unit) / rule.rate)
  end
  return math.floor(level / rule.unit), next
end

-- Returns wait (-1: never), remaining, next.
function token_bucket.judge(bucket, rule, cost)
  local level = level_now(bucket, rule)
  local wait = -1
  if cost <= rule.burst then
    wait = math.max(math.ceil((cost * rule.unit - level) / rule.rate), 0)
  end
  return wait, standing(level, rule)
end

-- Returns remaining, next.
function token_bucket.charge(key, bucket, rule, cost)
  local level = level_now(bucket, rule) - cost * rule.unit
  write_bucket(key, rule.unit, level, full_at(level, rule))
  return standing(level, rule)
end

-- When the bucket is full again.
function token_bucket.ends(bucket, rule)
  return full_at(level_now(bucket, rule), rule)
end

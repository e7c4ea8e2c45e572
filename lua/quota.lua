-- The quota of src/limit/algorithm/quota.rs.
--
-- 'q': version, form, start of the period in microseconds, units used of it (f64 each).
--
-- The gateway knows time zones and sends the beginnings of four periods in a row; the clock that picks one is Redis's.

local QUOTA, QUOTA_BYTE = '>BBdd', string.byte('q')

local quota = {}

function quota.open(key, rule)
  for i = 1, 3 do
    if rule.starts[i] <= now and now < rule.starts[i + 1] then
      rule.start, rule.finish = rule.starts[i], rule.starts[i + 1]
    end
  end
  if not rule.start then
    error('TOLLGATE the clocks of the gateway and of Redis are more than a period apart')
  end
  local bytes = redis.call('GET', key) or ''
  if form_of(bytes) ~= 'q' then
    return nil
  end
  local _, _, start, units = struct.unpack(QUOTA, bytes)
  -- A later period, where the clock has stepped back, counts on: nobody gets a period twice.
  if start < rule.start then
    return nil
  end
  return { start = start, units = units }
end

local function quota_standing(units, rule)
  return math.max(rule.limit - units, 0), units > 0 and rule.finish - now or 0
end

-- Returns wait (-1: never), remaining, next.
function quota.judge(used, rule, cost)
  local units = used and used.units or 0
  local wait = 0
  if cost > rule.limit then
    wait = -1
  elseif units + cost > rule.limit then
    wait = rule.finish - now
  end
  return wait, quota_standing(units, rule)
end

-- Returns remaining, next.
function quota.charge(key, used, rule, cost)
  local start, units = used and used.start or rule.start, (used and used.units or 0) + cost
  redis.call('SET', key, struct.pack(QUOTA, VERSION, QUOTA_BYTE, start, units))
  expire(key, rule.finish)
  return quota_standing(units, rule)
end

-- When the period is over.
function quota.ends(_, rule)
  return rule.finish
end

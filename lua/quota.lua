-- The quota of src/limit/algorithm/quota.rs.
--
-- 'q': version, form, start of the period in microseconds, units used of it (f64 each).

-- Arguments from the `at`-th on: limit, and the beginnings of four periods in a row. The gateway knows time zones;
-- the clock that picks one is Redis's. Returns what was used, judged.
local function quota_look(key, at, cost)
  local limit, start, finish = tonumber(ARGV[at]), nil, nil
  for i = at + 1, at + 3 do
    if tonumber(ARGV[i]) <= now and now < tonumber(ARGV[i + 1]) then
      start, finish = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
    end
  end
  if not start then
    error('TOLLGATE the clocks of the gateway and of Redis are more than a period apart')
  end
  local used = {
    form = 113, key = key, limit = limit, start = start, finish = finish, units = 0,
    wait = 0, remaining = limit, next = 0,
  }
  local bytes = redis.call('GET', key)
  if bytes then
    if form_of(bytes) ~= 113 or #bytes < 18 then
      error('TOLLGATE damaged state')
    end
    local _, _, written, units = struct.unpack('>BBdd', bytes)
    if not (math.abs(written) <= 4503599627370496 and units >= 0 and units <= 9007199254740991) then
      error('TOLLGATE damaged state')
    end
    if written > finish then
      if not rare then
        return nil
      end
      written = rare.quota(used, units)
    end
    -- A later period, where the clock has stepped back, counts on: nobody gets a period twice.
    if written >= start then
      used.start, used.units = written, units
      used.remaining, used.next = math.max(limit - units, 0), units > 0 and finish - now or 0
    end
  end
  if cost > limit then
    used.wait = -1
  elseif used.units + cost > limit then
    used.wait = finish - now
  end
  return used
end

local function quota_charge(used, cost)
  used.units = used.units + cost
  used.remaining, used.next = math.max(used.limit - used.units, 0), used.finish - now
  redis.call('SET', used.key, struct.pack('>BBdd', 1, 113, used.start, used.units))
  expire(used.key, used.finish)
end

-- When the period is over.
local function quota_ends(used)
  return used.units > 0 and used.finish or now
end

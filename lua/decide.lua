-- Decides one request against all its limits: every limit judges it first, and only when it fits all of them are they
-- all charged. One script call is one atomic step, so no other request comes between the two rounds.
--
-- KEYS  one per limit, all with the same hash tag
-- ARGV  cost, then the fields of each limit (see README.md)
-- reply { now, wait, remaining, next, wait, remaining, next, ... }, whole numbers only; wait -1 means never

local at = 1
local function argument()
  at = at + 1
  return ARGV[at - 1]
end
local function number()
  return tonumber(argument())
end

local function rule_of(form)
  if form == 't' then
    return { form = form, algorithm = token_bucket, burst = number(), unit = number(), rate = number() }
  elseif form == 'q' then
    local limit, starts = number(), { number(), number(), number(), number() }
    return { form = form, algorithm = quota, limit = limit, starts = starts }
  elseif form == 'c' then
    return { form = form, algorithm = concurrency, limit = number(), lease = number(), id = argument() }
  end
  return { form = form, algorithm = sliding_window, limit = number(), grain = number(), per = number() }
end

local cost = number()
local rules, states, reply = {}, {}, { now }
local fits = true
for i, key in ipairs(KEYS) do
  local form = argument()
  rules[i] = rule_of(string.sub(form, 1, 1))
  rules[i].shadow = #form > 1
  local algorithm = rules[i].algorithm
  states[i] = algorithm.open(key, rules[i])
  local wait, remaining, next = algorithm.judge(states[i], rules[i], cost)
  reply[3 * i - 1], reply[3 * i], reply[3 * i + 1] = wait, remaining, next
  fits = fits and (wait == 0 or rules[i].shadow)
end
if fits then
  for i, key in ipairs(KEYS) do
    if reply[3 * i - 1] == 0 then
      local remaining, next = rules[i].algorithm.charge(key, states[i], rules[i], cost)
      reply[3 * i], reply[3 * i + 1] = remaining, next
    end
  end
else
  -- Nothing is charged. But a limit that was edited may count for longer than its key was to live, and a key that ends
  -- early forgets.
  for i, key in ipairs(KEYS) do
    local ends = states[i] and rules[i].algorithm.ends(states[i], rules[i]) or now
    if ends > now and redis.call('PTTL', key) < (ends - now) / 1000 then
      expire(key, ends)
    end
  end
end
return reply

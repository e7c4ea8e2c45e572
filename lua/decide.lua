-- Decides one request against all its limits: every limit judges it first, and only when it fits all of them are they
-- all charged. One script call is one atomic step, so no other request comes between the two rounds.
--
-- KEYS  one per limit, all with the same hash tag
-- ARGV  cost, then four fields per limit (see README.md)
-- reply { now, wait, remaining, next, wait, remaining, next, ... }, whole numbers only; wait -1 means never

local function rule_of(i)
  local at = 2 + (i - 1) * 4
  local form = ARGV[at]
  local function number(offset)
    return tonumber(ARGV[at + offset])
  end
  if form == 't' then
    return { form = form, algorithm = token_bucket, burst = number(1), unit = number(2), rate = number(3) }
  end
  return { form = form, algorithm = sliding_window, limit = number(1), grain = number(2), per = number(3) }
end

local cost = tonumber(ARGV[1])
local rules, states, reply = {}, {}, { now }
local fits = true
for i, key in ipairs(KEYS) do
  local rule = rule_of(i)
  local state = rule.algorithm.open(key, rule)
  local wait, remaining, next = rule.algorithm.judge(state, rule, cost, key)
  rules[i], states[i] = rule, state
  reply[3 * i - 1], reply[3 * i], reply[3 * i + 1] = wait, remaining, next
  fits = fits and wait == 0
end
if fits then
  for i, key in ipairs(KEYS) do
    local remaining, next = rules[i].algorithm.charge(key, states[i], rules[i], cost)
    reply[3 * i], reply[3 * i + 1] = remaining, next
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

-- Decides one request against all its limits: every limit judges it first, and only when it fits all of them are they
-- all charged. One script call is one atomic step, so no other request comes between the two rounds.
--
-- KEYS  one per limit, all with the same hash tag
-- ARGV  cost, the moment after which nobody waits for the answer (0: for ever), then the fields of each limit: a
--       letter for its form with, behind it, how it takes part ('' enforced, '?' it only watches, '~' one of the
--       candidates, which are charged all together or not at all), and its numbers
-- reply { now, wait, remaining, next, wait, remaining, next, ... }, whole numbers only; wait -1 means never
--       { now } too late: nothing was charged
--       { now, 1 } nothing was charged: call the script that holds `rare`

local cost, not_after = tonumber(ARGV[1]), tonumber(ARGV[2])
if not_after > 0 and now > not_after then
  return { now }
end

-- Told apart by the letters of their forms, here and in settle.lua: a table of functions would cost time at every call.
local roles, states = {}, {}
local fits, candidates_fit = true, true
local at = 3
for i = 1, #KEYS do
  local key, form, role = KEYS[i], string.byte(ARGV[at], 1, 2)
  local state
  if form == 119 then
    state = ring_look(key, at + 1, cost)
  elseif form == 98 then
    state = buckets_look(key, at + 1, cost)
  elseif form == 116 then
    state = bucket_look(key, at + 1, cost)
  elseif form == 113 then
    state = quota_look(key, at + 1, cost)
  else
    state = slots_look(key, at + 1)
  end
  at = at + (form == 113 and 6 or 4)
  if not state then
    return { now, 1 }
  end
  roles[i], states[i] = role or 0, state
  if state.wait ~= 0 then
    fits = fits and role
    candidates_fit = candidates_fit and role ~= 126
  end
end

local reply = { now }
for i = 1, #KEYS do
  local state, ends = states[i], now
  local form = state.form
  if fits and state.wait == 0 and (candidates_fit or roles[i] ~= 126) then
    if form == 119 then
      ring_charge(state, cost)
    elseif form == 98 then
      buckets_charge(state, cost)
    elseif form == 116 then
      bucket_charge(state, cost)
    elseif form == 113 then
      quota_charge(state, cost)
    else
      slots_charge(state)
    end
  elseif form == 119 then
    ends = ring_ends(state)
  elseif form == 98 then
    ends = buckets_ends(state)
  elseif form == 116 then
    ends = bucket_ends(state)
  elseif form == 113 then
    ends = quota_ends(state)
  end
  -- Not charged. But a limit that was edited may count for longer than its key was to live, and a key that ends early
  -- forgets.
  if ends > now and redis.call('PTTL', state.key) < (ends - now) / 1000 then
    expire(state.key, ends)
  end
  reply[3 * i - 1], reply[3 * i], reply[3 * i + 1] = state.wait, state.remaining, state.next
end
return reply

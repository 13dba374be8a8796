-- Reserve all charges or none. KEYS: the birth of these data, the counts. ARGV: clock, the birth that the gateway knows,
-- lease, the time until which the gateway waits, then shape, limit and cost of each. Answers {4, now} if it is late;
-- {3, now} if these are other data; {2, now, index, ...} of counts that nobody has begun; {1, now, worst, wait, standings} where there is no room; {0, now, standings}. A standing is
-- {remaining, reset_ms, period, begun}; wait -1 is never.

local now_ms = read_clock(ARGV[1])
local lease = ARGV[3]
-- a server that hung takes calls that nobody waits for any more
if now_ms > tonumber(ARGV[4]) then return {4, now_ms} end
if redis.call('GET', KEYS[1]) ~= ARGV[2] then return {3, now_ms} end
local charges, unseeded = {}, {}
for i = 1, #KEYS - 1 do
  local key = KEYS[i + 1]
  local shape = ARGV[3 * i + 2]
  local count = SHAPES[shape].read(key, now_ms, shape)
  if count == nil then unseeded[#unseeded + 1] = i - 1 end
  charges[i] = {
    shape = SHAPES[shape], count = count, limit = tonumber(ARGV[3 * i + 3]), cost = tonumber(ARGV[3 * i + 4]),
    period = 0, begun = 0,
  }
end
if #unseeded > 0 then return {2, now_ms, unpack(unseeded)} end

local function find_fit(charge, from_ms)
  return charge.shape.find_fit(charge.count, from_ms, charge.cost, charge.limit)
end

local function list_standings()
  local found = {}
  for i, charge in ipairs(charges) do
    local remaining, reset_ms = charge.shape.standing(charge.count, charge.limit)
    found[i] = {remaining, reset_ms, charge.period, tostring(charge.begun)}
  end
  return found
end

local worst, at_ms = 0, now_ms
for i, charge in ipairs(charges) do
  local fit = find_fit(charge, now_ms)
  if fit > at_ms then worst, at_ms = i, fit end
end
if worst > 0 then
  local before
  repeat
    before = at_ms
    for _, charge in ipairs(charges) do
      if before < math.huge then at_ms = math.max(at_ms, find_fit(charge, before)) end
    end
  until at_ms == before
  return {1, now_ms, worst - 1, at_ms < math.huge and at_ms - now_ms or -1, list_standings()}
end
for _, charge in ipairs(charges) do
  charge.period, charge.begun = charge.shape.reserve(charge.count, charge.cost, charge.limit, lease)
end
return {0, now_ms, list_standings()}

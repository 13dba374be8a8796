-- Replace what was reserved by what was spent. KEYS: the counts. ARGV: clock, lease, second of the reservation, then
-- shape, limit, cost, spent, period and begun of each. Answers {now, debts}; a debt is {index, period, carried, owed} of a
-- day or month whose debt has changed.

local now_ms = read_clock(ARGV[1])
local told = {now_ms}
for i, key in ipairs(KEYS) do
  local base = 3 + (i - 1) * 6
  local shape = ARGV[base + 1]
  local count = SHAPES[shape].read(key, now_ms, shape)
  if count ~= nil then
    local hold = {
      lease = ARGV[2], at_s = tonumber(ARGV[3]), cost = tonumber(ARGV[base + 3]), period = tonumber(ARGV[base + 5]),
      begun = ARGV[base + 6],
    }
    if SHAPES[shape].settle(count, hold, tonumber(ARGV[base + 4]), tonumber(ARGV[base + 2])) then
      told[#told + 1] = {i - 1, count.period, count.carried, count.owed}
    end
  end
end
return told

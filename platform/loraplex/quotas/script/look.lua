-- How counts stand; nothing is reserved. KEYS: the counts. ARGV: clock, then shape and limit of each. Answers a list of
-- {remaining, reset_ms}, empty for a count that nobody has begun.

local now_ms = read_clock(ARGV[1])
local found = {}
for i = 1, #KEYS do
  local shape = ARGV[2 * i]
  local count = SHAPES[shape].read(KEYS[i], now_ms, shape)
  found[i] = count == nil and {} or {SHAPES[shape].standing(count, tonumber(ARGV[2 * i + 1]))}
end
return found

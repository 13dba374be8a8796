-- Begin the count of a day or month unless it was begun. KEYS: the count. ARGV: clock, shape, used, carried, owed.

local now_ms = read_clock(ARGV[1])
if redis.call('EXISTS', KEYS[1]) == 1 then return end
local time = redis.call('TIME')
write_calendar({
  key = KEYS[1], period = period_at(ARGV[2], now_ms), used = tonumber(ARGV[3]) + tonumber(ARGV[4]),
  owed = tonumber(ARGV[5]), carried = tonumber(ARGV[4]), begun = time[1] .. time[2],
})

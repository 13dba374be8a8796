-- Add what a gateway has granted without these data, once. KEYS: the birth of these data, the marks of what was told, the
-- minutes. ARGV: clock, the birth that the gateway has seen, its mark, then index of a minute, second and amount of each
-- bucket. Answers whether these are still those data.

local now_ms = read_clock(ARGV[1])
if redis.call('GET', KEYS[1]) ~= ARGV[2] then return 0 end
local is_new = redis.call('SADD', KEYS[2], ARGV[3]) == 1
redis.call('PEXPIRE', KEYS[2], text(DAY_MS))
if not is_new then return 1 end
local counts = {}
for i = 4, #ARGV, 3 do
  local index, second = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
  local count = counts[index] or Window.read(KEYS[index + 3], now_ms)
  counts[index] = count
  if second > count.now_s - KEPT_S then
    write_bucket(count, second, (count.buckets[second] or 0) + tonumber(ARGV[i + 2]))
  end
end
return 1

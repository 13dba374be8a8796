-- Note that a gateway lives, and count those that do. KEYS: the birth of these data, the hash of gateways. ARGV: clock,
-- gateway, life in milliseconds. Answers {number, birth, now}.

local now_ms = read_clock(ARGV[1])
local time = redis.call('TIME')
redis.call('SET', KEYS[1], time[1] .. '.' .. time[2], 'NX')
redis.call('PEXPIRE', KEYS[1], text(CALENDAR_LIFE_MS))
redis.call('HSET', KEYS[2], ARGV[2], text(now_ms + tonumber(ARGV[3])))
redis.call('PEXPIRE', KEYS[2], ARGV[3])
local flat = redis.call('HGETALL', KEYS[2])
local num = 0
for i = 1, #flat, 2 do
  if tonumber(flat[i + 1]) <= now_ms then redis.call('HDEL', KEYS[2], flat[i]) else num = num + 1 end
end
return {num, redis.call('GET', KEYS[1]), now_ms}

-- Let leases live on. KEYS: the count of each. ARGV: clock, the time until which the gateway waits, then the leases.

local now_ms = read_clock(ARGV[1])
if now_ms > tonumber(ARGV[2]) then return end
for i, key in ipairs(KEYS) do
  redis.call('HSET', key, ARGV[i + 2], text(now_ms + LEASE_LIFE_MS))
  redis.call('PEXPIRE', key, text(LEASE_LIFE_MS))
end

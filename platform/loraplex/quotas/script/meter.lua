-- What all scripts share: the clock, and one table of functions for each shape of a count. Each is the twin of a class
-- in count.py, which says what it means. Times are milliseconds (ms) or seconds (s) since 1970; a fit is an instant, or
-- math.huge where there never is room.

local KEPT_S = 61
local LEASE_LIFE_MS = 30000
local FIRST_LOOK_MS = 1000
local MAX_PERIODS_OF_DEBT = 60
local DAY_MS = 86400000
local CALENDAR_LIFE_MS = 100 * DAY_MS

-- Redis' own clock, unless a test gives another one
local function read_clock(given)
  if given ~= '0' then return tonumber(given) end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function text(number)
  return string.format('%.0f', number)
end

-- days and months; the arithmetic is Howard Hinnant's, "chrono-Compatible Low-Level Date Algorithms"

local function month_of_day(day)
  local shifted = day + 719468
  local era = math.floor(shifted / 146097)
  local doe = shifted - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  -- years of this arithmetic begin in March
  return (yoe + era * 400) * 12 + mp + 2
end

local function day_of_month(month)
  local shifted = month - 2
  local year = math.floor(shifted / 12)
  local mp = shifted - year * 12
  local era = math.floor(year / 400)
  local yoe = year - era * 400
  local doy = math.floor((153 * mp + 2) / 5)
  return era * 146097 + yoe * 365 + math.floor(yoe / 4) - math.floor(yoe / 100) + doy - 719468
end

local function period_at(shape, now_ms)
  local day = math.floor(now_ms / DAY_MS)
  return shape == 'day' and day or month_of_day(day)
end

local function period_start_ms(shape, period)
  return (shape == 'day' and period or day_of_month(period)) * DAY_MS
end

-- minute: field = second, value = amount

local Window = {}

function Window.read(key, now_ms)
  local now_s = math.floor(now_ms / 1000)
  local flat = redis.call('HGETALL', key)
  local buckets, old = {}, {}
  for i = 1, #flat, 2 do
    local second = tonumber(flat[i])
    if second <= now_s - KEPT_S then old[#old + 1] = flat[i] else buckets[second] = tonumber(flat[i + 1]) end
  end
  if #old > 0 then redis.call('HDEL', key, unpack(old)) end
  return {key = key, buckets = buckets, now_ms = now_ms, now_s = now_s}
end

local function total(count, at_s)
  local sum = 0
  for second, amount in pairs(count.buckets) do
    if at_s - KEPT_S < second and second <= at_s then sum = sum + amount end
  end
  return sum
end

local function write_bucket(count, second, amount)
  if amount == 0 then
    count.buckets[second] = nil
    redis.call('HDEL', count.key, text(second))
    return
  end
  count.buckets[second] = amount
  redis.call('HSET', count.key, text(second), text(amount))
  local last = 0
  for found in pairs(count.buckets) do last = math.max(last, found) end
  redis.call('PEXPIRE', count.key, text((last + KEPT_S + 1) * 1000 - count.now_ms))
end

function Window.find_fit(count, from_ms, cost, limit)
  if cost > limit then return math.huge end
  local from_s = math.floor(from_ms / 1000)
  if total(count, from_s) + cost <= limit then return from_ms end
  local ends = {}
  for second in pairs(count.buckets) do
    if second + KEPT_S > from_s then ends[#ends + 1] = second + KEPT_S end
  end
  table.sort(ends)
  for _, at_s in ipairs(ends) do
    if total(count, at_s) + cost <= limit then return at_s * 1000 end
  end
end

function Window.standing(count, limit)
  local last_s = 0
  for second in pairs(count.buckets) do last_s = math.max(last_s, second + KEPT_S) end
  return math.max(0, limit - total(count, count.now_s)), math.max(0, last_s * 1000 - count.now_ms)
end

function Window.reserve(count, cost)
  write_bucket(count, count.now_s, (count.buckets[count.now_s] or 0) + cost)
  return 0, 0
end

function Window.settle(count, hold, spent, limit)
  local excess = spent - hold.cost
  if excess <= 0 then
    local found = count.buckets[hold.at_s]
    if found ~= nil then write_bucket(count, hold.at_s, math.max(0, found + excess)) end
    return
  end
  local second = count.now_s
  for _ = 1, MAX_PERIODS_OF_DEBT do
    local put = math.min(excess, math.max(0, limit - total(count, second)))
    if put > 0 then write_bucket(count, second, (count.buckets[second] or 0) + put) end
    excess = excess - put
    if excess == 0 then return end
    second = second + KEPT_S
  end
  write_bucket(count, second, (count.buckets[second] or 0) + excess)
end

-- lease: field = lease, value = the instant until which it counts

local Leases = {}

function Leases.read(key, now_ms)
  local flat = redis.call('HGETALL', key)
  local num, old = 0, {}
  for i = 1, #flat, 2 do
    if tonumber(flat[i + 1]) <= now_ms then old[#old + 1] = flat[i] else num = num + 1 end
  end
  for _, lease in ipairs(old) do redis.call('HDEL', key, lease) end
  return {key = key, num = num, now_ms = now_ms}
end

function Leases.find_fit(count, from_ms, cost, limit)
  if count.num + cost <= limit then return from_ms end
  return math.max(from_ms, count.now_ms + FIRST_LOOK_MS)
end

function Leases.standing(count, limit)
  return math.max(0, limit - count.num), 0
end

function Leases.reserve(count, _, _, lease)
  count.num = count.num + redis.call('HSET', count.key, lease, text(count.now_ms + LEASE_LIFE_MS))
  redis.call('PEXPIRE', count.key, text(LEASE_LIFE_MS))
  return 0, 0
end

function Leases.settle(count, hold)
  redis.call('HDEL', count.key, hold.lease)
end

-- day, month: fields period, used, owed, carried, begun

local Calendar = {}

function Calendar.read(key, now_ms, shape)
  local found = redis.call('HMGET', key, 'period', 'used', 'carried', 'begun', 'owed')
  if not found[1] then return nil end
  local period = tonumber(found[1])
  return {
    key = key, shape = shape, now_ms = now_ms, period = period, used = tonumber(found[2]),
    owed = tonumber(found[5] or '0'), carried = tonumber(found[3]), begun = found[4],
    now_period = math.max(period, period_at(shape, now_ms)),
  }
end

local function debt(count, limit)
  return math.min(count.owed, math.max(0, count.used - limit))
end

local function used_of(count, limit)
  local num_periods = count.now_period - count.period
  if num_periods == 0 then return count.used end
  return math.max(0, debt(count, limit) - limit * (num_periods - 1))
end

local function roll(count, limit)
  if count.now_period == count.period then return end
  count.used = used_of(count, limit)
  count.carried = count.used
  count.owed = math.max(0, count.used - limit)
  count.period = count.now_period
end

local function write_calendar(count)
  redis.call(
    'HSET', count.key, 'period', text(count.period), 'used', text(count.used), 'owed', text(count.owed),
    'carried', text(count.carried), 'begun', count.begun
  )
  redis.call('PEXPIRE', count.key, text(CALENDAR_LIFE_MS))
end

function Calendar.find_fit(count, from_ms, cost, limit)
  if cost > limit then return math.huge end
  if count.used + cost <= limit then return from_ms end
  local num_periods = math.max(1, math.ceil((debt(count, limit) + cost) / limit))
  return math.max(from_ms, period_start_ms(count.shape, count.period + num_periods))
end

function Calendar.standing(count, limit)
  local reset_ms = period_start_ms(count.shape, count.now_period + 1) - count.now_ms
  return math.max(0, limit - used_of(count, limit)), math.max(0, reset_ms)
end

function Calendar.reserve(count, cost, limit)
  roll(count, limit)
  count.used = count.used + cost
  write_calendar(count)
  return count.period, count.begun
end

-- whether the debt has changed
function Calendar.settle(count, hold, spent, limit)
  if count.begun ~= hold.begun then
    redis.call('DEL', count.key)
    return false
  end
  roll(count, limit)
  local carried, owed = count.carried, count.owed
  local excess = spent - hold.cost
  if excess < 0 and hold.period ~= count.period then
    excess = math.max(excess, -count.carried)
    count.carried = count.carried + excess
  end
  count.used = math.max(0, count.used + excess)
  count.owed = count.owed + math.max(0, math.min(excess, count.used - limit))
  count.owed = debt(count, limit)
  write_calendar(count)
  return carried ~= count.carried or owed ~= count.owed
end

local SHAPES = {minute = Window, lease = Leases, day = Calendar, month = Calendar}

#!lua flags=allow-oom
-- Brings times nearer that are further away than they ever were, since the clock of Redis was set back:
-- a delay, or a time to live, begins anew then.
--
-- KEYS  times: sorted set of jobs by a time
-- ARGV  field: field of the jobs' hashes with the milliseconds to that time when it was written
--       units: units of the scores in a second
--       stored: field of the jobs' hashes that holds the score as well; '' for none
--       first, last: positions in the sorted set, from 0
-- Returns the number of jobs at these positions, and how many of them have another time now.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: it only
-- changes numbers.
local times = unpack(KEYS)
local field, units, stored, first, last = unpack(ARGV)

local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local found = redis.call('ZRANGE', times, first, last, 'WITHSCORES')
local moved = 0
for i = 1, #found, 2 do
  local job = 'rq:job:' .. found[i]
  local value = redis.pcall('HGET', job, field)
  local left = type(value) == 'string' and tonumber(value)  -- else absent, or the key is no hash
  if left and left < 2 ^ 53 and found[i + 1] / units - now > left / 1000 + 1 then
    local score = string.format(units == '1' and '%.3f' or '%.0f', (now + left / 1000) * units)
    redis.call('ZADD', times, score, found[i])
    if stored ~= '' then redis.call('HSET', job, stored, score) end
    moved = moved + 1
  end
end
return {#found / 2, moved}

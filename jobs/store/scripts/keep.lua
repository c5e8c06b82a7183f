#!lua flags=allow-oom
-- Removes the expiry that `rq requeue` leaves on the hashes of jobs that wait again. A job with RQ's
-- own limit on waiting (`ttl`) keeps it.
--
-- KEYS  queue: list of the ids that wait
-- ARGV  first, last: positions in the list, from 0
-- Returns the number of ids at these positions.
--
-- Atomic: the server runs the whole script before any other command, so no job ends between the look
-- and the change: an ended job must expire.
local queue = unpack(KEYS)
local first, last = unpack(ARGV)

local ids = redis.call('LRANGE', queue, first, last)
for _, id in ipairs(ids) do
  local job = 'rq:job:' .. id
  if redis.call('TYPE', job).ok == 'hash' and redis.call('TTL', job) >= 0 then
    local status, ttl = unpack(redis.call('HMGET', job, 'status', 'ttl'))
    if status == 'queued' and not ttl then redis.call('PERSIST', job) end
  end
end
return #ids

#!lua flags=allow-oom
-- Publishes the status of a recorder that is a process of its own.
--
-- KEYS  recorders: sorted set of these recorders, by the end of their status in ms since the epoch
--       status: the status of this one
-- ARGV  name: name of the recorder
--       about: JSON about the recorder
--       milliseconds: how long that holds
-- Returns nil.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: the
-- recorder is there to make room.
local recorders, status = unpack(KEYS)
local name, about, milliseconds = unpack(ARGV)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', recorders, now + milliseconds, name)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', recorders, '-inf', now)) do
  redis.call('ZREM', recorders, gone)
end
redis.call('PEXPIRE', recorders, milliseconds)
redis.call('SET', status, about, 'PX', milliseconds)
return nil

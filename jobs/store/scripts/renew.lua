#!lua flags=allow-oom
-- Renews the lease of a worker, and keeps what it has published as long: its loop, which publishes, may be
-- busy for longer than that holds.
--
-- KEYS  workers: sorted set of the workers, scores are the ends of their leases
--       stopping: set of the workers that have announced their end
--       status: what the worker has published about itself
-- ARGV  name: name of the worker
--       milliseconds: length of the lease
--       is_stopping: '1' to announce the worker's end, else '0'
-- Returns 1.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it too: the
-- lease is one element, whose score alone changes.
local workers, stopping, status = unpack(KEYS)
local name, milliseconds, is_stopping = unpack(ARGV)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', workers, string.format('%d', now + milliseconds), name)
redis.call('PEXPIRE', status, milliseconds - 1, 'GT')
if is_stopping == '1' then redis.call('SADD', stopping, name) end
return 1

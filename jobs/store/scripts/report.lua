#!lua flags=allow-oom
-- Publishes what a worker says about itself, and tells RQ.
--
-- KEYS  status: what the worker has published about itself
--       rq_worker: RQ's hash of the worker
-- ARGV  about: JSON about the worker, an object; reported_at is added to it, the time of Redis in seconds
--       milliseconds: how long that holds
--       state: RQ's state of the worker; '' to leave RQ's hash as it is
--       current: id of the job that RQ shows as the current one; '' for none
--       now_text: current time in RQ's format
--       seconds: how long RQ's hash of the worker holds
-- Returns the time of Redis in seconds; nil if state is ''.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: the
-- worker is there to make room.
local status, rq_worker = unpack(KEYS)
local about, milliseconds, state, current, now_text, seconds = unpack(ARGV)

local time = redis.call('TIME')
local now = string.format('%.3f', time[1] + time[2] / 1e6)
redis.call('SET', status, '{"reported_at": ' .. now .. ', ' .. string.sub(about, 2), 'PX', milliseconds)
if state == '' then return nil end
redis.call('HSET', rq_worker, 'last_heartbeat', now_text, 'state', state)
if current == '' then
  redis.call('HDEL', rq_worker, 'current_job')
else
  redis.call('HSET', rq_worker, 'current_job', current)
end
redis.call('EXPIRE', rq_worker, seconds)
return now

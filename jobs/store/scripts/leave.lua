#!lua flags=allow-oom
-- Removes a worker that has no started job from the sets of workers, RQ's included.
--
-- KEYS  workers: sorted set of the workers, scores are the ends of their leases
--       stopping: set of the workers that have announced their end
--       started: sorted set of the jobs that the worker has started
--       status: what the worker has published about itself
--       rq_worker: RQ's hash of the worker
--       rq_workers: RQ's set of all workers
-- ARGV  name: name of the worker
--       seen_lease: the end of its lease that the caller has seen; '' if it is the worker itself
--       queues…: queues whose sets of workers may have its name, beside those in RQ's hash
-- Returns 1 if the worker is removed, 0 if it has started jobs or has renewed its lease.
--
-- Atomic: the server runs the whole script before any other command. It only removes entries, so a
-- full Redis runs it too.
local workers, stopping, started, status, rq_worker, rq_workers = unpack(KEYS)
local name, seen_lease = unpack(ARGV)
local queues = {unpack(ARGV, 3)}

local lease = tonumber(redis.call('ZSCORE', workers, name) or 0)
if seen_lease ~= '' and lease ~= tonumber(seen_lease) then return 0 end
if redis.call('EXISTS', started) == 1 then return 0 end

redis.call('ZREM', workers, name)
redis.pcall('SREM', stopping, name)  -- another program may have written this one and RQ's
redis.call('DEL', status)
local known = redis.pcall('HGET', rq_worker, 'queues')
for queue in string.gmatch(type(known) == 'string' and known or '', '[^,]+') do
  queues[#queues + 1] = queue
end
for _, queue in ipairs(queues) do redis.pcall('SREM', rq_workers .. ':' .. queue, rq_worker) end
redis.pcall('SREM', rq_workers, rq_worker)
if seen_lease ~= '' then redis.call('DEL', rq_worker) end
return 1

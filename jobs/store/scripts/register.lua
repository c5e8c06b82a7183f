#!lua flags=allow-oom
-- Registers a worker with RQ, as RQ's own register_birth does.
--
-- KEYS  rq_worker: RQ's hash of the worker
--       rq_workers: RQ's set of all workers
--       queue_workers…: RQ's set of the workers of each queue
-- ARGV  seconds: how long RQ's hash of the worker holds
--       fields…: field, value, … of RQ's hash
-- Returns 1.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: the
-- worker is there to make room.
local rq_worker, rq_workers = unpack(KEYS)
local queue_workers = {unpack(KEYS, 3)}
local seconds = unpack(ARGV)
local fields = {unpack(ARGV, 2)}

redis.call('DEL', rq_worker)
redis.call('HSET', rq_worker, unpack(fields))
redis.call('EXPIRE', rq_worker, seconds)
redis.call('SADD', rq_workers, rq_worker)
for _, set in ipairs(queue_workers) do redis.call('SADD', set, rq_worker) end
return 1

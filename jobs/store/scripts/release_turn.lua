#!lua flags=allow-oom
-- Queues a job that waits for its session although that is free, or gone. The caller loads this script
-- behind the functions of queue.lua and turns.lua.
--
-- KEYS  job: hash of the job
--       open: list of the jobs of its session that have not ended
-- ARGV  job_id: id of the job
--       name: id of the session
-- Returns 1 if the job is queued now, else 0.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it.
local job, open = unpack(KEYS)
local job_id, name = unpack(ARGV)

if redis.call('HGET', job, 'status') ~= 'deferred' then return 0 end
next_turn(name)
local waits = false
for _, other in ipairs(redis.call('LRANGE', open, 0, -1)) do waits = waits or other == job_id end
if not waits then queue_deferred(job_id) end
return redis.call('HGET', job, 'status') == 'queued' and 1 or 0

#!lua flags=allow-oom
-- Queues a job that waits for other jobs although they have ended. The caller loads this script behind the
-- functions of queue.lua and dependents.lua.
--
-- KEYS  job: hash of the job
-- ARGV  job_id: id of the job
--       now: time in RQ's format
-- Returns 1 if the job is queued now, else 0.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it.
local job = unpack(KEYS)
local job_id, now = unpack(ARGV)

if redis.call('EXISTS', dependencies_of(job_id)) == 0 then return 0 end
enqueue_dependent(job_id, now)
return redis.call('HGET', job, 'status') == 'queued' and 1 or 0

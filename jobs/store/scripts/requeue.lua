-- Puts a failed or cancelled job back into its queue, as a new attempt. The caller loads this script
-- behind queue.lua and reservations.lua.
--
-- KEYS  job: hash of the job
--       queue: list of the ids that wait
--       failed, canceled: RQ's registries of the queue
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       deadlines: sorted set of the jobs with a time to live, scores in milliseconds
-- ARGV  job_id: id of the job
--       enqueued_at: current time in RQ's format
--       ttl: milliseconds to live from now on; '' for no limit
-- Returns 1 if the job waits again, 0 if it does not exist or has not failed and is not cancelled.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply. The
-- second run finds the job queued at the same time, and changes nothing.
--
-- Atomic: the server runs the whole script before any other command. It is not rolled back when a
-- command fails, so the job is queued first. A full Redis refuses that, before anything has changed.
local job, queue, failed, canceled, open_bytes, deadlines = unpack(KEYS)
local job_id, enqueued_at, ttl = unpack(ARGV)

local status, queued_at = unpack(redis.call('HMGET', job, 'status', 'enqueued_at'))
if status == 'queued' and queued_at == enqueued_at then return 1 end
if status ~= 'failed' and status ~= 'canceled' and status ~= 'stopped' then return 0 end
for _, key in ipairs({failed, canceled, deadlines}) do check_type(key, 'zset') end
queue_job('RPUSH', queue, job_id, enqueued_at)
redis.call('HDEL', job, 'started_at', 'ended_at', 'worker_name', 'chatjobs_error',
  'chatjobs_cancel', 'chatjobs_lost', 'chatjobs_lost_at', 'chatjobs_group', 'chatjobs_retried',
  'chatjobs_machine_errors', 'chatjobs_longer')
redis.call('PERSIST', job)
if redis.call('HEXISTS', job, 'chatjobs_bytes') == 0 then
  hold_bytes(job, open_bytes, queue, redis.call('HSTRLEN', job, 'data'))
end
if ttl ~= '' then
  local time = redis.call('TIME')
  local deadline = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000) + ttl)
  redis.call('HSET', job, 'chatjobs_deadline', deadline, 'chatjobs_ttl', ttl)
  redis.call('ZADD', deadlines, deadline, job_id)
end
redis.call('ZREM', failed, job_id)
redis.call('ZREM', canceled, job_id)
return 1

-- Deletes a job that has ended. Its rows are kept, and stay reserved.
--
-- KEYS  job: hash of the job
--       results: stream of the results of the job
--       log: replay log of the token stream
--       executions: sorted set of the executions of the job
--       finished, failed, canceled: RQ's registries of the queue
--       queue: list of the ids that wait; the name under which open_bytes counts
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       deadlines: sorted set of the jobs with a time to live
-- ARGV  job_id: id of the job
-- Returns 1 if the job is deleted, 0 if it does not exist or has not ended.
--
-- Atomic: the server runs the whole script before any other command.
local job, results, log, executions, finished, failed, canceled, queue, open_bytes,
  deadlines = unpack(KEYS)
local job_id = unpack(ARGV)

local status, bytes = unpack(redis.call('HMGET', job, 'status', 'chatjobs_bytes'))
if status ~= 'finished' and status ~= 'failed' and status ~= 'canceled' and status ~= 'stopped' then
  return 0
end
bytes = tonumber(bytes or '')
if bytes then  -- RQ's own tools have ended it
  local left = redis.pcall('HINCRBY', open_bytes, queue, -bytes)
  if type(left) == 'number' and left <= 0 then redis.call('HDEL', open_bytes, queue) end
end
redis.call('ZREM', deadlines, job_id)
redis.call('DEL', job, results, log, executions)
redis.call('ZREM', finished, job_id)
redis.call('ZREM', failed, job_id)
redis.call('ZREM', canceled, job_id)
return 1

-- Deletes a job that has ended. Its rows are kept.
--
-- KEYS  job: hash of the job
--       results: stream of the results of the job
--       log: replay log of the token stream
--       executions: sorted set of the executions of the job
--       finished, failed, canceled: RQ's registries of the queue
-- ARGV  job_id: id of the job
-- Returns 1 if the job is deleted, 0 if it does not exist or has not ended.
--
-- Atomic: the server runs the whole script before any other command.
local job, results, log, executions, finished, failed, canceled = unpack(KEYS)
local job_id = unpack(ARGV)

local status = redis.call('HGET', job, 'status')
if status ~= 'finished' and status ~= 'failed' and status ~= 'canceled' and status ~= 'stopped' then
  return 0
end
redis.call('DEL', job, results, log, executions)
redis.call('ZREM', finished, job_id)
redis.call('ZREM', failed, job_id)
redis.call('ZREM', canceled, job_id)
return 1

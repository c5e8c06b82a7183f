-- Prelude for scripts that delete jobs which no worker runs. Needs the functions of queue.lua and
-- reservations.lua.
--
-- delete_job(keys, job_id) removes what a job has left in Redis, but not its row. Registries of another
-- type, which another program has written, are left alone.
--
-- keys  job: hash of the job
--       results: stream of the results of the job
--       log: replay log of the token stream
--       executions: sorted set of the executions of the job
--       finished, failed, canceled: RQ's registries of the queue
--       queue: list of the ids that wait; the name under which open_bytes counts
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       deadlines: sorted set of the jobs with a time to live
-- args  job_id: id of the job
--
-- Atomic as part of the script that calls it.

-- Whether a job has ended, by its status.
local function has_ended(status)
  return status == 'finished' or status == 'failed' or status == 'canceled' or status == 'stopped'
end

local function delete_job(keys, args)
  local job, results, log, executions, finished, failed, canceled, queue, open_bytes,
    deadlines = unpack(keys)
  local job_id = unpack(args)
  free_bytes(job, open_bytes, queue)  -- a job has some if RQ's own tools have ended it
  redis.pcall('ZREM', deadlines, job_id)
  redis.call('DEL', job, results, log, executions)
  redis.pcall('ZREM', finished, job_id)
  redis.pcall('ZREM', failed, job_id)
  redis.pcall('ZREM', canceled, job_id)
end

#!lua flags=allow-oom
-- Deletes a job that has ended. Its rows are kept, and stay reserved; if it has none, since RQ's own tools
-- have ended it, its row is free again. The caller loads this script behind the functions of
-- queue.lua and reservations.lua.
--
-- KEYS  job: hash of the job
--       results: stream of the results of the job
--       log: replay log of the token stream
--       executions: sorted set of the executions of the job
--       finished, failed, canceled: RQ's registries of the queue
--       queue: list of the ids that wait; the name under which open_bytes counts
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       deadlines: sorted set of the jobs with a time to live
--       rows: hash of the reserved rows near this one, by the last part of their number
-- ARGV  job_id: id of the job
--       row: last part of the row's number; '' without a row
-- Returns 1 if the job is deleted, 0 if it does not exist or has not ended.
--
-- Atomic: the server runs the whole script before any other command. Registries of another type, which
-- another program has written, are left alone. A full Redis runs it: it makes
-- room.
local job, results, log, executions, finished, failed, canceled, queue, open_bytes,
  deadlines, rows = unpack(KEYS)
local job_id, row = unpack(ARGV)

local status, recorded = unpack(redis.call('HMGET', job, 'status', 'chatjobs_row'))
if status ~= 'finished' and status ~= 'failed' and status ~= 'canceled' and status ~= 'stopped' then
  return 0
end
free_bytes(job, open_bytes, queue)  -- it has some if RQ's own tools have ended it
redis.pcall('ZREM', deadlines, job_id)
if not recorded then redis.pcall('HDEL', rows, row) end
redis.call('DEL', job, results, log, executions)
redis.pcall('ZREM', finished, job_id)
redis.pcall('ZREM', failed, job_id)
redis.pcall('ZREM', canceled, job_id)
return 1

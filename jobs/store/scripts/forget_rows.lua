#!lua flags=allow-oom
-- Removes what Redis holds of rows of a run that share a hash of reservations: the reservation of each, and
-- its job if that has ended or, if asked, waits. The caller loads this script behind the functions of
-- queue.lua, reservations.lua and delete_job.lua.
--
-- KEYS  producer: the lease on the run
--       rows: hash of the reserved rows
--       finished, failed, canceled, queue, open_bytes, deadlines: as in delete_job, of all jobs
--       job_keys…: job, results, log, executions of each row, as in delete_job
-- ARGV  token: of the process that holds the lease
--       withdraw: '1' if jobs that wait are removed as well
--       names…: field in rows and id of the job, of each row
-- Returns for each row 1 if Redis holds nothing of it any more, 0 if its job has not ended; -1 if another
--       process holds the lease.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply.
--
-- Atomic: the server runs the whole script before any other command, so a worker claims a job that waits
-- or does not see it. A full Redis runs it: it makes room.
local producer, rows, finished, failed, canceled, queue, open_bytes, deadlines = unpack(KEYS)
local job_keys = {unpack(KEYS, 9)}
local token, withdraw = unpack(ARGV)
local names = {unpack(ARGV, 3)}

if redis.call('GET', producer) ~= token then return -1 end

-- True if the job has ended, is gone, or waited and was taken out of its queue.
local function is_over(status, id)
  if not status or has_ended(status) then return true end
  return status == 'queued' and withdraw == '1' and remove_job(queue, id)
end

local forgotten = {}
for number = 1, #names / 2 do
  local field, id = names[2 * number - 1], names[2 * number]
  local job, results, log, executions = unpack(job_keys, 4 * number - 3, 4 * number)
  local status = redis.call('HGET', job, 'status')
  forgotten[number] = 0
  if is_over(status, id) then
    if status then
      delete_job({job, results, log, executions, finished, failed, canceled, queue, open_bytes, deadlines}, {id})
    end
    redis.call('HDEL', rows, field)
    forgotten[number] = 1
  end
end
return forgotten

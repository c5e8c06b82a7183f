#!lua flags=allow-oom
-- Ends a job that waits, or asks the worker of a running job to stop it. The caller loads this script
-- behind job_end.lua.
--
-- KEYS  quarantine: list of the suspects that wait
--       scheduled: RQ's registry of jobs that wait for their time
--       deferred: RQ's registry of jobs that wait for other jobs
--       end_keys…: those of end_job
-- ARGV  read_attempt, read_failures: those in the job's hash when the caller made the row; '' for none
--       control_channel, control_message: message that asks the worker of a running job to stop it;
--       '' for none
--       end_args…: those of end_job
-- Returns 'over' if the job has ended, 'ended' if it waited, 'asked' if it runs, 'again' if an attempt has
--       started or failed since the caller made the row. Nothing has changed after 'over' and 'again'.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: ended jobs make
-- room.
local quarantine, scheduled, deferred = unpack(KEYS)
local end_keys = {unpack(KEYS, 4)}
local read_attempt, read_failures, control_channel, control_message = unpack(ARGV)
local end_args = {unpack(ARGV, 5)}
local job, queue, job_id = end_keys[1], end_keys[2], end_args[1]

local before = redis.call('HGET', job, 'status')
if not before or before == 'finished' or before == 'failed' or before == 'stopped'
  or before == 'canceled' then return 'over' end
if not is_as_read(job, read_attempt, read_failures) then return 'again' end
local waits = in_list(queue, job_id) or redis.call('LPOS', quarantine, job_id)
  or redis.call('ZSCORE', scheduled, job_id) or redis.call('ZSCORE', deferred, job_id)
if not waits then
  if control_message ~= '' then
    redis.call('HSET', job, 'chatjobs_cancel', 1)
    redis.call('PUBLISH', control_channel, control_message)
  end
  return 'asked'
end

end_job(end_keys, end_args, function()
  -- These keys have their types: the job was found in one of them, and those before it were read.
  local _ = remove_job(queue, job_id) or redis.call('LREM', quarantine, 1, job_id) > 0
    or redis.call('ZREM', scheduled, job_id) > 0 or redis.call('ZREM', deferred, job_id)
end)
return 'ended'

#!lua flags=allow-oom
-- Writes the row of a job that ended without one: RQ's own tools cancelled or failed it. The caller
-- loads this script behind job_end.lua.
--
-- KEYS  end_keys…: those of end_job
-- ARGV  read_attempt, read_failures: those in the job's hash when the caller made the row; '' for none
--       end_args…: those of end_job
-- Returns 1, or 0 if the job has changed or has a row of this attempt: nothing has changed then.
--
-- Atomic: the server runs the whole script before any other command, so the row is written once.
local read_attempt, read_failures = unpack(ARGV)
local end_args = {unpack(ARGV, 3)}
local job, job_id, status, attempt = KEYS[1], unpack(end_args)

local state, recorded = unpack(redis.call('HMGET', job, 'status', 'chatjobs_row'))
if state ~= status or recorded == attempt then return 0 end
if not is_as_read(job, read_attempt, read_failures) then return 0 end
end_job(KEYS, end_args, function() end)  -- RQ's tools have removed the job from its place
return 1

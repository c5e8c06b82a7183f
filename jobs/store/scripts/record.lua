#!lua flags=allow-oom
-- Writes the row of a job that ended without one: RQ's own tools cancelled or failed it. The caller
-- loads this script behind job_end.lua.
--
-- KEYS  end_keys…: those of end_job
-- ARGV  end_args…: those of end_job
-- Returns 1, or 0 if the job has changed or has a row of this attempt: nothing has changed then.
--
-- Atomic: the server runs the whole script before any other command, so the row is written once.
local end_keys, end_args = KEYS, ARGV
local job_id, status, attempt = unpack(end_args)

local state, recorded = unpack(redis.call('HMGET', end_keys[1], 'status', 'chatjobs_row'))
if state ~= status or recorded == attempt then return 0 end
end_job(end_keys, end_args, function() end)  -- RQ's tools have removed the job from its place
return 1

#!lua flags=allow-oom
-- Deletes a job that has ended. Its rows are kept, and stay reserved; if it has none, since RQ's own tools
-- have ended it, they are free again. The caller loads this script behind the functions of queue.lua,
-- reservations.lua and delete_job.lua.
--
-- KEYS  job: hash of the job
--       job_keys…: keys of delete_job, and the hashes of the reserved rows near those of the job
-- ARGV  job_id: id of the job
--       fields: the rows of the job, as reserve_rows takes them
-- Returns 1 if the job is deleted, 0 if it does not exist or has not ended.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: it makes
-- room.
local job = unpack(KEYS)
local job_keys = {unpack(KEYS, 2)}
local job_id, fields = unpack(ARGV)

local status, recorded = unpack(redis.call('HMGET', job, 'status', 'chatjobs_row'))
if not has_ended(status) then return 0 end
if not recorded then free_rows({unpack(job_keys, 11)}, fields) end
delete_job(job_keys, {job_id})
return 1

#!lua flags=allow-oom
-- Deletes a job that has ended. Its rows are kept, and stay reserved; if it has none, since RQ's own tools
-- have ended it, its row is free again. The caller loads this script behind the functions of
-- queue.lua, reservations.lua and delete_job.lua.
--
-- KEYS  rows: hash of the reserved rows near this one, by the last part of their number
--       job_keys…: keys of delete_job
-- ARGV  job_id: id of the job
--       row: last part of the row's number; '' without a row
-- Returns 1 if the job is deleted, 0 if it does not exist or has not ended.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: it makes
-- room.
local rows = unpack(KEYS)
local job_keys = {unpack(KEYS, 2)}
local job_id, row = unpack(ARGV)

local status, recorded = unpack(redis.call('HMGET', job_keys[1], 'status', 'chatjobs_row'))
if not has_ended(status) then return 0 end
if not recorded then redis.pcall('HDEL', rows, row) end
delete_job(job_keys, {job_id})
return 1

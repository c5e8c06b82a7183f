#!lua flags=allow-oom
-- Ends a started job: the worker that ends it holds its lease, or has found that of a dead worker. The
-- caller loads this script behind job_end.lua and lease.lua.
--
-- KEYS  wip, execution, executions, started, workers: those of lease.lua
--       worker: RQ's hash of the calling worker
--       end_keys…: those of end_job
-- ARGV  job_id, execution_id, entry, dead, seen_lease: those of lease.lua
--       counter: field of the worker's hash to increment; '' for none
--       working_time: seconds that the job ran
--       end_args…: those of end_job
-- Returns 0 if the lease is lost or the worker is alive (the job has not changed then), else 1.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: ended jobs make
-- room.
local wip, execution, executions, started, workers, worker = unpack(KEYS)
local end_keys = {unpack(KEYS, 7)}
local job_id, execution_id, entry, dead, seen_lease, counter, working_time = unpack(ARGV)
local end_args = {unpack(ARGV, 8)}

if not holds_lease(KEYS, ARGV) then return 0 end
end_job(end_keys, end_args, function() give_up_lease(KEYS, ARGV) end)

if redis.call('EXISTS', worker) == 1 then
  if counter ~= '' then redis.pcall('HINCRBY', worker, counter, 1) end
  redis.pcall('HINCRBYFLOAT', worker, 'total_working_time', working_time)
end
return 1

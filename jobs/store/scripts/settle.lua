#!lua flags=allow-oom
-- Ends a started job: the worker that ends it holds its lease, or has found that of a dead worker. The
-- caller loads this script behind job_end.lua.
--
-- KEYS  wip: sorted set of the started jobs of its queue
--       execution: hash of this execution
--       executions: sorted set of the executions of the job
--       worker: RQ's hash of the calling worker
--       started: sorted set of the jobs that the worker of the job has started
--       workers: sorted set of the workers, scores are the ends of their leases
--       end_keys…: those of end_job
-- ARGV  execution_id: with the job's id its member in wip, the lease of this attempt
--       entry: the job's member of started
--       dead: name of the dead worker whose job this is; '' if it is the caller's own
--       seen_lease: the end of the dead worker's lease that the caller has seen; if it differs now,
--       that worker is alive
--       counter: field of the worker's hash to increment; '' for none
--       working_time: seconds that the job ran
--       end_args…: those of end_job
-- Returns 0 if the lease is lost or the worker is alive (the job has not changed then), else 1.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: ended jobs make
-- room.
local wip, execution, executions, worker, started, workers = unpack(KEYS)
local end_keys = {unpack(KEYS, 7)}
local execution_id, entry, dead, seen_lease, counter, working_time = unpack(ARGV)
local end_args = {unpack(ARGV, 7)}
local job_id = end_args[1]

local lease = job_id .. ':' .. execution_id
if dead ~= '' and tonumber(redis.call('ZSCORE', workers, dead) or -1) ~= tonumber(seen_lease) then
  return 0
end
if not redis.call('ZSCORE', wip, lease) then
  redis.call('ZREM', started, entry)
  return 0
end

end_job(end_keys, end_args, function()
  redis.call('ZREM', wip, lease)
  redis.pcall('ZREM', started, entry)
  redis.call('DEL', execution)
  redis.pcall('ZREM', executions, execution_id)
  pcall(left_running, job_id, entry)
end)

if redis.call('EXISTS', worker) == 1 then
  if counter ~= '' then redis.pcall('HINCRBY', worker, counter, 1) end
  redis.pcall('HINCRBYFLOAT', worker, 'total_working_time', working_time)
end
return 1

-- Prelude for scripts that end or return a job that a worker has started. Needs the functions of
-- tenant_running.lua. The tables of such a script begin with these keys and args:
--
-- keys  wip: sorted set of the started jobs of its queue
--       execution: hash of this execution
--       executions: sorted set of the executions of the job
--       started: sorted set of the jobs that the worker of the job has started
--       workers: sorted set of the workers, scores are the ends of their leases
-- args  job_id, execution_id: their member in wip is the lease of this attempt
--       entry: the job's member of started
--       dead: name of the dead worker whose job this is; '' if it is the caller's own
--       seen_lease: the end of the dead worker's lease that the caller has seen; if it differs now,
--       that worker is alive
--
-- Atomic as part of the script that calls these functions.

-- True if the caller may end or return the job: its lease is there, and its worker is the caller or dead.
-- A job without its lease is forgotten: it has ended, or another worker has it.
local function holds_lease(keys, args)
  local wip, execution, executions, started, workers = unpack(keys)
  local job_id, execution_id, entry, dead, seen_lease = unpack(args)
  if dead ~= '' and tonumber(redis.call('ZSCORE', workers, dead) or -1) ~= tonumber(seen_lease) then
    return false
  end
  if redis.call('ZSCORE', wip, job_id .. ':' .. execution_id) then return true end
  redis.call('ZREM', started, entry)
  return false
end

-- The job is no longer started. Keys that another program has written are left alone.
local function give_up_lease(keys, args)
  local wip, execution, executions, started, workers = unpack(keys)
  local job_id, execution_id, entry, dead, seen_lease = unpack(args)
  redis.call('ZREM', wip, job_id .. ':' .. execution_id)
  redis.pcall('ZREM', started, entry)
  redis.call('DEL', execution)
  redis.pcall('ZREM', executions, execution_id)
  pcall(left_running, job_id, entry)
end

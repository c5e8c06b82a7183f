-- Ends a started job: "finished", "failed" or "canceled". Writes RQ's status, registry and result,
-- the row in the outbox and the end of the token stream. The caller prepends the Lua
-- function end_stream (jobs.stream.entries.END_LUA).
--
-- KEYS  job: hash of the job
--       wip: sorted set of the started jobs of its queue
--       execution: hash of this execution
--       executions: sorted set of the executions of the job
--       registry: RQ's registry for jobs that ended this way
--       results: stream of the results of the job
--       outbox: stream of the rows of the run
--       outboxes: set of the runs that have rows in their outbox
--       log: replay log of the token stream
--       live: pub/sub channel of the token stream
--       worker: RQ's hash of the calling worker
--       started: sorted set of the jobs that the worker of the job has started
--       workers: sorted set of the workers, scores are the ends of their leases
-- ARGV  job_id, execution_id: their member in wip is the lease of this attempt
--       entry: the job's member of started
--       dead: name of the dead worker whose job this is; '' if it is the caller's own
--       seen_lease: the end of the dead worker's lease that the caller has seen; if it differs now,
--       that worker is alive
--       status: RQ's status
--       ended_at: time of the end in RQ's format
--       keep: seconds to keep the job; 0 deletes it, -1 keeps it for ever
--       registry_score: score in the registry, the time when the entry expires
--       error: JobError as JSON; '' for none
--       row: row for the outbox
--       run: name of the run
--       end_id, end_payload: last entry of the token stream
--       counter: field of the worker's hash to increment; '' for none
--       max_results: length of the results stream
--       now: current time in seconds since the epoch
--       working_time: seconds that the job ran
--       result_fields…: field, value, … of the entry in the results stream
-- Returns 0 if the lease is lost or the worker is alive (the job has not changed then), else 1 + the number of jobs that
--       depend on this one.
--
-- Atomic: the server runs the whole script before any other command. It is not rolled back when a
-- command is refused. A full Redis refuses the first write, XADD to the outbox, before anything
-- has changed. The lease is removed directly after it, so the row is written once whatever happens
-- to the commands that follow.
local job, wip, execution, executions, registry, results, outbox, outboxes, log, live, worker,
  started, workers = unpack(KEYS)
local job_id, execution_id, entry, dead, seen_lease, status, ended_at, keep, registry_score, error,
  row, run, end_id, end_payload, counter, max_results, now, working_time = unpack(ARGV)
local result_fields = {unpack(ARGV, 19)}

local lease = job_id .. ':' .. execution_id
if dead ~= '' and tonumber(redis.call('ZSCORE', workers, dead) or -1) ~= tonumber(seen_lease) then
  return 0
end
if not redis.call('ZSCORE', wip, lease) then
  redis.call('ZREM', started, entry)
  return 0
end

redis.call('XADD', outbox, '*', 'row', row)
redis.call('ZREM', wip, lease)
redis.call('ZREM', started, entry)
redis.call('SADD', outboxes, run)
redis.call('DEL', execution)
redis.call('ZREM', executions, execution_id)

local dependents = redis.call('SCARD', job .. ':dependents')
if redis.call('EXISTS', job) == 1 then
  keep = tonumber(keep)
  if keep == 0 and dependents > 0 then keep = 60 end  -- RQ reads the hash to queue the dependents
  redis.call('HSET', job, 'status', status, 'ended_at', ended_at)
  if error ~= '' then redis.call('HSET', job, 'chatjobs_error', error) end
  if keep == 0 then
    redis.call('DEL', job, results)
  else
    redis.pcall('ZREMRANGEBYSCORE', registry, 0, now)
    redis.pcall('ZADD', registry, registry_score, job_id)
    redis.pcall('XADD', results, 'MAXLEN', max_results, '*', unpack(result_fields))
    if keep > 0 then
      for _, key in ipairs({job, results, job .. ':dependents', job .. ':dependencies'}) do
        redis.call('EXPIRE', key, keep)
      end
    end
  end
end

end_stream(log, live, end_id, end_payload)

if redis.call('EXISTS', worker) == 1 then
  if counter ~= '' then redis.pcall('HINCRBY', worker, counter, 1) end
  redis.pcall('HINCRBYFLOAT', worker, 'total_working_time', working_time)
end
return 1 + dependents

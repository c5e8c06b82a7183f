#!lua flags=allow-oom
-- Ends a started job: "finished", "failed" or "canceled". Writes RQ's status, registry and result,
-- the row in the outbox, the turn of its session and the end of the token stream. The caller loads this
-- script behind the Lua functions end_stream (jobs.stream.entries.END_LUA), enqueue_dependents and those
-- of rq_tenants.lua, rq_turns.lua and rq_rows.lua.
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
--       queue: list of the ids that wait; the name under which open_bytes counts
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       deadlines: sorted set of the jobs with a time to live
--       rows: hash of the reserved rows near this one
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
--       has_log: '1' if the entry goes to the log as well, '0' for a job that publishes no tokens
--       counter: field of the worker's hash to increment; '' for none
--       max_results: length of the results stream
--       now: current time in seconds since the epoch
--       working_time: seconds that the job ran
--       attempt: number of the attempt whose row this is
--       row_field, row_seconds: field of the row in rows, and seconds that it stays reserved
--       failures: the failed attempts so far, as JSON; '' to leave them
--       session: session of the job; '' for none
--       turn, replaces_turn: its turn of the session as JSON, '' for none, and '1' if it takes the
--       place of the last one
--       result_fields…: field, value, … of the entry in the results stream
-- Returns 0 if the lease is lost or the worker is alive (the job has not changed then), else 1.
--
-- The jobs that depend on this one are queued here, since the reply may get lost.
--
-- Atomic: the server runs the whole script before any other command. It is not rolled back when a
-- command fails, so the keys of the row and of the turn, which may have another type, come first: nothing
-- has changed if one has. The lease is removed directly after the row is written, so the row is written once
-- whatever happens to the commands that follow. A full Redis runs it: ended jobs make room.
local job, wip, execution, executions, registry, results, outbox, outboxes, log, live, worker,
  started, workers, queue, open_bytes, deadlines, rows = unpack(KEYS)
local job_id, execution_id, entry, dead, seen_lease, status, ended_at, keep, registry_score, error,
  row, run, end_id, end_payload, has_log, counter, max_results, now, working_time, attempt,
  row_field, row_seconds, failures, session, turn, replaces_turn = unpack(ARGV)
local result_fields = {unpack(ARGV, 27)}

local lease = job_id .. ':' .. execution_id
if dead ~= '' and tonumber(redis.call('ZSCORE', workers, dead) or -1) ~= tonumber(seen_lease) then
  return 0
end
if not redis.call('ZSCORE', wip, lease) then
  redis.call('ZREM', started, entry)
  return 0
end

check_turn(session, turn)
append_row(outbox, outboxes, run, row)
redis.call('ZREM', wip, lease)
redis.pcall('ZREM', started, entry)
pcall(end_turn, session, job_id, turn, replaces_turn)
redis.call('DEL', execution)
redis.pcall('ZREM', executions, execution_id)

pcall(left_running, job_id, entry)
redis.pcall('ZREM', deadlines, job_id)
pcall(row_written, rows, row_field, row_seconds)

if redis.call('TYPE', job).ok == 'hash' then
  free_bytes(job, open_bytes, queue)
  keep = tonumber(keep)
  redis.call('HSET', job, 'status', status, 'ended_at', ended_at, 'chatjobs_row', attempt)
  if error ~= '' then redis.call('HSET', job, 'chatjobs_error', error) end
  if failures ~= '' then redis.call('HSET', job, 'chatjobs_failures', failures) end
  if keep == 0 then
    redis.call('DEL', job, results)
  else
    redis.pcall('ZREMRANGEBYSCORE', registry, 0, now)
    redis.pcall('ZADD', registry, registry_score, job_id)
    redis.pcall('XADD', results, 'MAXLEN', max_results, '*', unpack(result_fields))
    -- XADD reserves 4 KiB, a copy is as large as its entries.
    redis.pcall('COPY', results, results .. ':copy')
    redis.pcall('RENAME', results .. ':copy', results)
    if keep > 0 then
      for _, key in ipairs({job, results, job .. ':dependents', dependencies_of(job_id)}) do
        redis.call('EXPIRE', key, keep)
      end
    end
  end
end

end_stream(log, live, end_id, end_payload, has_log == '1')

if redis.call('EXISTS', worker) == 1 then
  if counter ~= '' then redis.pcall('HINCRBY', worker, counter, 1) end
  redis.pcall('HINCRBYFLOAT', worker, 'total_working_time', working_time)
end
pcall(enqueue_dependents, job, job_id, status, ended_at)
return 1

-- Cancels a queued job, or asks the worker of a running job to stop it. The caller loads this script
-- behind the Lua function end_stream (jobs.stream.entries.END_LUA).
--
-- KEYS  job: hash of the job
--       queue: list of the ids that wait
--       registry: RQ's registry of canceled jobs
--       results: stream of the results of the job
--       outbox: stream of the rows of the run
--       outboxes: set of the runs that have rows in their outbox
--       log: replay log of the token stream
--       live: pub/sub channel of the token stream
-- ARGV  job_id: id of the job
--       expected_attempt: number of attempts when the caller made the row
--       error: JobError as JSON
--       row: row for the outbox
--       run: name of the run
--       end_id, end_payload: last entry of the token stream
--       ended_at: time of the end in RQ's format
--       now: current time in seconds since the epoch
--       keep: seconds to keep the job
--       control_channel, control_message: message that asks the worker of a running job to stop it
--       result_fields…: field, value, … of the entry in the results stream
-- Returns 'over' if the job has ended, 'cancelled' if it was queued, 'asked' if it runs, 'again' if
--       an attempt has started since the caller made the row. Nothing has changed after 'over' and
--       'again'.
--
-- Atomic: the server runs the whole script before any other command. LREM decides whether this
-- script or a worker's claim has the job. LREM is also the first write: a full Redis runs it, and
-- refuses no command of a script after its first write.
local job, queue, registry, results, outbox, outboxes, log, live = unpack(KEYS)
local job_id, expected_attempt, error, row, run, end_id, end_payload, ended_at, now, keep,
  control_channel, control_message = unpack(ARGV)
local result_fields = {unpack(ARGV, 13)}

local status = redis.call('HGET', job, 'status')
if not status or status == 'finished' or status == 'failed' or status == 'stopped'
  or status == 'canceled' then return 'over' end
if (redis.call('HGET', job, 'chatjobs_attempt') or '0') ~= expected_attempt then return 'again' end
if redis.call('LREM', queue, 1, job_id) == 0 then
  redis.call('HSET', job, 'chatjobs_cancel', 1)
  redis.call('PUBLISH', control_channel, control_message)
  return 'asked'
end
redis.call('HSET', job, 'status', 'canceled', 'ended_at', ended_at, 'chatjobs_error', error)
redis.call('EXPIRE', job, keep)
redis.call('ZREMRANGEBYSCORE', registry, '-inf', now)
redis.call('ZADD', registry, now + keep, job_id)
redis.call('XADD', results, '*', unpack(result_fields))
redis.call('EXPIRE', results, keep)
redis.call('XADD', outbox, '*', 'row', row)
redis.call('SADD', outboxes, run)
end_stream(log, live, end_id, end_payload)
return 'cancelled'

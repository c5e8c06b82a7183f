-- Cancel a queued job, or ask the worker of a running one to stop it.
-- Needs the prelude END_LUA of jobs.stream.entries, which defines end_stream().
--
-- KEYS: job hash, queue, registry of canceled jobs, log, live channel, results, outbox of the run,
-- set of the runs that have an outbox.
-- ARGV: job id, expected number of attempts, error JSON, outbox row, run, end entry's id and
-- payload, time of the end (RQ's format), now (seconds), seconds to keep the job, control channel,
-- control message; from the 13th on the result entry as field, value, …
-- Returns 'over' if the job has ended, 'cancelled' if it was queued, 'asked' if it runs, 'again'
-- if an attempt has started since the caller made the row.
--
-- One script, so that the job leaves its queue and gets its row, error and end entry together:
-- LREM decides whether this script or a worker's claim has the job.
local job, queue, registry, log, live, results, outbox, outboxes = unpack(KEYS)
local job_id, expected_attempt, error_json, row, run, end_id, end_payload, ended_at, now,
  keep_seconds, control_channel, control_message = unpack(ARGV)

local status = redis.call('HGET', job, 'status')
if not status or status == 'finished' or status == 'failed' or status == 'stopped'
  or status == 'canceled' then return 'over' end
if (redis.call('HGET', job, 'chatjobs_attempt') or '0') ~= expected_attempt then return 'again' end
if redis.call('LREM', queue, 1, job_id) == 0 then
  redis.call('HSET', job, 'chatjobs_cancel', 1)
  redis.call('PUBLISH', control_channel, control_message)
  return 'asked'
end
redis.call('HSET', job, 'status', 'canceled', 'ended_at', ended_at, 'chatjobs_error', error_json)
redis.call('EXPIRE', job, keep_seconds)
redis.call('ZREMRANGEBYSCORE', registry, '-inf', now)
redis.call('ZADD', registry, now + keep_seconds, job_id)
redis.call('XADD', results, '*', unpack(ARGV, 13))
redis.call('EXPIRE', results, keep_seconds)
redis.call('XADD', outbox, '*', 'row', row)
redis.call('SADD', outboxes, run)
end_stream(log, live, end_id, end_payload)
return 'cancelled'

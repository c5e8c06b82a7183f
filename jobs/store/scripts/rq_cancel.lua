#!lua flags=allow-oom
-- Ends a job that waits, or asks the worker of a running job to stop it. The caller loads this script
-- behind the Lua functions end_stream (jobs.stream.entries.END_LUA), enqueue_dependents and those of
-- rq_tenants.lua, rq_turns.lua and rq_rows.lua.
--
-- KEYS  job: hash of the job
--       queue: list of the ids that wait
--       quarantine: list of the suspects that wait
--       scheduled: RQ's registry of jobs that wait for their time
--       deferred: RQ's registry of jobs that wait for other jobs
--       registry: RQ's registry of the jobs that ended this way
--       results: stream of the results of the job
--       outbox: stream of the rows of the run
--       outboxes: set of the runs that have rows in their outbox
--       log: replay log of the token stream
--       live: pub/sub channel of the token stream
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       deadlines: sorted set of the jobs with a time to live
--       rows: hash of the reserved rows near this one
-- ARGV  job_id: id of the job
--       status: RQ's status of its end
--       expected_attempt: attempts in the job's hash when the caller made the row; '' for none
--       attempt: number of the attempt whose row this is
--       error: JobError as JSON
--       row: row for the outbox
--       run: name of the run
--       end_id, end_payload: last entry of the token stream
--       ended_at: time of the end in RQ's format
--       now: current time in seconds since the epoch
--       keep: seconds to keep the job
--       row_field, row_seconds: field of the row in rows, and seconds that it stays reserved
--       control_channel, control_message: message that asks the worker of a running job to stop it;
--       '' for none
--       result_fields…: field, value, … of the entry in the results stream
-- Returns 'over' if the job has ended, 'ended' if it waited, 'asked' if it runs, 'again' if
--       an attempt has started since the caller made the row. Nothing has changed after 'over' and
--       'again'.
--
-- Atomic: the server runs the whole script before any other command. It is not rolled back when a
-- command fails, so the row, whose keys may have another type, is written first. A full Redis runs it:
-- ended jobs make room.
local job, queue, quarantine, scheduled, deferred, registry, results, outbox, outboxes, log, live,
  open_bytes, deadlines, rows = unpack(KEYS)
local job_id, status, expected_attempt, attempt, error, row, run, end_id, end_payload, ended_at, now,
  keep, row_field, row_seconds, control_channel, control_message = unpack(ARGV)
local result_fields = {unpack(ARGV, 17)}

local before, attempts = unpack(redis.call('HMGET', job, 'status', 'chatjobs_attempt'))
if not before or before == 'finished' or before == 'failed' or before == 'stopped'
  or before == 'canceled' then return 'over' end
if (attempts or '') ~= expected_attempt then return 'again' end
local waits = in_list(queue, job_id) or redis.call('LPOS', quarantine, job_id)
  or redis.call('ZSCORE', scheduled, job_id) or redis.call('ZSCORE', deferred, job_id)
if not waits then
  if control_message ~= '' then
    redis.call('HSET', job, 'chatjobs_cancel', 1)
    redis.call('PUBLISH', control_channel, control_message)
  end
  return 'asked'
end
append_row(outbox, outboxes, run, row)
-- These keys have their types: the job was found in one of them, and those before it were read.
local _ = remove_job(queue, job_id) or redis.call('LREM', quarantine, 1, job_id) > 0
  or redis.call('ZREM', scheduled, job_id) > 0 or redis.call('ZREM', deferred, job_id)
redis.call('HSET', job, 'status', status, 'ended_at', ended_at, 'chatjobs_error', error,
  'chatjobs_row', attempt, 'chatjobs_attempt', attempt)
redis.call('EXPIRE', job, keep)
redis.pcall('ZADD', registry, now + keep, job_id)
redis.pcall('XADD', results, '*', unpack(result_fields))
redis.pcall('EXPIRE', results, keep)
redis.pcall('ZREM', deadlines, job_id)
pcall(row_written, rows, row_field, row_seconds)
free_bytes(job, open_bytes, queue)
end_stream(log, live, end_id, end_payload, true)
pcall(enqueue_dependents, job, job_id, status, ended_at)
pcall(end_turn, redis.call('HGET', job, 'chatjobs_session') or '', job_id, '', '0')
return 'ended'

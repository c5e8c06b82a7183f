#!lua flags=allow-oom
-- Writes the row of a job that ended without one: RQ's own tools cancelled or failed it. The caller
-- loads this script behind the Lua functions end_stream, enqueue_dependents and those of
-- rq_tenants.lua, rq_turns.lua and rq_rows.lua.
--
-- KEYS  job: hash of the job
--       registry: RQ's registry of the jobs that ended this way
--       outbox: stream of the rows of the run
--       outboxes: set of the runs that have rows in their outbox
--       log: replay log of the token stream
--       live: pub/sub channel of the token stream
--       queue: list of the ids that wait; the name under which open_bytes counts
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       deadlines: sorted set of the jobs with a time to live
--       rows: hash of the reserved rows near this one
-- ARGV  job_id: id of the job
--       status: RQ's status that the caller has read
--       attempt: number of the attempt whose row this is
--       row: row for the outbox
--       run: name of the run
--       error: JobError as JSON
--       end_id, end_payload: last entry of the token stream
--       ended_at: time in RQ's format
--       keep: seconds to keep the job
--       expires: score in the registry, the time when the entry expires
--       row_field, row_seconds: field of the row in rows, and seconds that it stays reserved
-- Returns 1, or 0 if the job has changed or has a row of this attempt: nothing has changed then.
--
-- Atomic: the server runs the whole script before any other command, so the row is written once.
local job, registry, outbox, outboxes, log, live, queue, open_bytes, deadlines,
  rows = unpack(KEYS)
local job_id, status, attempt, row, run, error, end_id, end_payload, ended_at, keep,
  expires, row_field, row_seconds = unpack(ARGV)

local state, recorded = unpack(redis.call('HMGET', job, 'status', 'chatjobs_row'))
if state ~= status or recorded == attempt then return 0 end
append_row(outbox, outboxes, run, row)
redis.call('HSET', job, 'chatjobs_row', attempt, 'chatjobs_error', error)
redis.call('EXPIRE', job, keep)
redis.pcall('ZADD', registry, expires, job_id)
redis.pcall('ZREM', deadlines, job_id)
pcall(row_written, rows, row_field, row_seconds)
free_bytes(job, open_bytes, queue)
end_stream(log, live, end_id, end_payload, true)
pcall(enqueue_dependents, job, job_id, status, ended_at)
pcall(end_turn, redis.call('HGET', job, 'chatjobs_session') or '', job_id, '', '0')
return 1

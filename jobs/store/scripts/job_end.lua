-- Prelude for scripts that end a job, and the only way in which a job ends. Such a script checks first
-- that the job is its own to end: a worker holds its lease, it waits, or RQ's own tools have ended it.
-- Needs the functions of end_stream.lua, queue.lua, dependents.lua, turns.lua and reservations.lua.
--
-- end_job(keys, args, leave) writes the row, and then what follows from the end. leave removes the job from
-- where it is held or waits.
--
-- keys  job: hash of the job
--       queue: list of the ids that wait; the name under which open_bytes counts
--       registry: RQ's registry for jobs that ended this way
--       results: stream of the results of the job
--       outbox: stream of the rows of the run
--       outboxes: set of the runs that have rows in their outbox
--       log: replay log of the token stream
--       live: pub/sub channel of the token stream
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       deadlines: sorted set of the jobs with a time to live
--       hashes…: hashes of the reserved rows near those of the job
-- args  job_id: id of the job
--       status: RQ's status: "finished", "failed" or "canceled"
--       attempt: number of the attempt whose row this is
--       ended_at: time of the end in RQ's format
--       now: current time in seconds since the epoch
--       keep: seconds to keep the job; 0 deletes it, -1 keeps it for ever
--       error: JobError as JSON; '' for none
--       failures: the failed attempts so far, as JSON; '' to leave them
--       row: entry for the outbox, with all rows of the job
--       run: name of the run
--       fields, row_seconds: the rows of the job, as reserve_rows takes them, and seconds that they stay
--       reserved
--       end_id, end_payload: last entry of the token stream
--       has_log: '1' if the entry goes to the log as well, '0' for a job that publishes no tokens
--       session: session in the job's request, '' for none
--       turn, replaces_turn: its turn of the session as JSON, '' for none, and '1' if it takes the
--       place of the last one
--       result_fields…: field, value, … of the entry in the results stream; none if RQ has written it
--
-- The jobs that depend on this one are queued here, since the reply may get lost.
--
-- Atomic as part of the script that calls it. It is not rolled back when a command fails, so the keys of
-- the row and of the turn, which may have another type, come first: nothing has changed if one has. The job
-- leaves its place directly after the row is written, so the row is written once whatever happens to
-- the commands that follow.
local MAX_RESULTS = 10  -- of one job, as RQ keeps them

-- Forgets some jobs of a registry whose time has passed and that are gone. One that RQ's own tools have
-- cancelled has the time of its end there, and must stay until the maintenance has written its row.
local function forget_gone(registry, now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', registry, '-inf', now, 'LIMIT', 0, 8)) do
    if redis.call('EXISTS', 'rq:job:' .. id) == 0 then redis.call('ZREM', registry, id) end
  end
end

-- Adds the result, and keeps no more of the stream than its entries need: XADD reserves 4 KiB, a copy is as
-- large as its entries.
local function add_result(results, fields)
  redis.pcall('XADD', results, 'MAXLEN', MAX_RESULTS, '*', unpack(fields))
  redis.pcall('COPY', results, results .. ':copy')
  redis.pcall('RENAME', results .. ':copy', results)
end

-- True if a job has the attempts and the failures that its row was made with: both as they are in its hash,
-- '' for none.
local function is_as_read(job, attempt, failures)
  local now = redis.call('HMGET', job, 'chatjobs_attempt', 'chatjobs_failures')
  return (now[1] or '') == attempt and (now[2] or '') == failures
end

local function end_job(keys, args, leave)
  local job, queue, registry, results, outbox, outboxes, log, live, open_bytes,
    deadlines = unpack(keys)
  local hashes = {unpack(keys, 11)}
  local job_id, status, attempt, ended_at, now, keep, error, failures, row, run, fields, row_seconds,
    end_id, end_payload, has_log, session, turn, replaces_turn = unpack(args)
  local result_fields = {unpack(args, 19)}
  keep = tonumber(keep)

  check_turn(session, turn)
  append_row(outbox, outboxes, run, row)
  leave()

  if session == '' then  -- its request may be unreadable
    local stored = redis.pcall('HGET', job, 'chatjobs_session')
    session = type(stored) == 'string' and stored or ''
  end
  pcall(end_turn, session, job_id, turn, replaces_turn)
  redis.pcall('ZREM', deadlines, job_id)
  rows_written(hashes, fields, row_seconds)

  local has_hash = redis.call('TYPE', job).ok == 'hash'  -- else another program has deleted it
  if has_hash then
    free_bytes(job, open_bytes, queue)
    redis.call('HSET', job, 'status', status, 'ended_at', ended_at, 'chatjobs_row', attempt,
      'chatjobs_attempt', attempt)
    if error ~= '' then redis.call('HSET', job, 'chatjobs_error', error) end
    if failures ~= '' then redis.call('HSET', job, 'chatjobs_failures', failures) end
    pcall(forget_gone, registry, now)
    if keep ~= 0 then
      redis.pcall('ZADD', registry, keep < 0 and '+inf' or now + keep, job_id)
      if #result_fields > 0 then add_result(results, result_fields) end
    else
      redis.pcall('ZREM', registry, job_id)
    end
  end
  end_stream(log, live, end_id, end_payload, has_log == '1')
  pcall(enqueue_dependents, job, job_id, status, ended_at)
  if not has_hash then return end
  -- The Redis user of a tenant has no right to RQ's keys of dependencies: its jobs have none.
  for _, key in ipairs({job, results, job .. ':dependents', dependencies_of(job_id)}) do
    if keep == 0 then
      redis.pcall('DEL', key)
    elseif keep > 0 then
      redis.pcall('EXPIRE', key, keep)
    else
      redis.pcall('PERSIST', key)
    end
  end
end

#!lua flags=allow-oom
-- Moves jobs from the front of their queues to "started", in the name of one worker.
--
-- KEYS  queue and wip key of each queue, alternating: first the interactive queues of all models,
--       then the bulk queues of all models in the same order, so that a bulk job is taken only
--       when the interactive queues of all models have left room.
-- ARGV  worker: name of the worker
--       execution_prefix: start of the execution ids, unique to this call
--       now_text: current time in RQ's format
--       now_seconds: current time in seconds since the epoch
--       score: score of the first lease in the wip set
--       rooms…: for each model, the number of jobs to take at most
-- Returns one list per job taken: {number of the queue from 1, job id, attempt, execution id,
--       then the fields of the job hash in the order of FIELDS in rq_job.py}.
--
-- An id without a job hash is dropped, as RQ drops it, and so is an id that no RQ job can have. An
-- id that was queued twice is dropped the second time: its job is over or running.
--
-- Atomic: the server runs the whole script before any other command. It is not rolled back when a
-- command fails. A job leaves its queue (LPOP) last, so no job can be lost. A full Redis runs it.
local queues_and_wips = KEYS
local worker, execution_prefix, now_text, now_seconds, score = unpack(ARGV)
local rooms = {unpack(ARGV, 6)}

local ended = {finished = true, failed = true, stopped = true, canceled = true}

local function is_waiting(id, job)
  if not string.find(id, '^[!-~]+$') or redis.call('TYPE', job).ok ~= 'hash' then return false end
  local status = redis.call('HGET', job, 'status')
  if status == 'started' then return redis.call('EXISTS', 'rq:executions:' .. id) == 0 end
  return not ended[status]
end

local function next_attempt(job)
  local before = tonumber(redis.call('HGET', job, 'chatjobs_attempt') or 0) or 0
  if before % 1 ~= 0 or before < 0 or before > 1e9 then before = 0 end
  return string.format('%d', before + 1)
end

for model, room in ipairs(rooms) do rooms[model] = tonumber(room) end
local taken = {}
for number = 1, #queues_and_wips / 2 do
  local queue, wip = queues_and_wips[2 * number - 1], queues_and_wips[2 * number]
  local model = (number - 1) % #rooms + 1
  while rooms[model] > 0 do
    local id = redis.call('LINDEX', queue, 0)
    if not id then break end
    local job = 'rq:job:' .. id
    if is_waiting(id, job) then
      local attempt = next_attempt(job)
      local execution = execution_prefix .. attempt
      -- One microsecond more per job keeps the order of the claims in the wip set.
      local job_score = string.format('%.17g', score + #taken * 1e-6)
      redis.call('HSET', job, 'status', 'started', 'worker_name', worker, 'started_at', now_text,
        'last_heartbeat', now_text, 'chatjobs_attempt', attempt)
      redis.call('PERSIST', job)
      redis.call('HSET', 'rq:execution:' .. id .. ':' .. execution, 'id', execution,
        'created_at', now_seconds, 'last_heartbeat', now_seconds, 'worker_name', worker)
      redis.call('ZADD', 'rq:executions:' .. id, job_score, execution)
      redis.call('ZADD', wip, job_score, id .. ':' .. execution)
      local fields = redis.call('HMGET', job, 'data', 'enqueued_at', 'created_at', 'result_ttl',
        'failure_ttl', 'chatjobs_retried', 'chatjobs_lost', 'chatjobs_cancel')
      taken[#taken + 1] = {number, id, attempt, execution, unpack(fields)}
      rooms[model] = rooms[model] - 1
    end
    redis.call('LPOP', queue)
  end
end
return taken

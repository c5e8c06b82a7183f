#!lua flags=allow-oom
-- Moves jobs from the front of their queues to "started", in the name of one worker.
--
-- KEYS  started: sorted set of the jobs that the worker has started
--       workers: sorted set of the workers
--       lists…: queue, wip and quarantine key of each queue in turn: first the interactive queues of
--       all models, then the bulk queues of all models in the same order, so that a bulk job is
--       taken only when the interactive queues of all models have left room.
-- ARGV  worker: name of the worker
--       execution_prefix: start of the execution ids, unique to this call
--       now_text: current time in RQ's format
--       now_seconds: current time in seconds since the epoch
--       score: score of the first lease in the wip set
--       take_suspects: '1' if the worker runs no job: it takes the first group of suspects from the
--       quarantines and nothing else; if there is none, it takes other jobs
--       rooms…: for each model, the number of jobs to take at most
-- Returns one list per job taken: {number of the queue from 1, job id, attempt, execution id,
--       then the fields of the job hash in the order of FIELDS in rq_job.py}.
--
-- An id without a job hash is dropped, as RQ drops it, and so is an id that no RQ job can have. An
-- id that was queued twice is dropped the second time: its job is over or running.
--
-- Atomic: the server runs the whole script before any other command. It is not rolled back when a
-- command fails. A job leaves its queue (LPOP) last, so no job can be lost. A full Redis runs it.
local started, workers = unpack(KEYS)
local lists = {unpack(KEYS, 3)}
local worker, execution_prefix, now_text, now_seconds, score, take_suspects = unpack(ARGV)
local rooms = {unpack(ARGV, 7)}

local ended = {finished = true, failed = true, stopped = true, canceled = true}
local taken = {}

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

local function start(number, id, job, queue, wip, list)
  local attempt = next_attempt(job)
  local execution = execution_prefix .. attempt
  -- One microsecond more per job keeps the order of the claims in the sorted sets.
  local job_score = string.format('%.17g', score + #taken * 1e-6)
  redis.call('HSET', job, 'status', 'started', 'worker_name', worker, 'started_at', now_text,
    'last_heartbeat', now_text, 'chatjobs_attempt', attempt)
  if list == queue then redis.call('HDEL', job, 'chatjobs_group') end  -- of an earlier end
  redis.call('PERSIST', job)
  redis.call('HSET', 'rq:execution:' .. id .. ':' .. execution, 'id', execution,
    'created_at', now_seconds, 'last_heartbeat', now_seconds, 'worker_name', worker)
  redis.call('ZADD', 'rq:executions:' .. id, job_score, execution)
  redis.call('ZADD', wip, job_score, id .. ':' .. execution)
  local name = string.sub(queue, #'rq:queue:' + 1)
  redis.call('ZADD', started, job_score, execution .. ' ' .. id .. ' ' .. name)
  local fields = redis.call('HMGET', job, 'data', 'enqueued_at', 'created_at', 'result_ttl',
    'failure_ttl', 'chatjobs_retried', 'chatjobs_group', 'chatjobs_cancel')
  taken[#taken + 1] = {number, id, attempt, execution, unpack(fields)}
end

-- Takes jobs from `list` for as long as there is room and `accepts` returns true for the next one.
local function take(list, number, queue, wip, accepts)
  local model = (number - 1) % #rooms + 1
  while rooms[model] > 0 do
    local id = redis.call('LINDEX', list, 0)
    if not id then return end
    local job = 'rq:job:' .. id
    if is_waiting(id, job) then
      if not accepts(job) then return end
      start(number, id, job, queue, wip, list)
      rooms[model] = rooms[model] - 1
    end
    redis.call('LPOP', list)
  end
end

local function is_any() return true end

local first_group
local function in_first_group(job)
  local group = redis.call('HGET', job, 'chatjobs_group') or ''
  first_group = first_group or group
  return group == first_group
end

for model, room in ipairs(rooms) do rooms[model] = tonumber(room) end
-- Whoever looks for the jobs of dead workers starts with the workers.
if not redis.call('ZSCORE', workers, worker) then
  redis.call('ZADD', workers, string.format('%d', now_seconds * 1000), worker)
end
if take_suspects == '1' then
  for number = 1, #lists / 3 do
    local queue, wip, quarantine = unpack(lists, 3 * number - 2, 3 * number)
    take(quarantine, number, queue, wip, in_first_group)
  end
  if #taken > 0 then return taken end
end
for number = 1, #lists / 3 do
  local queue, wip = unpack(lists, 3 * number - 2, 3 * number - 1)
  take(queue, number, queue, wip, is_any)
end
return taken

#!lua flags=allow-oom
-- Returns a started job to its queue, or to the quarantine of its queue if it is in a group of
-- suspects; or moves it to another queue. The caller loads this script behind queue.lua, reservations.lua
-- and lease.lua.
--
-- KEYS  wip, execution, executions, started, workers: those of lease.lua
--       job: hash of the job
--       queue: list of the ids that wait, of the queue that the job moves to if it moves
--       quarantine: list of the suspects that wait
--       scheduled: RQ's registry of jobs that wait for their time, scores in seconds
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       old_queue: key of the queue that it was taken from
-- ARGV  job_id, execution_id, entry, dead, seen_lease: those of lease.lua
--       push: 'LPUSH' for the front of the queue, 'RPUSH' for its end
--       counter: field of the job hash to increment, for a job that returns after an error; '' else
--       limit: highest value that the counter may reach
--       undo_attempt: '1' if the attempt has not started and does not count, else '0'
--       lost, lost_at: number of workers that died with the job, time of the last death; '' to
--       leave both
--       group: group of suspects that the job joins; '' for none
--       delay: milliseconds that the job waits before it is queued; '' for none
--       failures: the failed attempts so far, as JSON; '' to leave them
--       origin: name of the queue that the job moves to; '' to leave it in its own
--       longer: '<tokens> <worker>' of a job that is left to a worker with a longer context, see
--       longer.lua; '' to leave the job's own
-- Returns 0 if the lease is lost or the worker is alive, 1 if the job waits again, 2 if the counter
--       is at its limit. The job has not changed after 0 and 2.
--
-- Atomic: the server runs the whole script before any other command. It is not rolled back when a
-- command fails, so the job is queued first, and nothing changes if that fails. The lease is removed
-- last, so the job is always in its queue or held. A full Redis runs it.
local wip, execution, executions, started, workers, job, queue, quarantine, scheduled, open_bytes,
  old_queue = unpack(KEYS)
local job_id, execution_id, entry, dead, seen_lease, push, counter, limit, undo_attempt, lost, lost_at,
  group, delay, failures, origin, longer = unpack(ARGV)

local WAKE_MS = 1000  -- that a wake of the worker with a longer context is kept

-- Moves the first job of a list behind those that were returned for a longer context as well, and were
-- enqueued before it or at the same time.
local function keep_order(list)
  local enqueued_at = redis.call('HGET', job, 'enqueued_at') or ''
  local before
  for _, id in ipairs(redis.call('LRANGE', list, 1, MAX_LONGER)) do
    local its = redis.pcall('HMGET', 'rq:job:' .. id, 'chatjobs_longer', 'enqueued_at')
    if its[1] and its[2] and its[2] <= enqueued_at then before = id end
  end
  if before and before ~= job_id then
    redis.call('LINSERT', list, 'AFTER', before, job_id)
    redis.call('LPOP', list)
  end
end

if not holds_lease(KEYS, ARGV) then return 0 end
if redis.call('TYPE', job).ok == 'hash' then
  local used = counter ~= '' and tonumber(redis.call('HGET', job, counter) or 0) or 0
  if counter ~= '' and used + 1 > tonumber(limit) then return 2 end
  local forgets_group = counter == 'chatjobs_retried'
  local is_suspect = group ~= ''
    or not forgets_group and redis.call('HEXISTS', job, 'chatjobs_group') == 1
  if is_suspect then
    redis.call(push, quarantine, job_id)
    redis.call('HSET', job, 'status', 'queued')
  elseif delay ~= '' then
    local time = redis.call('TIME')
    local due = time[1] + time[2] / 1e6 + delay / 1000
    redis.call('ZADD', scheduled, string.format('%.3f', due), job_id)
    redis.call('HSET', job, 'status', 'scheduled', 'chatjobs_delay', delay)
  else
    queue_job(push, queue, job_id)
    if longer ~= '' then keep_order(list_of(queue, tenant_of(job_id))) end
  end
  if longer ~= '' then
    redis.call('HSET', job, 'chatjobs_longer', longer)
    wake('chatjobs:wake-worker:' .. string.match(longer, '^%d+ (.+)$'), WAKE_MS)
  end
  if counter ~= '' then redis.call('HSET', job, counter, used + 1) end
  if forgets_group then
    redis.call('HDEL', job, 'chatjobs_group', 'chatjobs_lost', 'chatjobs_lost_at')
  end
  redis.call('HDEL', job, 'worker_name', 'started_at')
  if undo_attempt == '1' then redis.pcall('HINCRBY', job, 'chatjobs_attempt', -1) end
  if lost ~= '' then
    redis.call('HSET', job, 'chatjobs_lost', lost, 'chatjobs_lost_at', lost_at)
  end
  if group ~= '' then redis.call('HSET', job, 'chatjobs_group', group) end
  if failures ~= '' then redis.call('HSET', job, 'chatjobs_failures', failures) end
  if origin ~= '' then
    redis.call('HSET', job, 'origin', origin)
    local bytes = free_bytes(job, open_bytes, old_queue)
    if bytes then hold_bytes(job, open_bytes, queue, bytes) end
  end
end
give_up_lease(KEYS, ARGV)
return 1

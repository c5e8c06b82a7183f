#!lua flags=allow-oom
-- Returns a started job to its queue.
--
-- KEYS  job: hash of the job
--       wip: sorted set of the started jobs of its queue
--       execution: hash of this execution
--       executions: sorted set of the executions of the job
--       queue: list of the ids that wait
--       absent_lease: lease of the worker that died with the job; unused if check_absent is '0'
-- ARGV  job_id, execution_id: their member in wip is the lease of this attempt
--       check_absent: '1' to do nothing while absent_lease exists, else '0'
--       push: 'LPUSH' for the front of the queue, 'RPUSH' for its end
--       counter: field of the job hash to increment; '' for none
--       limit: highest value that the counter may reach
--       uncount: '1' if the attempt has not started and does not count, else '0'
-- Returns 0 if the lease is lost, 1 if the job waits again, 2 if the counter is at its limit.
--       Nothing has changed after 0 and 2.
--
-- Atomic: the server runs the whole script before any other command. It is not rolled back when a
-- command fails. The lease is removed last, so the job is always in its queue or held. A full Redis
-- runs it.
local job, wip, execution, executions, queue, absent_lease = unpack(KEYS)
local job_id, execution_id, check_absent, push, counter, limit, uncount = unpack(ARGV)

local lease = job_id .. ':' .. execution_id
if check_absent == '1' and redis.call('EXISTS', absent_lease) == 1 then return 0 end
if not redis.call('ZSCORE', wip, lease) then return 0 end

if redis.call('EXISTS', job) == 1 then
  if counter ~= '' then
    local used = tonumber(redis.call('HGET', job, counter) or 0) or 0
    if used + 1 > tonumber(limit) then return 2 end
    redis.call('HSET', job, counter, used + 1)
  end
  redis.call('HSET', job, 'status', 'queued')
  redis.call('HDEL', job, 'worker_name', 'started_at')
  if uncount == '1' then redis.call('HINCRBY', job, 'chatjobs_attempt', -1) end
  redis.call(push, queue, job_id)
end
redis.call('ZREM', wip, lease)
redis.call('DEL', execution)
redis.call('ZREM', executions, execution_id)
return 1

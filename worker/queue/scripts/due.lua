#!lua flags=allow-oom
-- Queues the jobs of a queue whose scheduled time has come (RQ's enqueue_in and enqueue_at).
--
-- KEYS  scheduled: RQ's registry of jobs that wait for their time, scores in seconds
--       queue: list of the ids that wait
--       queues: set of all queues
-- ARGV  portion: number of jobs to queue at most
--       now_text: current time in RQ's format
-- Returns the number of jobs that left the registry.
--
-- Atomic: the server runs the whole script before any other command, so that two workers never queue
-- a job twice. Jobs that were cancelled or deleted meanwhile only leave the registry.
local scheduled, queue, queues = unpack(KEYS)
local portion, now_text = unpack(ARGV)

local ids = redis.call('ZRANGEBYSCORE', scheduled, '-inf', redis.call('TIME')[1], 'LIMIT', 0, portion)
for _, id in ipairs(ids) do
  local job = 'rq:job:' .. id
  redis.call('ZREM', scheduled, id)
  if redis.call('TYPE', job).ok == 'hash' and redis.call('HGET', job, 'status') == 'scheduled' then
    redis.call('HSET', job, 'status', 'queued', 'enqueued_at', now_text)
    redis.call('SADD', queues, queue)
    redis.call('RPUSH', queue, id)
  end
end
return #ids

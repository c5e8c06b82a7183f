-- Put a new job into its queue.
--
-- KEYS: job hash, queue (list of ids), set of all queues, log and results of an earlier job of
-- this id, which are deleted.
-- ARGV: job id, then two fields of the hash that tell this job from another one of the same id:
-- created_at and data; from the 4th on the whole hash as field, value, …
-- Returns 1 if the job is enqueued, 0 if its id is taken.
--
-- One script, so that no worker sees an id in the queue whose hash is missing. It may run twice:
-- the client library sends it again if a connection breaks before the reply. The second run finds
-- its own job and changes nothing.
local job, queue, queues, log, results = unpack(KEYS)
local job_id, created_at, data = unpack(ARGV)

if redis.call('EXISTS', job) == 1 then
  local stored = redis.call('HMGET', job, 'created_at', 'data')
  return (stored[1] == created_at and stored[2] == data) and 1 or 0
end
redis.call('DEL', log, results)
redis.call('HSET', job, unpack(ARGV, 4))
redis.call('SADD', queues, queue)
redis.call('RPUSH', queue, job_id)
return 1

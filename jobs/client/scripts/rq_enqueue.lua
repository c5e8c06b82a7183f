-- Puts a new job into its queue.
--
-- KEYS  job: hash of the job
--       queue: list of the ids that wait
--       queues: set of all queues
--       log: replay log of an earlier job of this id; deleted
--       results: stream of the results of an earlier job of this id; deleted
--       wake: list that idle workers wait on; it keeps the newest 32 elements
-- ARGV  job_id: id of the job
--       created_at, data: two fields of the hash; they tell this job from another one of this id
--       hash_fields…: field, value, … of the whole hash
-- Returns 1 if the job is enqueued, 0 if its id is taken.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply. The
-- second run finds its own job and changes nothing.
--
-- Atomic: the server runs the whole script before any other command, so no worker sees an id in the
-- queue without its hash.
local job, queue, queues, log, results, wake = unpack(KEYS)
local job_id, created_at, data = unpack(ARGV)
local hash_fields = {unpack(ARGV, 4)}

if redis.call('EXISTS', job) == 1 then
  local stored = redis.call('HMGET', job, 'created_at', 'data')
  return (stored[1] == created_at and stored[2] == data) and 1 or 0
end
redis.call('DEL', log, results)
redis.call('HSET', job, unpack(hash_fields))
redis.call('SADD', queues, queue)
redis.call('RPUSH', queue, job_id)
redis.call('LPUSH', wake, 1)
redis.call('LTRIM', wake, 0, 31)
return 1

-- Prelude for scripts that end a job, and for the maintenance of deferred jobs: queues jobs that wait for other
-- jobs, by RQ's rules (rq/job.py, dependencies_are_met). Needs the functions of queue.lua.
--
-- Atomic as part of the script that calls these functions.

-- The set of the jobs that a job waits for. RQ writes two colons.
local function dependencies_of(id) return 'rq:job::' .. id .. ':dependencies' end

-- Whether all jobs that a job waits for have ended as it allows. ended is the one that ends now, with its
-- status: then the others may also be gone. nil for none: nobody knows how one that is gone has ended.
local function are_met(id, allows_failures, ended, status)
  local allowed = {finished = true, failed = allows_failures}
  if ended and not allowed[status] then return false end
  check_type(dependencies_of(id), 'set')
  for _, other in ipairs(redis.call('SMEMBERS', dependencies_of(id))) do
    if other ~= ended then
      check_type('rq:job:' .. other, 'hash')
      local its_status = redis.call('HGET', 'rq:job:' .. other, 'status')
      if (its_status or not ended) and not allowed[its_status] then return false end
    end
  end
  return true
end

-- Queues a deferred job if what it waits for has ended. now is the time in RQ's format. Changes nothing if
-- it fails.
local function enqueue_dependent(id, now, ended, status)
  local job = 'rq:job:' .. id
  local state, origin, allow_failures, at_front = unpack(redis.call('HMGET', job, 'status', 'origin',
    'allow_dependency_failures', 'enqueue_at_front'))
  if state ~= 'deferred' or not origin or not are_met(id, allow_failures == '1', ended, status) then
    return
  end
  local push = at_front == '1' and 'LPUSH' or 'RPUSH'
  queue_job(push, 'rq:queue:' .. origin, id, now, 'rq:deferred:' .. origin)
  for _, other in ipairs(redis.call('SMEMBERS', dependencies_of(id))) do
    redis.pcall('SREM', 'rq:job:' .. other .. ':dependents', id)
  end
end

-- Queues the jobs that wait for this one, which has ended, and for no other. If a key of another type
-- prevents it, the maintenance of their queue does it later.
local function enqueue_dependents(job, job_id, status, now)
  if status ~= 'finished' and status ~= 'failed' then return end
  for _, id in ipairs(redis.call('SMEMBERS', job .. ':dependents')) do
    pcall(enqueue_dependent, id, now, job_id, status)
  end
end

-- Prelude for scripts that end a job: defines enqueue_dependents.
--
-- enqueue_dependents(job, job_id, status, now) queues the jobs that wait for this one and for no
-- other job that has not finished, by RQ's rules (rq/job.py, dependencies_are_met). job is the hash
-- of the job that has ended, status is RQ's, now is the time in RQ's format.
-- Returns nothing. Needs the functions of rq_tenants.lua. Atomic as part of the script that calls it.
local function enqueue_dependent(job, job_id, status, now, id)
  local dependent = 'rq:job:' .. id
  local state, origin, allow_failures, at_front = unpack(redis.call('HMGET', dependent, 'status',
    'origin', 'allow_dependency_failures', 'enqueue_at_front'))
  local allowed = {finished = true, failed = allow_failures == '1'}
  local met = state == 'deferred' and origin and allowed[status]
  for _, parent in ipairs(met and redis.call('SMEMBERS', dependent .. ':dependencies') or {}) do
    local other = parent ~= job_id and redis.call('HGET', 'rq:job:' .. parent, 'status')
    met = met and (not other or allowed[other])
  end
  if not met then return end
  push_job(at_front == '1' and 'LPUSH' or 'RPUSH', 'rq:queue:' .. origin, id)
  redis.call('HSET', dependent, 'status', 'queued', 'enqueued_at', now)
  redis.call('SREM', job .. ':dependents', id)
  redis.pcall('ZREM', 'rq:deferred:' .. origin, id)
end

local function enqueue_dependents(job, job_id, status, now)
  if status ~= 'finished' and status ~= 'failed' then return end
  for _, id in ipairs(redis.call('SMEMBERS', job .. ':dependents')) do
    pcall(enqueue_dependent, job, job_id, status, now, id)  -- it fails if a key has another type
  end
end

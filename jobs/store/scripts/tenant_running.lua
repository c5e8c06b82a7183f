-- Prelude for scripts that start jobs or end their leases: the running jobs of each tenant, and their limit.
-- Needs the functions of queue.lua and the constants in front of it.
--
-- The set chatjobs:tenant-running:<tenant> holds an entry '<execution> <job> <queue>' per running job.
--
-- Atomic as part of the script that calls these functions.

-- The key of the set of the running jobs of a job's tenant; nil if it has none.
local function running_of(id)
  local tenant = tenant_of(id)
  if tenant == '' then return nil end
  return 'chatjobs:tenant-running:' .. tenant
end

-- A job runs no more: its tenant is served again in the queues where it is parked. entry is the job's
-- member of the set of its running jobs.
local function left_running(id, entry)
  local running, tenant = running_of(id), tenant_of(id)
  if not running then return end
  redis.pcall('SREM', running, entry)
  for _, name in ipairs(redis.call('HKEYS', 'chatjobs:tenant-jobs')) do
    local queue = 'rq:queue:' .. name
    local place = redis.pcall('ZSCORE', tenants_of(queue), tenant)
    if type(place) == 'string' and tonumber(place) >= tonumber(PARKED) then
      move_to_end(queue, tenant, last_place(queue))
    end
  end
end

-- Removes jobs that RQ's tools have ended from a set of running jobs. Looks at `count` of them.
local function forget_lost(running, count)
  for _, entry in ipairs(redis.call('SRANDMEMBER', running, count)) do
    local execution, id, name = string.match(entry, '^(%S+) (%S+) (.+)$')
    if not name or not redis.call('ZSCORE', 'rq:wip:' .. name, id .. ':' .. execution) then
      redis.call('SREM', running, entry)
    end
  end
end

-- Adds a job to those that its tenant runs. The set expires some time after the last one started. entry is
-- the job's member of the set of the jobs that its worker has started.
local function note_running(id, entry)
  local running = running_of(id)
  if not running then return end
  forget_lost(running, 2)
  redis.call('SADD', running, entry)
  redis.call('EXPIRE', running, TENANT_RUNNING_SECONDS)
end

-- True if a tenant may have one more running job, by the hash of limits. Counts only leases that are held.
-- is_usable: its set can be read.
local function may_run(limits, tenant, is_usable)
  local set = redis.call('HMGET', limits, 'tenant_running:' .. tenant, 'tenant_running')
  local limit = tonumber(set[1] or '') or tonumber(set[2] or '')
  local running = 'chatjobs:tenant-running:' .. tenant
  if not limit then return true end
  if not is_usable(running, 'set') then return false end
  if redis.call('SCARD', running) < limit then return true end
  forget_lost(running, 8)
  return redis.call('SCARD', running) < limit
end

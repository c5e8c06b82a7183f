-- Prelude for scripts that queue jobs or take them: the lists in which the jobs of a queue wait,
-- one per tenant.
--
-- Jobs without a tenant wait in RQ's list of the queue, the others in one list per tenant,
-- `chatjobs:tenant:<tenant> <queue>`: a tenant has no space, and both may have colons. The sorted set
-- chatjobs:tenants:<queue> holds the tenants with waiting jobs, the next one first; '' stands for RQ's
-- list, as long as others wait too. Tenants that may run no more jobs are parked: they come last, with
-- scores from PARKED on. The hash chatjobs:tenant-jobs counts the jobs in the lists of all tenants, by
-- queue. RQ's own tools put jobs of any tenant into RQ's list, and a claim takes them from there.
--
-- queue is the key of RQ's list, id is the id of a job whose hash exists.
-- Atomic as part of the script that calls these functions.
local PARKED = '4503599627370496'  -- 2^52, as in jobs/keys.py
local MAX_LONGER = 256  -- jobs of a list that a worker leaves to others with a longer context

local function name_of(queue) return string.sub(queue, #'rq:queue:' + 1) end

local function tenants_of(queue) return 'chatjobs:tenants:' .. name_of(queue) end

local function list_of(queue, tenant)
  if tenant == '' then return queue end
  return 'chatjobs:tenant:' .. tenant .. ' ' .. name_of(queue)
end

-- '' for a job without a tenant, also if another program has written the key or a name with spaces.
local function tenant_of(id)
  local tenant = redis.pcall('HGET', 'rq:job:' .. id, 'chatjobs_tenant')
  if type(tenant) ~= 'string' or string.find(tenant, '%s') then return '' end
  return tenant
end

-- Puts a tenant behind all others, whose places are at most `last`. Returns its place.
local function move_to_end(queue, tenant, last)
  redis.call('ZADD', tenants_of(queue), string.format('%.0f', last + 1), tenant)
  return last + 1
end

local function last_place(queue)
  local last = redis.call('ZREVRANGEBYSCORE', tenants_of(queue), '(' .. PARKED, '-inf', 'WITHSCORES',
    'LIMIT', 0, 1)
  return tonumber(last[2] or 0)
end

-- Puts a tenant behind all others and all that are parked.
local function park(queue, tenant)
  local last = tonumber(redis.call('ZREVRANGE', tenants_of(queue), 0, 0, 'WITHSCORES')[2] or 0)
  move_to_end(queue, tenant, math.max(last, tonumber(PARKED)))
end

-- Raises the error of Redis if another program has written a key of another type. What a script writes
-- is not rolled back, so it checks the keys before its first write.
local function check_type(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then
    error({err = 'WRONGTYPE ' .. key .. ' is a ' .. found .. ', not a ' .. kind})
  end
end

-- Wakes a worker that waits on a list of wakes. A list of a queue keeps MAX_WAKES elements; that of one
-- worker keeps one, for `milliseconds`. A list of another type wakes nobody: the workers also look at the
-- queues.
local MAX_WAKES = 32
local full_lists = {}  -- no worker takes an element before the script has ended
local function wake(list, milliseconds)
  if full_lists[list] then return end
  local length = redis.pcall('LPUSH', list, 1)
  if milliseconds then
    redis.pcall('LTRIM', list, 0, 0)
    redis.pcall('PEXPIRE', list, milliseconds)
  elseif type(length) == 'number' and length >= MAX_WAKES then
    redis.call('LTRIM', list, 0, MAX_WAKES - 1)
    full_lists[list] = true
  end
end

-- Raises an error if a job of a tenant, '' for none, can't get into its list. Keys are looked at once in a
-- script, which gives them no other type.
local open_lists = {}
local function open_list(queue, list, tenant)
  if open_lists[list] then return end
  check_type('rq:queues', 'set')
  check_type(list, 'list')
  if tenant ~= '' then check_type(tenants_of(queue), 'zset') end
  redis.call('SADD', 'rq:queues', queue)
  open_lists[list] = true
end

-- The only way into a queue: puts a job into its list, wakes a worker, and gives the job its status. push
-- is 'LPUSH' for the front and 'RPUSH' for the end. enqueued_at is the time in RQ's format; nil leaves
-- the job's own. registry is the sorted set of RQ in which the job has waited so far; nil for none.
-- Changes nothing if it fails.
local function queue_job(push, queue, id, enqueued_at, registry)
  local tenant = tenant_of(id)
  local list = list_of(queue, tenant)
  open_list(queue, list, tenant)
  if tenant ~= '' then
    redis.call('HINCRBY', 'chatjobs:tenant-jobs', name_of(queue), 1)
    if not redis.call('ZSCORE', tenants_of(queue), tenant) then
      move_to_end(queue, tenant, last_place(queue))
    end
  end
  redis.call(push, list, id)
  local job = 'rq:job:' .. id
  redis.call('HSET', job, 'status', 'queued')
  if enqueued_at then redis.call('HSET', job, 'enqueued_at', enqueued_at) end
  if registry then redis.pcall('ZREM', registry, id) end
  wake('chatjobs:wake:' .. name_of(queue))
end

-- A job has left the list of a tenant. A count that another program has written is left alone.
local function left_list(queue, tenant)
  local count = redis.pcall('HINCRBY', 'chatjobs:tenant-jobs', name_of(queue), -1)
  if type(count) == 'number' and count <= 0 then
    redis.call('HDEL', 'chatjobs:tenant-jobs', name_of(queue))
  end
  if redis.call('EXISTS', list_of(queue, tenant)) == 0 then
    redis.pcall('ZREM', tenants_of(queue), tenant)
  end
end

-- True if a job waits in its list.
local function in_list(queue, id)
  local tenant = tenant_of(id)
  if redis.call('LPOS', queue, id) then return true end
  return tenant ~= '' and redis.call('LPOS', list_of(queue, tenant), id) ~= false
end

-- Removes a waiting job from its list. Returns whether it was there.
local function remove_job(queue, id)
  if redis.call('LREM', queue, 1, id) == 1 then return true end
  local tenant = tenant_of(id)
  if tenant == '' or redis.call('LREM', list_of(queue, tenant), 1, id) == 0 then return false end
  left_list(queue, tenant)
  return true
end

#!lua flags=allow-oom
-- Moves jobs from the front of their queues to "started", in the name of one worker. Before that, it
-- queues the scheduled jobs whose time has come (also those of RQ's enqueue_in and enqueue_at). The
-- caller loads this script behind the functions of queue.lua, tenant_running.lua, affinity.lua and longer.lua.
--
-- KEYS  started: sorted set of the jobs that the worker has started
--       workers: sorted set of the workers
--       limits: hash of the limits that an operator has set
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
--       fields, limit_names: fields of the job hashes, and of `limits`, to return; with spaces between
--       capacity…: for each queue, the room of its jobs, in sequences. A job is taken while there is any.
--       An interactive job also takes room of its model's bulk jobs, unless there is room for just one:
--       those must not starve
--       context…: for each queue, the tokens that a sequence may have here; 0 if that is not known
-- Returns {jobs, left, held, now, set}. jobs: one list per job taken: {number of the queue from 1,
--       job id, attempt, execution id, then the values of `fields`}. left: 1 if there is room for jobs
--       of tenants that were not reached in this call, else 0. held: milliseconds until a job that was
--       left to another worker may be taken; -1 without one. now: time of Redis in seconds. set: the
--       values of `limit_names`; nil if `limits` is no hash.
--
-- The tenants of a queue are served round robin: one job of each. A tenant with as many running jobs
-- as the limit tenant_running allows is parked until one of them ends. A call looks at no more than
-- 100 tenants above the number of jobs that there is room for, and at 4 that are parked, since the
-- limit may have changed. It queues at most 100 scheduled jobs per queue.
--
-- A turn of a session may be left to another worker, see affinity.lua; a job that is too long for this one is
-- left to one with a longer context, see longer.lua. At most MAX_HELD turns of a list and MAX_LONGER long jobs
-- are passed over.
--
-- The wake list of a queue without waiting jobs is deleted.
--
-- An id without a job hash is dropped, as RQ drops it, and so is an id that no RQ job can have. An
-- id that was queued twice is dropped the second time: its job is over or running.
--
-- Atomic: the server runs the whole script before any other command. It is not rolled back when a
-- command fails. A job leaves its queue (LPOP) last, so no job can be lost. A full Redis runs it.
local started, workers, limits = unpack(KEYS)
local lists = {unpack(KEYS, 4)}
local worker, execution_prefix, now_text, now_seconds, score, take_suspects,
  fields, limit_names = unpack(ARGV)
local capacity = {unpack(ARGV, 9, 8 + #lists / 3)}
local contexts = {unpack(ARGV, 9 + #lists / 3)}

local MAX_HELD = 16

local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do found[#found + 1] = word end
  return found
end

local job_fields = words(fields)
local ended = {finished = true, failed = true, stopped = true, canceled = true}
local taken = {}
local only_one = {}  -- of each queue: whether there was room for one job

local function is_waiting(id, job)
  if not string.find(id, '^[!-~]+$') or redis.call('TYPE', job).ok ~= 'hash' then return false end
  local status = redis.call('HGET', job, 'status')
  if status == 'started' then return redis.call('EXISTS', 'rq:executions:' .. id) == 0 end
  return not ended[status]
end

local function quarantine_of(queue) return 'chatjobs:quarantine:' .. name_of(queue) end

local function next_attempt(job)
  local before = tonumber(redis.call('HGET', job, 'chatjobs_attempt') or 0) or 0
  if before % 1 ~= 0 or before < 0 or before > 1e9 then before = 0 end
  return string.format('%d', before + 1)
end

-- The sequences that a job adds to the batch. Jobs of other programs do not say it.
local function cost_of(job)
  local cost = tonumber(redis.call('HGET', job, 'chatjobs_cost') or 1)
  return cost and cost >= 1 and cost or 1
end

local function is_type(key, kind)
  local found = redis.call('TYPE', key).ok
  return found == 'none' or found == kind
end

-- A queue or a tenant that has a key of another type, which another program has written, is left alone:
-- the jobs of the others are taken. The error is returned if no job is taken.
local fault

local function usable_by_claims(key, kind)
  if is_type(key, kind) then return true end
  fault = 'WRONGTYPE ' .. key .. ' is not a ' .. kind
  return false
end

local time = redis.call('TIME')
local affinity = session_affinity(worker, time[1] * 1000 + math.floor(time[2] / 1000))
local longer = longer_contexts()

local function start(number, id, job, queue, wip, list)
  local attempt = next_attempt(job)
  local execution = execution_prefix .. attempt
  if not is_type('rq:executions:' .. id, 'zset') then redis.call('DEL', 'rq:executions:' .. id) end
  -- One microsecond more per job keeps the order of the claims in the sorted sets.
  local job_score = string.format('%.17g', score + #taken * 1e-6)
  redis.call('HSET', job, 'status', 'started', 'worker_name', worker, 'started_at', now_text,
    'last_heartbeat', now_text, 'chatjobs_attempt', attempt)
  if list ~= quarantine_of(queue) then redis.call('HDEL', job, 'chatjobs_group') end  -- of earlier
  redis.call('PERSIST', job)
  redis.call('HSET', 'rq:execution:' .. id .. ':' .. execution, 'id', execution,
    'created_at', now_seconds, 'last_heartbeat', now_seconds, 'worker_name', worker)
  redis.call('ZADD', 'rq:executions:' .. id, job_score, execution)
  redis.call('ZADD', wip, job_score, id .. ':' .. execution)
  local name = string.sub(queue, #'rq:queue:' + 1)
  local entry = execution .. ' ' .. id .. ' ' .. name
  redis.call('ZADD', started, job_score, entry)
  pcall(note_running, id, entry)
  affinity.take_session(id, job)
  local values = redis.call('HMGET', job, unpack(job_fields))
  taken[#taken + 1] = {number, id, attempt, execution, unpack(values)}
end

local passed = {}  -- by list: the jobs at its front that this call has passed over

-- Takes the first job of `list` that waits and is not passed over. `verdict` returns 'take' or 'pass'
-- for a job, or 'stop' to take none. Returns whether one was taken. `left` is called for each id that
-- leaves the list.
local function take_one(list, number, queue, wip, verdict, left)
  passed[list] = passed[list] or {held = 0, longer = 0}
  local over = passed[list]
  while over.held < MAX_HELD and over.longer < MAX_LONGER do
    local place = over.held + over.longer
    local id = redis.call('LINDEX', list, place)
    if not id then return false end
    local job = 'rq:job:' .. id
    local waits = is_waiting(id, job)
    local is_left = waits and longer.is_left(job, queue, contexts[number])
    local word = waits and not is_left and verdict(id, job, queue)
    if word == 'stop' then return false end
    if is_left then
      over.longer = over.longer + 1
    elseif word == 'pass' then
      over.held = over.held + 1
    else
      if waits then
        start(number, id, job, queue, wip, list)
        local cost = cost_of(job)
        capacity[number] = capacity[number] - cost
        local bulk = number + #capacity / 2
        if capacity[bulk] and not only_one[bulk] then capacity[bulk] = capacity[bulk] - cost end
      end
      if place == 0 then redis.call('LPOP', list) else redis.call('LREM', list, 1, id) end
      left()
      if waits then return true end
    end
  end
  return false
end

local function nothing() end

-- The worker of the session of a job that was returned for a longer context may be too small for it.
local function unless_held(id, job, queue)
  return not longer_context_of(job) and affinity.is_held(id, job, queue) and 'pass' or 'take'
end

local first_group
local function if_in_first_group(_, job)
  local group = redis.call('HGET', job, 'chatjobs_group') or ''
  first_group = first_group or group
  return group == first_group and 'take' or 'stop'
end

local left_tenants = 0  -- whether tenants wait that were not reached in this call

local function take_round_robin(number, queue, wip)
  local tenants, last = tenants_of(queue), last_place(queue)
  local function next_tenant()
    return redis.call('ZRANGEBYSCORE', tenants, '-inf', '(' .. PARKED, 'LIMIT', 0, 1)[1]
  end
  if redis.call('EXISTS', queue) == 1 and not redis.call('ZSCORE', tenants, '') then
    last = move_to_end(queue, '', last)
  end
  for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', tenants, PARKED, '+inf', 'LIMIT', 0, 4)) do
    if may_run(limits, tenant, usable_by_claims) then
      last = move_to_end(queue, tenant, last)
    else
      park(queue, tenant)
    end
  end
  local served, all_held = {}, false  -- by tenant: number of jobs that were taken when it came last
  for _ = 1, 100 + capacity[number] do
    local tenant = capacity[number] > 0 and next_tenant()
    if not tenant then break end
    all_held = served[tenant] == #taken  -- all jobs that wait are left to other workers
    if all_held then break end
    served[tenant] = #taken
    local list = list_of(queue, tenant)
    if tenant ~= '' and not (usable_by_claims(list, 'list')
      and may_run(limits, tenant, usable_by_claims)) then
      park(queue, tenant)
    else
      last = move_to_end(queue, tenant, last)
      take_one(list, number, queue, wip, unless_held, function()
        if tenant ~= '' then left_list(queue, tenant) end
      end)
      if redis.call('EXISTS', list) == 0 then redis.call('ZREM', tenants, tenant) end
    end
  end
  if capacity[number] > 0 and not all_held and next_tenant() then left_tenants = 1 end
  if redis.call('HEXISTS', 'chatjobs:tenant-jobs', name_of(queue)) == 0 then
    redis.call('DEL', tenants)  -- no tenant waits: RQ's list needs no place
  end
end

-- Removes the elements that wake workers if no job waits: each would make one worker claim nothing.
local function forget_wakes(queue, quarantine)
  if redis.call('EXISTS', queue, quarantine, tenants_of(queue)) > 0 then return end
  local wake = 'chatjobs:wake:' .. name_of(queue)
  if redis.call('TYPE', wake).ok == 'list' then redis.call('DEL', wake) end
end

local function try(work, ...)
  local worked, reason = pcall(work, ...)
  if not worked then fault = type(reason) == 'table' and reason.err or tostring(reason) end
end

local now = string.format('%.3f', time[1] + time[2] / 1e6)

local function queue_due(queue, scheduled)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', scheduled, '-inf', now, 'LIMIT', 0, 100)) do
    try(function()  -- it fails if a key of its tenant has another type
      local job = 'rq:job:' .. id
      if redis.call('TYPE', job).ok == 'hash' and redis.call('HGET', job, 'status') == 'scheduled' then
        queue_job('RPUSH', queue, id, now_text)
      end
      redis.call('ZREM', scheduled, id)
    end)
  end
end

local function reply(left)
  local set = redis.pcall('HMGET', limits, unpack(words(limit_names)))
  local held_ms = affinity.held_ms >= 0 and affinity.held_ms or longer.left_ms
  return {taken, left, held_ms, now, not set.err and set}
end

local function check_queue(queue, wip, quarantine)
  for key, kind in pairs({[queue] = 'list', [wip] = 'zset', [quarantine] = 'list',
    ['rq:scheduled:' .. name_of(queue)] = 'zset', [tenants_of(queue)] = 'zset'}) do
    if not is_type(key, kind) then error('WRONGTYPE ' .. key .. ' is not a ' .. kind) end
  end
end

for number, text in ipairs(capacity) do
  capacity[number], contexts[number] = tonumber(text), tonumber(contexts[number])
  only_one[number] = capacity[number] == 1
end
-- Whoever looks for the jobs of dead workers starts with the workers.
if not redis.call('ZSCORE', workers, worker) then
  redis.call('ZADD', workers, string.format('%d', now_seconds * 1000), worker)
end
if not is_type(started, 'zset') then return redis.error_reply('WRONGTYPE ' .. started) end
local usable = {}  -- numbers of the queues
for number = 1, #lists / 3 do
  local queue, wip, quarantine = unpack(lists, 3 * number - 2, 3 * number)
  try(function()
    check_queue(queue, wip, quarantine)
    usable[#usable + 1] = number
    queue_due(queue, 'rq:scheduled:' .. name_of(queue))
  end)
end
if take_suspects == '1' then
  for _, number in ipairs(usable) do
    local queue, wip, quarantine = unpack(lists, 3 * number - 2, 3 * number)
    while capacity[number] > 0
      and take_one(quarantine, number, queue, wip, if_in_first_group, nothing) do end
  end
  if #taken > 0 then return reply(0) end
end
for _, number in ipairs(usable) do
  local queue, wip, quarantine = unpack(lists, 3 * number - 2, 3 * number)
  if redis.call('EXISTS', tenants_of(queue)) == 1 then
    try(take_round_robin, number, queue, wip)
  else
    while capacity[number] > 0 and take_one(queue, number, queue, wip, unless_held, nothing) do end
  end
  forget_wakes(queue, quarantine)
end
if fault and #taken == 0 then return redis.error_reply(fault) end
return reply(left_tenants)

-- Prelude for claims: which turns of sessions are left to other workers. Needs the functions of queue.lua
-- and statuses.lua.
--
-- A turn is left to the worker that has run the turn before it and may still have its state, if that worker
-- says that it has room, for HOLD_MS from the first call that passes it over. That call wakes the worker.
--
-- Atomic as part of the script that calls these functions.
local HOLD_MS = 250

-- Decides for one claim. worker is its worker, now_ms the time of Redis. held_ms: milliseconds until the
-- first job that was left to another worker may be taken; -1 without one.
local function session_affinity(worker, now_ms)
  local self = {held_ms = -1}
  local session_keys = {}  -- by job; false without a session
  local held = {}  -- by job: whether it is left to another worker

  local function session_key_of(id, job)
    if session_keys[id] == nil then
      local session = redis.call('HGET', job, 'chatjobs_session')
      session_keys[id] = session and 'chatjobs:{' .. session .. '}:session'
    end
    return session_keys[id]
  end

  local function has_room(name, queue)
    return (tonumber(published(name, 'room', name_of(queue))) or 0) > 0
  end

  -- True if a job is left to another worker.
  function self.is_held(id, job, queue)
    if held[id] ~= nil then return held[id] end
    held[id] = false
    local session = session_key_of(id, job)
    local holder = session and redis.pcall('HGET', session, 'worker')
    if type(holder) ~= 'string' or holder == worker or not has_room(holder, queue) then return false end
    local left = HOLD_MS
    local held_until = tonumber(redis.call('HGET', job, 'chatjobs_held') or '')
    if held_until then
      left = held_until - now_ms
      if not (left > 0 and left <= HOLD_MS) then return false end  -- also of a foreign value
    else
      redis.call('HSET', job, 'chatjobs_held', string.format('%d', now_ms + HOLD_MS))
      wake('chatjobs:wake-worker:' .. holder, HOLD_MS)
    end
    held[id] = true
    self.held_ms = self.held_ms < 0 and left or math.min(self.held_ms, left)
    return true
  end

  -- The worker of this claim has the state of the job's session from now on.
  function self.take_session(id, job)
    local session = session_key_of(id, job)
    if session and redis.call('TYPE', session).ok == 'hash' then
      redis.call('HSET', session, 'worker', worker)
    end
  end

  return self
end

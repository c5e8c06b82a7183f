-- Prelude for scripts that begin or end turns of sessions. Needs queue.lua and the constants in front
-- of it. The names are those of jobs/keys.py.
--
-- A session is a hash, the list of its turns, and the list of its jobs that have not ended: the first
-- one runs or is queued, the others wait as RQ's deferred jobs. Only these functions change that list.
--
-- Atomic as part of the script that calls these functions.
local MAX_OPEN = 100  -- jobs of one session that have not ended
local MAX_TTL = 2147483647

-- The number in a field that any program may have written; false for another value.
local function whole(value)
  return value and #value <= 16 and string.find(value, '^%d+$') and tonumber(value)
end

local function session_key(session) return 'chatjobs:{' .. session .. '}:session' end
local function turns_key(session) return 'chatjobs:{' .. session .. '}:turns' end
local function open_key(session) return 'chatjobs:{' .. session .. '}:open' end

-- Removes the jobs at the front that have ended or are gone, whoever did that. Returns the job at the
-- front and its status; nil if there is none.
local function first_open(session)
  local ended = {finished = true, failed = true, stopped = true, canceled = true}
  while true do
    local job = redis.call('LINDEX', open_key(session), 0)
    if not job then return nil end
    local status = redis.pcall('HGET', 'rq:job:' .. job, 'status')  -- an error: of another type
    if type(status) == 'string' and not ended[status] then return job, status end
    redis.call('LPOP', open_key(session))
  end
end

-- The time to live of a session in seconds; nil if another program has written no such number.
local function ttl_of(session)
  local stored = redis.call('HGET', session_key(session), 'ttl')
  if not stored then return OPEN_SESSION_SECONDS end
  local seconds = whole(stored)
  return seconds and seconds >= 1 and seconds <= MAX_TTL and seconds or nil
end

-- Returns the refusal if the numbers of a session can't be read, else nil. Scripts call it before they write.
local function refuse_fields(session)
  return not ttl_of(session) and {'session_field', 'ttl'} or nil
end

-- A session expires some time after its last change.
local function keep_session(session)
  local seconds = ttl_of(session) or OPEN_SESSION_SECONDS
  if redis.call('EXISTS', open_key(session)) == 1 then seconds = math.max(seconds, OPEN_SESSION_SECONDS) end
  for _, key in ipairs({session_key(session), turns_key(session), open_key(session)}) do
    redis.call('EXPIRE', key, seconds)
  end
end

-- Bytes of all turns.
local function bytes_of(turns)
  local bytes = 0
  for _, turn in ipairs(redis.call('LRANGE', turns, 0, -1)) do bytes = bytes + #turn end
  return bytes
end

-- Returns the refusal if a session may not have a system message and turns of these sizes, else nil.
local function refuse_size(limits, system_bytes, max_message_bytes, turns_bytes, max_session_bytes)
  local set = redis.call('HMGET', limits, 'message_bytes', 'session_bytes')
  for _, one in ipairs({
    {'message_bytes', system_bytes, whole(set[1]) or max_message_bytes},
    {'session_bytes', turns_bytes, whole(set[2]) or max_session_bytes},
  }) do
    if tonumber(one[2]) > tonumber(one[3]) then return {one[1], one[2], tostring(one[3])} end
  end
  return nil
end

-- Puts a deferred job into its queue: its time in the queue counts from its submission. Changes nothing if
-- it fails.
local function queue_deferred(job)
  local origin = redis.call('HGET', 'rq:job:' .. job, 'origin')
  if not origin then return end
  queue_job('RPUSH', 'rq:queue:' .. origin, job, nil, 'rq:deferred:' .. origin)
end

-- Lets the next job run, if the one before it has ended. Returns the job that runs; nil if there is none.
local function next_turn(session)
  local job, status = first_open(session)
  if status == 'deferred' then queue_deferred(job) end
  return job
end

-- Returns the refusal if a job may not belong to a session, else nil.
local function refuse_session(session, model)
  if redis.call('EXISTS', session_key(session)) == 0 then return {'session'} end
  local its_model = redis.call('HGET', session_key(session), 'model') or ''
  if its_model == '' then return {'session_field', 'model'} end
  if its_model ~= model then return {'session_model', its_model} end
  return refuse_fields(session)
end

-- Makes a new job the next one of its session. Returns a refusal, or nil and whether it waits.
local function join_session(session, job, model, may_wait, limit)
  local refusal = refuse_session(session, model)
  if refusal then return refusal end
  local bytes = redis.call('HGET', session_key(session), 'bytes') or '0'
  if not whole(bytes) then  -- another program has written it
    bytes = tostring(bytes_of(turns_key(session)))
    redis.call('HSET', session_key(session), 'bytes', bytes)
  end
  if tonumber(bytes) >= tonumber(limit) then return {'session_bytes', bytes, limit} end
  local running = next_turn(session)
  if running and not may_wait then return {'busy', running} end
  local open = redis.call('LLEN', open_key(session))
  if open >= MAX_OPEN then return {'session_open', tostring(open), tostring(MAX_OPEN)} end
  redis.call('RPUSH', open_key(session), job)
  keep_session(session)
  return nil, running ~= nil
end

-- Raises the error of Redis if a turn can't be appended, since a key of its session has another type.
-- turn is '' for a job that appends none. Scripts call it before they write.
local function check_turn(session, turn)
  if session == '' or turn == '' or redis.call('EXISTS', session_key(session)) == 0 then return end
  check_type(session_key(session), 'hash')
  check_type(turns_key(session), 'list')
  check_type(open_key(session), 'list')
end

local function append_turn(session, turn, replaces)
  local key, turns = session_key(session), turns_key(session)
  local before = replaces == '1' and redis.call('RPOP', turns) or ''
  redis.call('RPUSH', turns, turn)
  local bytes = whole(redis.call('HGET', key, 'bytes'))
  bytes = bytes and bytes + #turn - #before or bytes_of(turns)
  redis.call('HSET', key, 'bytes', string.format('%d', math.max(0, bytes)))
end

-- A job of a session has ended: appends its turn, '' for none, and lets the next one run. With a turn,
-- the script has called check_turn. Without, a key of another type is left alone: the workers' upkeep names
-- it, and goes on when it is gone.
-- replaces: '1' if the turn takes the place of the last one.
local function end_turn(session, job, turn, replaces)
  if session == '' then return end
  if turn ~= '' and redis.call('EXISTS', session_key(session)) == 1
    and redis.call('LINDEX', open_key(session), 0) == job then
    append_turn(session, turn, replaces)
  end
  redis.call('LREM', open_key(session), 1, job)
  next_turn(session)
  keep_session(session)
end

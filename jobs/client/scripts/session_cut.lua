#!lua
-- Changes the turns of a session that runs no job, or deletes it. The caller loads this script behind
-- the functions of rq_lines.lua and rq_turns.lua.
--
-- KEYS  session: hash of the session
--       turns: list of its turns
--       open: list of its jobs that have not ended
-- ARGV  name: id of the session
--       change: 'keep' or 'delete'
--       found: number of turns when the caller read them; -1 for any
--       kept: number of turns to keep, from the first one
--       set_system: '1' to set the system text
--       system: the new system text
--       new_turns…: turns to append
-- Returns {'done'}, {'again'} if there are more or fewer turns than found, or a refusal: {'session'} if
--       there is no such session, {'busy', job id} if one of its jobs has not ended.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply. The
-- second run finds the turns that are kept.
--
-- Atomic: the server runs the whole script before any other command.
local session, turns, open = unpack(KEYS)
local name, change, found, kept, set_system, system = unpack(ARGV)
local new_turns = {unpack(ARGV, 7)}

if redis.call('EXISTS', session) == 0 then return {'session'} end
local running = first_open(name)
if running then return {'busy', running} end
if change == 'delete' then
  redis.call('DEL', session, turns, open)
  return {'done'}
end
local number = redis.call('LLEN', turns)
if tonumber(found) >= 0 and number ~= tonumber(found) then
  return {number == tonumber(kept) and 'done' or 'again'}
end
if tonumber(kept) == 0 then
  redis.call('DEL', turns)
else
  redis.call('LTRIM', turns, 0, kept - 1)
end
for _, turn in ipairs(new_turns) do redis.call('RPUSH', turns, turn) end
local bytes = 0
for _, turn in ipairs(redis.call('LRANGE', turns, 0, -1)) do bytes = bytes + #turn end
redis.call('HSET', session, 'bytes', bytes)
if set_system == '1' then redis.call('HSET', session, 'system', system) end
keep_session(name)
return {'done'}

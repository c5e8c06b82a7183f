#!lua
-- Sets the turns of a session that runs no job, and its system text. The caller loads this script behind
-- the functions of queue.lua and turns.lua.
--
-- KEYS  session: hash of the session
--       turns: list of its turns
--       open: list of its jobs that have not ended
--       limits: hash of the limits that an operator has set
-- ARGV  name: id of the session
--       set_system: '1' to set the system text
--       system: the new system text
--       system_bytes: bytes of the system message as JSON
--       turns_bytes: bytes of the new turns
--       max_message_bytes, max_session_bytes: limits that no operator has set
--       new_turns: the turns, as a JSON list of texts
--       token: of this change alone
-- Returns {'done'} or a refusal: {'session'} if there is no such session, {'busy', job id} if one of its
--       jobs has not ended, {'session_field', field} if another program has written a field, or the
--       limit that it exceeds: {name, value, limit}.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply. The
-- second run finds the token, and leaves the turns that may have been appended since.
--
-- Atomic: the server runs the whole script before any other command. A full Redis refuses it.
local session, turns, open, limits = unpack(KEYS)
local name, set_system, system, system_bytes, turns_bytes, max_message_bytes,
  max_session_bytes, new_turns, token = unpack(ARGV)

if redis.call('EXISTS', session) == 0 then return {'session'} end
if redis.call('HGET', session, 'changed') == token then return {'done'} end
local running = first_open(name)
if running then return {'busy', running} end
local refusal = refuse_fields(name)
  or refuse_size(limits, system_bytes, max_message_bytes, turns_bytes, max_session_bytes)
if refusal then return refusal end
redis.call('DEL', turns)
for _, turn in ipairs(cjson.decode(new_turns)) do redis.call('RPUSH', turns, turn) end
redis.call('HSET', session, 'bytes', turns_bytes, 'changed', token)
if set_system == '1' then redis.call('HSET', session, 'system', system) end
keep_session(name)
return {'done'}

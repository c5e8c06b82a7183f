#!lua
-- Creates a session, or opens the one that exists. The caller loads this script behind the functions of
-- queue.lua and turns.lua.
--
-- KEYS  session: hash of the session
--       turns: list of its turns
--       limits: hash of the limits that an operator has set
-- ARGV  name: id of the session
--       model: its model; '' to create none
--       system: its system text; '' for none
--       options: fields of its requests, as JSON
--       ttl: seconds after its last change at which it expires
--       creation: token of a call that must create it; '' to open it if it exists
--       system_bytes: bytes of the system message as JSON
--       turns_bytes: bytes of the turns that it begins with
--       max_message_bytes, max_session_bytes: limits that no operator has set
--       new_turns: the turns that it begins with, as a JSON list of texts
-- Returns {'open', model, system, options, ttl} as they are now; or a refusal: {'session'} if it does not
--       exist and model is '', {'taken'} if another call has created it, or the limit that it
--       exceeds: {name, value, limit}.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply. The
-- second run finds its own token.
--
-- Atomic: the server runs the whole script before any other command. A full Redis refuses it.
local session, turns, limits = unpack(KEYS)
local name, model, system, options, ttl, creation, system_bytes, turns_bytes, max_message_bytes,
  max_session_bytes, new_turns = unpack(ARGV)

if redis.call('EXISTS', session) == 0 then
  if model == '' then return {'session'} end
  local refusal = refuse_size(limits, system_bytes, max_message_bytes, turns_bytes,
    max_session_bytes)
  if refusal then return refusal end
  redis.call('DEL', turns)
  for _, turn in ipairs(cjson.decode(new_turns)) do redis.call('RPUSH', turns, turn) end
  redis.call('HSET', session, 'model', model, 'system', system, 'options', options, 'ttl', ttl,
    'bytes', turns_bytes, 'creation', creation)
  keep_session(name)
elseif creation ~= '' and redis.call('HGET', session, 'creation') ~= creation then
  return {'taken'}
end
return {'open', unpack(redis.call('HMGET', session, 'model', 'system', 'options', 'ttl'))}

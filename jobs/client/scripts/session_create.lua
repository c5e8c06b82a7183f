#!lua
-- Creates a session, or opens the one that exists. The caller loads this script behind the functions of
-- rq_lines.lua and rq_turns.lua.
--
-- KEYS  session: hash of the session
--       turns: list of its turns
-- ARGV  name: id of the session
--       model: its model; '' to create none
--       system: its system text; '' for none
--       options: fields of its requests, as JSON
--       ttl: seconds after its last change at which it expires
--       creation: token of a call that must create it; '' to open it if it exists
--       new_turns…: the turns that it begins with
-- Returns {model, system, options, ttl} as they are now; {} if it does not exist and model is '';
--       {'taken'} if it exists and another call has created it.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply. The
-- second run finds its own token.
--
-- Atomic: the server runs the whole script before any other command. A full Redis refuses it.
local session, turns = unpack(KEYS)
local name, model, system, options, ttl, creation = unpack(ARGV)
local new_turns = {unpack(ARGV, 7)}

if redis.call('EXISTS', session) == 0 then
  if model == '' then return {} end
  local bytes = 0
  redis.call('DEL', turns)
  for _, turn in ipairs(new_turns) do
    bytes = bytes + #turn
    redis.call('RPUSH', turns, turn)
  end
  redis.call('HSET', session, 'model', model, 'system', system, 'options', options, 'ttl', ttl,
    'bytes', bytes, 'creation', creation)
  keep_session(name)
elseif creation ~= '' and redis.call('HGET', session, 'creation') ~= creation then
  return {'taken'}
end
return redis.call('HMGET', session, 'model', 'system', 'options', 'ttl')

#!lua flags=allow-oom
-- Removes the last turns of a session that runs no job, or deletes it. The caller loads this script
-- behind the functions of queue.lua and turns.lua.
--
-- KEYS  session: hash of the session
--       turns: list of its turns
--       open: list of its jobs that have not ended
-- ARGV  name: id of the session
--       change: 'keep' or 'delete'
--       found: number of turns when the caller read them; -1 for any
--       kept: number of turns to keep, from the first one
--       token: of this change alone
-- Returns {'done'}, {'again'} if there are more or fewer turns than found, or a refusal: {'session'} if
--       there is no such session, {'busy', job id} if one of its jobs has not ended, {'session_field',
--       field} if another program has written a field.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply. The
-- second run finds the token. Two callers that remove the same turn have two tokens.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: it makes
-- room. Keys of another type, which another program has written, are deleted as well.
local session, turns, open = unpack(KEYS)
local name, change, found, kept, token = unpack(ARGV)

if redis.call('EXISTS', session) == 0 then return {'session'} end
if change == 'delete' then
  local running = redis.call('TYPE', open).ok == 'list' and first_open(name)
  if running then return {'busy', running} end
  redis.call('DEL', session, turns, open)
  return {'done'}
end
local running = first_open(name)
if running then return {'busy', running} end
if redis.call('HGET', session, 'changed') == token then return {'done'} end
local refusal = refuse_fields(name)
if refusal then return refusal end
if tonumber(found) >= 0 and redis.call('LLEN', turns) ~= tonumber(found) then return {'again'} end
if tonumber(kept) == 0 then
  redis.call('DEL', turns)
else
  redis.call('LTRIM', turns, 0, kept - 1)
end
redis.call('HSET', session, 'bytes', bytes_of(turns), 'changed', token)
keep_session(name)
return {'done'}

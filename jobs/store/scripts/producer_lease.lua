#!lua flags=allow-oom
-- Takes, renews or gives up the lease on a run, which allows one process at a time to enqueue its rows.
--
-- KEYS  producer: the lease on the run
-- ARGV  token: of the process that asks
--       expected: the value that the lease must have, '' for none: of a holder that is dead and loses it, or the token
--       itself, so that a process whose lease has expired does not go on as if nobody had had it meanwhile
--       milliseconds: how long the lease holds from now on; 0 gives it up
-- Returns the token of the holder, after the change; '' for none.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: else a
-- producer would lose its run while it waits for room.
local producer = unpack(KEYS)
local token, expected, milliseconds = unpack(ARGV)

local holder = redis.call('GET', producer) or ''
if holder ~= token and holder ~= expected then return holder end
if milliseconds == '0' then
  if holder == token then redis.call('DEL', producer) end
  return ''
end
redis.call('SET', producer, token, 'PX', milliseconds)
return token

#!lua flags=allow-oom
-- Takes or renews the lease on a run, which allows one process at a time to enqueue its rows.
--
-- KEYS  producer: the lease on the run
-- ARGV  token: of the process that asks
--       replaced: token of a holder that is dead, and loses the lease; '' for none
--       milliseconds: how long the lease holds from now on; 0 gives it up
-- Returns the token of the holder, after the change; '' for none.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: else a
-- producer would lose its run while it waits for room.
local producer = unpack(KEYS)
local token, replaced, milliseconds = unpack(ARGV)

local holder = redis.call('GET', producer)
if holder and holder ~= token and holder ~= replaced then return holder end
if milliseconds == '0' then
  redis.call('DEL', producer)
  return ''
end
redis.call('SET', producer, token, 'PX', milliseconds)
return token

-- Append an entry to a job's token stream and publish it.
--
-- KEYS: log, live
-- ARGV: entry id, payload (JSON), seconds until the log expires, approximate length of the log
-- Returns 1 if the entry is in the log, 0 if the log refused it.
--
-- Atomic: XADD is the first write, and nothing else is written or published unless it succeeds.
-- Idempotent: the client library resends a script when the connection breaks before the reply, so
-- an entry that is already there with the same payload counts as written.
local log, live = unpack(KEYS)
local id, payload, seconds, length = unpack(ARGV)

local added = redis.pcall('XADD', log, 'MAXLEN', '~', length, id, 'd', payload)
if type(added) == 'table' and added.err then
  if not string.find(added.err, 'equal or smaller', 1, true) then return added end
  local present = redis.call('XRANGE', log, id, id)
  return (present[1] and present[1][2][2] == payload) and 1 or 0
end
redis.call('EXPIRE', log, seconds)
redis.call('PUBLISH', live, '{"id":"' .. id .. '","d":' .. payload .. '}')
return 1

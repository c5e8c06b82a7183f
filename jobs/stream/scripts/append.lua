#!lua flags=allow-oom
-- Appends an entry to the token stream of a job and publishes it.
--
-- KEYS  log: replay log of the token stream
--       live: pub/sub channel of the token stream
-- ARGV  entry_id: id of the entry
--       payload: its field `d`, JSON
--       expire_seconds: seconds until the log expires
--       max_entries, max_bytes: approximate maximum length of the log; a log of entries as large as
--       this one holds max_bytes
-- Returns 1 if the entry is in the log, 0 if the log refused it.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply, so
-- an entry that is already there with the same payload counts as written.
--
-- Atomic: the server runs the whole script before any other command. XADD is the first write, and
-- nothing else is written or published unless it succeeds.
local log, live = unpack(KEYS)
local entry_id, payload, expire_seconds, max_entries, max_bytes = unpack(ARGV)

local length = math.max(1, math.min(max_entries, math.floor(max_bytes / #payload)))

local added = redis.pcall('XADD', log, 'MAXLEN', '~', length, entry_id, 'd', payload)
if type(added) == 'table' and added.err then
  if not string.find(added.err, 'equal or smaller', 1, true) then return added end
  local present = redis.call('XRANGE', log, entry_id, entry_id)
  return (present[1] and present[1][2][2] == payload) and 1 or 0
end
redis.call('EXPIRE', log, expire_seconds)
redis.call('PUBLISH', live, '{"id":"' .. entry_id .. '","d":' .. payload .. '}')
return 1

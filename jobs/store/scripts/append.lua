#!lua flags=allow-oom
-- Appends entries to the token streams of jobs and publishes them.
--
-- KEYS  logs and channels in turn, of each entry: replay log and pub/sub channel of the token stream
-- ARGV  expire_seconds: seconds until a log expires
--       max_entries, max_bytes: approximate maximum length of a log; a log of entries as large as
--       the one that is added holds max_bytes
--       entries…: of each entry in turn: its id, its field `d` (JSON)
-- Returns for each entry 1 if it is in the log, 0 if the log refused it, or the error.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply, so
-- an entry that is already there with the same payload counts as written.
--
-- Atomic: the server runs the whole script before any other command. XADD is the first write of an
-- entry, and nothing else is written or published for it unless that succeeds.
local expire_seconds, max_entries, max_bytes = unpack(ARGV)
local entries = {unpack(ARGV, 4)}

local function append(log, live, entry_id, payload)
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
end

local replies = {}
for i = 1, #KEYS, 2 do
  replies[#replies + 1] = append(KEYS[i], KEYS[i + 1], entries[i], entries[i + 1])
end
return replies

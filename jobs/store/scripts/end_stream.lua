-- Prelude for scripts that end a job. Needs the constants in front of queue.lua.
--
-- end_stream(log, live, id, payload, has_log) appends the end entry to the job's token stream and
-- publishes it. Does nothing if the log refuses the entry, that is, after a later attempt has begun. A
-- job that publishes no tokens has no log: its end is published only.
-- Returns nothing. Atomic as part of the script that calls it.
local function end_stream(log, live, id, payload, has_log)
  if not has_log then
    redis.call('PUBLISH', live, '{"id":"' .. id .. '","d":' .. payload .. '}')
    return
  end
  local added = redis.pcall('XADD', log, id, 'd', payload)
  if type(added) == 'table' and added.err then return end
  if redis.call('XLEN', log) <= 100 then  -- XADD reserves 4 KiB, a copy is as large as its entries
    redis.pcall('COPY', log, log .. ':copy', 'REPLACE')
    redis.pcall('RENAME', log .. ':copy', log)
  end
  redis.call('EXPIRE', log, ENDED_LOG_SECONDS)
  redis.call('PUBLISH', live, '{"id":"' .. id .. '","d":' .. payload .. '}')
end

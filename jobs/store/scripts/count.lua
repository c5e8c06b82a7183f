#!lua flags=allow-oom
-- Counts the rows that wait for Parquet: a portion of the outboxes at each call, whichever worker calls.
--
-- KEYS  outboxes: set of the runs that have rows in their outbox
--       backlog: hash with the rows and bytes of the last complete count, and of the present one so
--       far; expires
-- ARGV  outbox_prefix: key of an outbox without the name of its run
--       portion: number of outboxes to look at
--       pause_milliseconds: time between two counts
--       expire_milliseconds: time after which an abandoned count is forgotten
-- Returns {rows, bytes} of the last complete count; of the present one until there is one.
--
-- A run may be counted twice while others come and go. Redis estimates the bytes of an outbox from a
-- few of its entries.
--
-- Atomic: the server runs the whole script before any other command, so two workers never count the
-- same portion. A full Redis runs it: the hash is small and expires.
local outboxes, backlog = unpack(KEYS)
local outbox_prefix, portion, pause_milliseconds, expire_milliseconds = unpack(ARGV)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('TYPE', backlog).ok ~= 'hash' then redis.call('DEL', backlog) end
local state = redis.call('HMGET', backlog, 'rows', 'bytes', 'due', 'cursor', 'rows_so_far',
  'bytes_so_far')
-- Another program has written a value that is no number, or not near: then all is counted anew.
local function digits(text) return text and #text < 16 and string.match(text, '^%d+$') end
local function number(text) return tonumber(digits(text) or '') end
local rows, bytes, due = number(state[1]), number(state[2]), number(state[3]) or 0
if rows and bytes and now < due and due <= now + pause_milliseconds then return {rows, bytes} end

local cursor, rows_so_far = digits(state[4]) or '0', number(state[5]) or 0
local bytes_so_far = number(state[6]) or 0
local next_cursor, runs = unpack(redis.call('SSCAN', outboxes, cursor, 'COUNT', portion))
for _, run in ipairs(runs) do
  local outbox = outbox_prefix .. run
  local length = redis.pcall('XLEN', outbox)
  if type(length) == 'number' then  -- else it is no outbox
    rows_so_far = rows_so_far + length
    bytes_so_far = bytes_so_far + (redis.call('MEMORY', 'USAGE', outbox) or 0)
  end
end
if next_cursor == '0' then
  rows, bytes = rows_so_far, bytes_so_far
  redis.call('HSET', backlog, 'rows', rows, 'bytes', bytes, 'due', now + pause_milliseconds)
  redis.call('HDEL', backlog, 'cursor', 'rows_so_far', 'bytes_so_far')
else
  redis.call('HSET', backlog, 'cursor', next_cursor, 'rows_so_far', rows_so_far, 'bytes_so_far',
    bytes_so_far)
end
redis.call('PEXPIRE', backlog, expire_milliseconds)
return {rows or rows_so_far, bytes or bytes_so_far}

#!lua
-- Gives a request of a run its row, by its custom_id: the row that it has, or else the proposed one, or, if
-- another request has that, the first one behind all rows that were given. The caller loads this script
-- behind the functions of rq_tenants.lua and rq_rows.lua.
--
-- KEYS  ids: hash of the rows of some custom_ids
--       next_row: number behind all rows that were given by custom_id
-- ARGV  custom_id: digest of the custom_id
--       run: name of the run
--       row: proposed row
--       digest: digest of the request with the proposed row
--       seconds: seconds until all this is forgotten
-- Returns the row.
--
-- A run whose rows were all submitted by number, as older versions do, has no next_row. There a proposed
-- row is returned although another request has it, and refused when it is enqueued: a new number would
-- repeat the work of the request that has this custom_id.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply.
--
-- Atomic: the server runs the whole script before any other command, so a row is given once. A full
-- Redis refuses it.
local ids, next_row = unpack(KEYS)
local custom_id, run, row, digest, seconds = unpack(ARGV)

local ROWS_PER_KEY = 100  -- as in jobs/keys.py
local GIVEN = ''  -- in place of a reservation, until the request is enqueued

local function number(value)
  return value and #value < 16 and string.find(value, '^%d+$') and tonumber(value) or nil
end

local function rows_of(index) return 'chatjobs:rows:' .. run .. ':' .. math.floor(index / ROWS_PER_KEY) end

local function keep(key) redis.call('EXPIRE', key, seconds) end

local known = number(redis.call('HGET', ids, custom_id))
if known then
  keep(ids)
  return known
end
local behind = number(redis.call('GET', next_row))
local index = tonumber(row)
local holder = redis.call('HGET', rows_of(index), index % ROWS_PER_KEY)
if holder and (holder == GIVEN or read_reservation(holder) ~= digest) then
  if not behind then return index end
  index = behind
  while redis.call('HEXISTS', rows_of(index), index % ROWS_PER_KEY) == 1 do
    local is_full = redis.call('HLEN', rows_of(index)) == ROWS_PER_KEY
    index = is_full and (math.floor(index / ROWS_PER_KEY) + 1) * ROWS_PER_KEY or index + 1
  end
  holder = false
end
if not holder then
  redis.call('HSET', rows_of(index), index % ROWS_PER_KEY, GIVEN)
  keep(rows_of(index))
end
redis.call('HSET', ids, custom_id, string.format('%d', index))
keep(ids)
redis.call('SET', next_row, string.format('%d', math.max(behind or 0, index + 1)), 'EX', seconds)
return index

-- Prelude for scripts that reserve the rows of a run, or end their jobs.
--
-- rows is a hash with the reservations of some rows (`rows` in jobs/keys.py), and field is the last part
-- of a row's number. A reservation is the digest of the request that has the row, DIGEST bytes. OPEN
-- follows it until the row is written: only such a reservation may lose its job to another program.
-- Older versions write no OPEN: their rows count as written.
--
-- Atomic as part of the script that calls these functions.
local DIGEST = 8
local OPEN = '-'

local function reserve_row(rows, field, digest, seconds)
  redis.call('HSET', rows, field, digest .. OPEN)
  redis.call('EXPIRE', rows, seconds)
end

-- The digest of a reservation, and whether the row is still to be written.
local function read_reservation(value)
  return string.sub(value, 1, DIGEST), #value > DIGEST
end

-- A job has ended, and its row is in the outbox. Does nothing for a row that is not reserved.
local function row_written(rows, field, seconds)
  local value = redis.call('HGET', rows, field)
  if value and #value > DIGEST then
    redis.call('HSET', rows, field, (read_reservation(value)))
  end
  redis.call('EXPIRE', rows, seconds)
end

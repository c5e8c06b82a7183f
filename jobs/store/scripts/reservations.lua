-- Prelude for scripts that reserve what a job holds until it ends, its row and its bytes, and for those
-- that end jobs. Needs the functions of queue.lua.
--
-- rows is a hash with the reservations of some rows (`rows` in jobs/keys.py), and field is the last part
-- of a row's number. A reservation is the digest of the request that has the row, DIGEST bytes. OPEN
-- follows it until the row is written: only such a reservation may lose its job to another program.
-- Older versions write no OPEN: their rows count as written. They write '' for a row that a custom_id has
-- got and whose request was not enqueued: it is free.
--
-- `chatjobs submit` also identifies rows by custom_id: ids is a hash with the numbers of the rows of some
-- custom_ids, by their digests, and next_row the number behind all rows that were given so.
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

-- Why a request can't have a row: {'row', reservation} if another request has it, {'ended'} if the row of
-- this request is written. nil if it can. abandoned: reservation of another request that loses the row
-- if abandoned_job, the hash of its job, is gone.
local function refuse_row(rows, field, digest, abandoned, abandoned_job)
  local reserved = redis.call('HGET', rows, field)
  if not reserved or reserved == '' then return nil end
  local holder, is_open = read_reservation(reserved)
  if holder == digest then return not is_open and {'ended'} or nil end
  if reserved == abandoned and redis.call('EXISTS', abandoned_job) == 0 then return nil end
  return {'row', reserved}
end

local function as_row(value)
  return value and #value < 16 and string.find(value, '^%d+$') and tonumber(value) or nil
end

-- Returns {'row_moved'} if a custom_id, '' for none, has another row than this one, else nil.
local function refuse_custom_id(ids, next_row, custom_id, number)
  if custom_id == '' then return nil end
  check_type(next_row, 'string')
  local known = as_row(redis.call('HGET', ids, custom_id))
  return known and known ~= tonumber(number) and {'row_moved'} or nil
end

-- A custom_id has this row. Does nothing for '', a row that none identifies.
local function keep_custom_id(ids, next_row, custom_id, number, seconds)
  if custom_id == '' then return end
  local behind = math.max(as_row(redis.call('GET', next_row)) or 0, number + 1)
  redis.call('HSET', ids, custom_id, number)
  redis.call('EXPIRE', ids, seconds)
  redis.call('SET', next_row, string.format('%d', behind), 'EX', seconds)
end

-- The row of a job is in the outbox. Does nothing for a row that is not reserved.
local function row_written(rows, field, seconds)
  local value = redis.pcall('HGET', rows, field)
  if type(value) == 'string' and #value > DIGEST then
    redis.call('HSET', rows, field, (read_reservation(value)))
  end
  redis.call('EXPIRE', rows, seconds)
end

-- Appends the row of a job that ends. The first write of a script that ends one: if it fails, nothing of
-- the job has changed. outboxes is the set of the runs that have rows in their outbox; an outbox of
-- another type is noted there as well, so that chatjobs status and the workers' logs name it.
local function append_row(outbox, outboxes, run, row)
  check_type(outboxes, 'set')
  redis.call('SADD', outboxes, run)
  check_type(outbox, 'stream')
  redis.call('XADD', outbox, '*', 'row', row)
end

-- A job that has not ended holds so many bytes of its queue. open_bytes is the hash with the bytes of
-- these jobs, by queue; one that another program has written is left alone.
local function hold_bytes(job, open_bytes, queue, bytes)
  redis.call('HSET', job, 'chatjobs_bytes', bytes)
  redis.pcall('HINCRBY', open_bytes, queue, bytes)
end

-- A job that ends, leaves its queue for another one, or is deleted, holds no bytes of its queue any more.
-- Returns the bytes that it has held; nil if it held none.
local function free_bytes(job, open_bytes, queue)
  local bytes = tonumber(redis.call('HGET', job, 'chatjobs_bytes') or '')
  if not bytes then return nil end
  local left = redis.pcall('HINCRBY', open_bytes, queue, -bytes)
  if type(left) == 'number' and left <= 0 then redis.call('HDEL', open_bytes, queue) end
  redis.call('HDEL', job, 'chatjobs_bytes')
  return bytes
end

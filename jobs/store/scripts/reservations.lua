-- Prelude for scripts that reserve what a job holds until it ends, its row and its bytes, and for those
-- that end jobs. Needs the functions of queue.lua.
--
-- hashes is a list of hashes with the reservations of some rows (`rows` in jobs/keys.py). fields names the
-- rows of a job: "1:7,2:0.3" are the rows 7 of the first hash and 0.3 of the second one, each by the last
-- part of its number. A reservation is the digest of the request, or of the item of a scoring request, that
-- has the row, DIGEST bytes. OPEN follows it until the row is written, and then the id of the job if the
-- digest does not tell it: that of an item, which may be in other jobs too, or a request that chose its id.
-- Only such a reservation may lose its job to another program. Older versions write no OPEN: their rows
-- count as written. They write '' for a row that a custom_id has got and whose request was not enqueued: it
-- is free.
--
-- `chatjobs submit` also identifies rows by custom_id: ids is a hash with the numbers of the rows of some
-- custom_ids, by their digests, and next_row the number behind all rows that were given so.
--
-- Atomic as part of the script that calls these functions.
local DIGEST = 8
local OPEN = '-'

-- The hash and the field of each row.
local function rows_in(hashes, fields)
  local found = {}
  for hash, field in string.gmatch(fields, '(%d+):([%d.]+)') do
    found[#found + 1] = {hashes[tonumber(hash)], field}
  end
  return found
end

-- digests: those of the rows, one behind the other. named_job: id of the job if its items have the rows, or
-- if its request chose it; else ''. The script calls keep_rows then.
local function reserve_rows(hashes, fields, digests, named_job)
  for number, row in ipairs(rows_in(hashes, fields)) do
    local digest = string.sub(digests, DIGEST * (number - 1) + 1, DIGEST * number)
    redis.call('HSET', row[1], row[2], digest .. OPEN .. named_job)
  end
end

-- Reservations expire some time after the last change of one in the same hash.
local function keep_rows(hashes, seconds)
  for _, hash in ipairs(hashes) do redis.pcall('EXPIRE', hash, seconds) end
end

local function free_rows(hashes, fields)
  for _, row in ipairs(rows_in(hashes, fields)) do redis.pcall('HDEL', row[1], row[2]) end
end

-- The digest of a reservation, whether the row is still to be written, and the job, '' if it has none.
local function read_reservation(value)
  return string.sub(value, 1, DIGEST), #value > DIGEST, string.sub(value, DIGEST + 2)
end

-- Why a job that does not exist can't have its rows: {'row', reservation, number} if another one has the
-- row of this number in fields, {'ended'} if all rows are written for the same digests. nil if it can.
-- abandoned: reservation of another request that loses the row if abandoned_job, the hash of its job, is
-- gone.
local function refuse_rows(hashes, fields, digests, job_id, abandoned, abandoned_job)
  local rows, written = rows_in(hashes, fields), {}
  for number, row in ipairs(rows) do
    local reserved = redis.call('HGET', row[1], row[2])
    if reserved and reserved ~= '' then
      local digest, is_open, named_job = read_reservation(reserved)
      local is_same = digest == string.sub(digests, DIGEST * (number - 1) + 1, DIGEST * number)
      local is_free
      if is_open and named_job ~= '' then
        is_free = named_job == job_id or redis.call('EXISTS', 'rq:job:' .. named_job) == 0
      elseif is_same then
        is_free = true
        if not is_open then written[#written + 1] = {'row', reserved, tostring(number)} end
      else
        is_free = reserved == abandoned and redis.call('EXISTS', abandoned_job) == 0
      end
      if not is_free then return {'row', reserved, tostring(number)} end
    end
  end
  if #written == 0 then return nil end
  return #written == #rows and {'ended'} or written[1]
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

-- The rows of a job are in the outbox. Does nothing for a row that is not reserved.
local function rows_written(hashes, fields, seconds)
  for _, row in ipairs(rows_in(hashes, fields)) do
    local value = redis.pcall('HGET', row[1], row[2])
    if type(value) == 'string' and #value > DIGEST then
      redis.pcall('HSET', row[1], row[2], (read_reservation(value)))
    end
  end
  keep_rows(hashes, seconds)
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

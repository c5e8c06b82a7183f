#!lua
-- Puts a new job into its queue, or lets it wait for its time, unless it is there already or a limit
-- refuses it. A job of a session waits as RQ's deferred jobs do until the one before it has ended. The
-- caller loads this script behind the functions of queue.lua, turns.lua and reservations.lua.
--
-- KEYS  job: hash of the job
--       queue: list of the ids that wait
--       wip: sorted set of the started jobs of the queue
--       quarantine: list of the suspects that wait
--       scheduled: RQ's registry of jobs that wait for their time, scores in seconds
--       deferred: RQ's registry of jobs that wait for other jobs
--       other_queue, other_wip, other_quarantine, other_scheduled, other_deferred: the same of the
--       model's queue with the other priority
--       queues: set of all queues
--       log: replay log of an earlier job of this id; deleted
--       results: stream of the results of an earlier job of this id; deleted
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       limits: hash of the limits that an operator has set
--       deadlines: sorted set of the jobs with a time to live, scores in milliseconds
--       abandoned_job: hash of the job of the reservation `abandoned`
--       ids: hash of the rows of some custom_ids; job if no custom_id identifies this row
--       next_row: number behind all rows that were given by custom_id; job if none identifies this row
--       producer: the lease on the run; job if the caller needs none
--       hashes…: hashes of the reserved rows near those of the job
-- ARGV  job_id: id of the job
--       model: name of the model, for limits of its own
--       data: field of the hash; it tells this job from another one of this id
--       request_bytes: bytes of the data, decompressed
--       message_bytes: bytes of the largest message
--       fields, digests, item_job: the rows of the job, as reserve_rows takes them; '' without a row
--       custom_id, row_number: digest of the custom_id that identifies the row, and its number; '' if
--       none does
--       row_seconds: seconds until the reservations expire
--       abandoned: reservation of the row by another request, to be replaced if that request's job is
--       gone without a row; '' for none
--       at, delay: time to queue the job, as milliseconds since the epoch or from now; '' for now
--       ttl: milliseconds to live from the time when it is queued; '' for no limit
--       max_jobs, max_bytes, max_request_bytes, max_message_bytes, max_session_bytes: limits that no
--       operator has set
--       holder: token of the process that holds the lease on the run; '' if the caller needs none
--       session, session_waits: its session, '' for none, and '1' if it may wait for other jobs of it
--       hash_fields…: field, value, … of the rest of the hash
-- Returns {'enqueued'}; {'same'} if the job is there already; {'ended'} if its rows are reserved by the
--       same request, and the job has ended and left Redis; {'id'} if another job has the id; {'row',
--       reservation, number} if another request has a row; {'row_moved'} if the custom_id has another row;
--       {'producer'} if another process holds the lease on the run; a refusal of join_session; or a limit
--       that the job exceeds: {name, value, limit}. No job or reservation has changed unless it returns
--       'enqueued', also after the error of a command.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply.
--
-- Atomic: the server runs the whole script before any other command, so no worker sees an id in the
-- queue without its hash, and no limit is exceeded by two producers at once. A full Redis refuses
-- the whole script: it has no flag allow-oom.
local job, queue, wip, quarantine, scheduled, deferred, other_queue, other_wip, other_quarantine,
  other_scheduled, other_deferred, queues, log, results, open_bytes, limits, deadlines,
  abandoned_job, ids, next_row, producer = unpack(KEYS)
local job_id, model, data, request_bytes, message_bytes, fields, digests, item_job, custom_id,
  row_number, row_seconds, abandoned, at, delay, ttl, max_jobs, max_bytes, max_request_bytes, max_message_bytes,
  max_session_bytes, holder, session, session_waits = unpack(ARGV)
local hashes = {unpack(KEYS, 22)}
local hash_fields = {unpack(ARGV, 24)}

if holder ~= '' and redis.call('GET', producer) ~= holder then return {'producer'} end

local refused = refuse_custom_id(ids, next_row, custom_id, row_number)
if refused then return refused end
if redis.call('EXISTS', job) == 1 then
  if redis.call('HGET', job, 'data') ~= data then return {'id'} end
  keep_custom_id(ids, next_row, custom_id, row_number, row_seconds)
  return {'same'}
end
refused = refuse_rows(hashes, fields, digests, job_id, abandoned, abandoned_job)
if refused then
  if refused[1] == 'ended' then keep_custom_id(ids, next_row, custom_id, row_number, row_seconds) end
  return refused
end

local set = redis.call('HMGET', limits, 'jobs:' .. model, 'jobs', 'bytes:' .. model, 'bytes',
  'request_bytes', 'message_bytes')
local function exceeds(value, limit) return tonumber(value) > tonumber(limit) end
max_request_bytes = whole(set[5]) or max_request_bytes
if exceeds(request_bytes, max_request_bytes) then
  return {'request_bytes', request_bytes, tostring(max_request_bytes)}
end
max_message_bytes = whole(set[6]) or max_message_bytes
if exceeds(message_bytes, max_message_bytes) then
  return {'message_bytes', message_bytes, tostring(max_message_bytes)}
end

-- Counts the jobs of a queue. A queue without jobs has no bytes, whatever RQ's tools have removed.
local function count(queue_key, wip_key, quarantine_key, scheduled_key, deferred_key)
  local number = redis.call('LLEN', queue_key) + redis.call('ZCARD', wip_key)
    + redis.call('LLEN', quarantine_key) + redis.call('ZCARD', scheduled_key)
    + redis.call('ZCARD', deferred_key)
    + (whole(redis.call('HGET', 'chatjobs:tenant-jobs', name_of(queue_key))) or 0)
  if number == 0 then redis.call('HDEL', open_bytes, queue_key) end
  return number
end
local jobs = count(queue, wip, quarantine, scheduled, deferred)
-- A key of the other queue that another program has written must not stop this one.
local counted, others = pcall(count, other_queue, other_wip, other_quarantine, other_scheduled,
  other_deferred)
if counted then jobs = jobs + others end
max_jobs = whole(set[1]) or whole(set[2]) or max_jobs
if exceeds(jobs + 1, max_jobs) then return {'jobs', tostring(jobs), tostring(max_jobs)} end
local bytes = 0
for _, value in ipairs(redis.call('HMGET', open_bytes, queue, other_queue)) do
  bytes = bytes + (whole(value) or 0)
end
max_bytes = whole(set[3]) or whole(set[4]) or max_bytes
if exceeds(bytes + #data, max_bytes) then
  return {'bytes', tostring(bytes), tostring(max_bytes)}
end

local waits = false
if session ~= '' then
  local limit = whole(redis.call('HGET', limits, 'session_bytes')) or max_session_bytes
  local refusal
  refusal, waits = join_session(session, job_id, model, session_waits == '1', tostring(limit))
  if refusal then return refusal end
end

-- From here on an error is undone. No function has these locals: to create it would take longer.
local failure
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then failure = reply end
end
local function try_function(...)
  local worked, reason = pcall(...)
  if not worked then failure = type(reason) == 'table' and reason or redis.error_reply(reason) end
end

redis.call('DEL', log, results)
redis.call('HSET', job, 'data', data, 'chatjobs_bytes', #data, unpack(hash_fields))
try('HINCRBY', open_bytes, queue, #data)
local counted = not failure
try_function(reserve_rows, hashes, fields, digests, item_job, row_seconds)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = tonumber(at) or now + (tonumber(delay) or 0)
if ttl ~= '' then
  local deadline = string.format('%d', math.max(due, now) + ttl)
  redis.call('HSET', job, 'chatjobs_deadline', deadline, 'chatjobs_ttl', deadline - now)
  try('ZADD', deadlines, deadline, job_id)
end
try('SADD', queues, queue)
if session ~= '' then redis.call('HSET', job, 'chatjobs_session', session) end
if waits then
  redis.call('HSET', job, 'status', 'deferred')
  try('ZADD', deferred, '+inf', job_id)
elseif due > now then
  redis.call('HSET', job, 'status', 'scheduled')
  if at == '' then redis.call('HSET', job, 'chatjobs_delay', delay) end
  try('ZADD', scheduled, string.format('%.3f', due / 1000), job_id)
else
  try_function(queue_job, 'RPUSH', queue, job_id)
end

if failure then
  pcall(remove_job, queue, job_id)
  redis.pcall('ZREM', scheduled, job_id)
  redis.pcall('ZREM', deferred, job_id)
  redis.pcall('ZREM', deadlines, job_id)
  free_rows(hashes, fields)
  redis.pcall('DEL', job)
  if counted then redis.pcall('HINCRBY', open_bytes, queue, -#data) end
  if session ~= '' then redis.pcall('LREM', open_key(session), -1, job_id) end
  return failure
end
keep_custom_id(ids, next_row, custom_id, row_number, row_seconds)
return {'enqueued'}

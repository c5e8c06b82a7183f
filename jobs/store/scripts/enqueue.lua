#!lua
-- Puts new jobs of one queue into it, or lets them wait for their time, each unless it is there already or
-- a limit refuses it. A job of a session waits as RQ's deferred jobs do until the one before it has ended.
-- The caller loads this script behind the functions of queue.lua, turns.lua and reservations.lua.
--
-- KEYS  queue: list of the ids that wait
--       wip: sorted set of the started jobs of the queue
--       quarantine: list of the suspects that wait
--       scheduled: RQ's registry of jobs that wait for their time, scores in seconds
--       deferred: RQ's registry of jobs that wait for other jobs
--       other_queue, other_wip, other_quarantine, other_scheduled, other_deferred: the same of the
--       model's queue with the other priority
--       queues: set of all queues
--       open_bytes: hash with the bytes of the jobs that have not ended, by queue key
--       limits: hash of the limits that an operator has set
--       deadlines: sorted set of the jobs with a time to live, scores in milliseconds
--       producer: the lease on the run; queue if the caller needs none
--       more_keys…: keys of each job, then the hashes of the reserved rows of all jobs
-- keys  job: hash of the job
--       log: replay log of an earlier job of this id; deleted
--       results: stream of the results of an earlier job of this id; deleted
--       abandoned_job: hash of the job of the reservation `abandoned`
--       ids: hash of the rows of some custom_ids; job if no custom_id identifies this row
--       next_row: number behind all rows that were given by custom_id; job if none identifies this row
-- ARGV  jobs: number of jobs
--       model: name of the model, for limits of its own
--       row_seconds: seconds until the reservations expire
--       max_jobs, max_bytes, max_request_bytes, max_message_bytes, max_session_bytes: limits that no
--       operator has set
--       holder: token of the process that holds the lease on the run; '' if the caller needs none
--       more_args…: args of each job, then field, value, … of the rest of the hash of all jobs
-- args  job_id: id of the job
--       data: field of the hash; it tells this job from another one of this id
--       request_bytes: bytes of the data, decompressed
--       message_bytes: bytes of the largest message
--       cost: sequences that the job adds to the batch
--       fields, digests, named_job: the rows of the job, as reserve_rows takes them; '' without a row
--       custom_id, row_number: digest of the custom_id that identifies the row, and its number; '' if
--       none does
--       abandoned: reservation of the row by another request, to be replaced if that request's job is
--       gone without a row; '' for none
--       at, delay: time to queue the job, as milliseconds since the epoch or from now; '' for now
--       ttl: milliseconds to live from the time when it is queued; '' for no limit
--       session, session_waits: its session, '' for none, and '1' if it may wait for other jobs of it
-- Returns for each job {'enqueued'}; {'same'} if the job is there already; {'ended'} if its rows are
--       reserved by the same request, and the job has ended and left Redis; {'id'} if another job has the id;
--       {'row', reservation, number} if another request has a row; {'row_moved'} if the custom_id has another
--       row; {'producer'} if another process holds the lease on the run; a refusal of join_session; a limit
--       that the job exceeds: {name, value, limit}; or the error of a command. No job or reservation of a job
--       has changed unless its reply is 'enqueued'.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply.
--
-- Atomic: the server runs the whole script before any other command, so no worker sees an id in the
-- queue without its hash, and no limit is exceeded by two producers at once. A full Redis refuses
-- the whole script: it has no flag allow-oom.
local queue, wip, quarantine, scheduled, deferred, other_queue, other_wip, other_quarantine,
  other_scheduled, other_deferred, queues, open_bytes, limits, deadlines, producer = unpack(KEYS)
local more_keys = {unpack(KEYS, 16)}
local jobs, model, row_seconds, max_jobs, max_bytes, max_request_bytes, max_message_bytes,
  max_session_bytes, holder = unpack(ARGV)
local more_args = {unpack(ARGV, 10)}

local JOB_KEYS, JOB_ARGS = 6, 16
jobs = tonumber(jobs)
local hashes = {unpack(more_keys, JOB_KEYS * jobs + 1)}
local hash_fields = {unpack(more_args, JOB_ARGS * jobs + 1)}

local is_held = holder == '' or redis.call('GET', producer) == holder

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Counts the jobs of a queue. A queue without jobs has no bytes, whatever RQ's tools have removed.
local function count_jobs(queue_key, wip_key, quarantine_key, scheduled_key, deferred_key)
  local number = redis.call('LLEN', queue_key) + redis.call('ZCARD', wip_key)
    + redis.call('LLEN', quarantine_key) + redis.call('ZCARD', scheduled_key)
    + redis.call('ZCARD', deferred_key)
    + (whole(redis.call('HGET', 'chatjobs:tenant-jobs', name_of(queue_key))) or 0)
  if number == 0 then redis.call('HDEL', open_bytes, queue_key) end
  return number
end

-- The limits, and what the model's queues hold of them. They are read for the first job that is new.
local limit, used
local function read_limits()
  if used then return end
  local set = redis.call('HMGET', limits, 'jobs:' .. model, 'jobs', 'bytes:' .. model, 'bytes',
    'request_bytes', 'message_bytes')
  local open = count_jobs(queue, wip, quarantine, scheduled, deferred)
  -- A key of the other queue that another program has written must not stop this one.
  local counted, others = pcall(count_jobs, other_queue, other_wip, other_quarantine, other_scheduled,
    other_deferred)
  if counted then open = open + others end
  local bytes = 0
  for _, value in ipairs(redis.call('HMGET', open_bytes, queue, other_queue)) do
    bytes = bytes + (whole(value) or 0)
  end
  limit = {
    jobs = whole(set[1]) or whole(set[2]) or max_jobs,
    bytes = whole(set[3]) or whole(set[4]) or max_bytes,
    request_bytes = whole(set[5]) or max_request_bytes,
    message_bytes = whole(set[6]) or max_message_bytes,
  }
  used = {jobs = open, bytes = bytes}
end

-- The refusal of a job with which `value` would be so much; nil if the limit allows it.
local function exceeds(name, value, shown)
  if tonumber(value) <= tonumber(limit[name]) then return nil end
  return {name, tostring(shown or value), tostring(limit[name])}
end

local function as_error(reason)
  return type(reason) == 'table' and reason or redis.error_reply(reason)
end

local failure  -- the first error of the job that is enqueued
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then failure = reply end
end
local function try_function(...)
  local worked, reason = pcall(...)
  if not worked then failure = as_error(reason) end
end

local function enqueue(keys, args)
  local job, log, results, abandoned_job, ids, next_row = unpack(keys)
  local job_id, data, request_bytes, message_bytes, cost, fields, digests, named_job, custom_id, row_number,
    abandoned, at, delay, ttl, session, session_waits = unpack(args)

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

  read_limits()
  refused = exceeds('request_bytes', request_bytes) or exceeds('message_bytes', message_bytes)
    or exceeds('jobs', used.jobs + 1, used.jobs) or exceeds('bytes', used.bytes + #data, used.bytes)
  if refused then return refused end

  local waits = false
  if session ~= '' then
    local set = whole(redis.call('HGET', limits, 'session_bytes')) or max_session_bytes
    refused, waits = join_session(session, job_id, model, session_waits == '1', tostring(set))
    if refused then return refused end
  end

  -- From here on an error is undone.
  failure = nil
  redis.call('DEL', log, results)
  redis.call('HSET', job, 'data', data, 'chatjobs_bytes', #data, unpack(hash_fields))
  if cost ~= '1' then redis.call('HSET', job, 'chatjobs_cost', cost) end
  try('HINCRBY', open_bytes, queue, #data)
  local counted = not failure
  try_function(reserve_rows, hashes, fields, digests, named_job)
  local due = tonumber(at) or now + (tonumber(delay) or 0)
  if ttl ~= '' then
    local deadline = string.format('%d', math.max(due, now) + ttl)
    redis.call('HSET', job, 'chatjobs_deadline', deadline, 'chatjobs_ttl', deadline - now)
    try('ZADD', deadlines, deadline, job_id)
  end
  if session ~= '' then redis.call('HSET', job, 'chatjobs_session', session) end
  if waits then
    redis.call('HSET', job, 'status', 'deferred')
    try('SADD', queues, queue)
    try('ZADD', deferred, '+inf', job_id)
  elseif due > now then
    redis.call('HSET', job, 'status', 'scheduled')
    if at == '' then redis.call('HSET', job, 'chatjobs_delay', delay) end
    try('SADD', queues, queue)
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
  used.jobs, used.bytes = used.jobs + 1, used.bytes + #data
  keep_custom_id(ids, next_row, custom_id, row_number, row_seconds)
  return {'enqueued'}
end

local replies = {}
for number = 1, jobs do
  replies[number] = {'producer'}
  if is_held then
    local worked, reply = pcall(enqueue,
      {unpack(more_keys, JOB_KEYS * (number - 1) + 1, JOB_KEYS * number)},
      {unpack(more_args, JOB_ARGS * (number - 1) + 1, JOB_ARGS * number)})
    replies[number] = worked and reply or as_error(reply)
  end
end
if is_held then keep_rows(hashes, row_seconds) end
return replies

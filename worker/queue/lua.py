"""The scripts that move a job between RQ's keys, each one step that happens whole or not at all.

The keys are RQ 2.12's own, so RQ's tools read them; what they hold stands in rq/job.py,
rq/executions.py, rq/registry.py and rq/results.py. A job that a worker has is an entry
`<job>:<execution>` in `rq:wip:<queue>`: the lease of this attempt. Whoever ends or returns the job
removes it, and one who finds it gone changes nothing.

A script that fails half-way is not rolled back. A full Redis refuses writes that may grow, from the
first one on, but no removal; so each script begins with a write that is refused, and removes last.
"""

from __future__ import annotations

from jobs.client.rq_format import ATTEMPT, CANCEL, ERROR
from jobs.results import outbox
from jobs.stream.entries import END_LUA

LOST = "chatjobs_lost"  # field of the job's hash: workers that died with it
RETRIED = "chatjobs_retried"  # field of the job's hash: retries that its errors have used

# What a worker reads of a job's hash.
FIELDS = ("data", "enqueued_at", "created_at", "result_ttl", "failure_ttl", RETRIED, LOST, CANCEL)

# Queue → started. KEYS: queue, wip, … of all models, then of all models again: the queues of the
# second half are looked at when those of the first have left room. ARGV: worker, execution prefix,
# now (RQ's format), now (seconds), wip score, then the room of each model.
# Answers {number of the queue, id, attempt, execution, FIELDS…} for each job taken. Ids without a
# job hash are dropped, as RQ drops them, and so are ids that no RQ job can have. An id that was
# queued twice is dropped when it comes up again: its job is over, or somebody runs it.
CLAIM = f"""
local over = {{finished = true, failed = true, stopped = true, canceled = true}}
local function waits(id, key)
  if not string.find(id, '^[!-~]+$') or redis.call('TYPE', key).ok ~= 'hash' then return false end
  local status = redis.call('HGET', key, 'status')
  if status == 'started' then return redis.call('EXISTS', 'rq:executions:' .. id) == 0 end
  return not over[status]
end
local first_room = 6
local models = #ARGV - first_room + 1
local room, taken = {{}}, {{}}
for m = 1, models do room[m] = tonumber(ARGV[first_room + m - 1]) end
for q = 1, #KEYS / 2 do
  local queue, wip, m = KEYS[2 * q - 1], KEYS[2 * q], (q - 1) % models + 1
  while room[m] > 0 do
    local id = redis.call('LINDEX', queue, 0)
    if not id then break end
    local key = 'rq:job:' .. id
    if waits(id, key) then
      local before = tonumber(redis.call('HGET', key, '{ATTEMPT}') or 0) or 0
      if before % 1 ~= 0 or before < 0 or before > 1e9 then before = 0 end
      local attempt = string.format('%d', before + 1)
      local execution = ARGV[2] .. attempt
      local score = string.format('%.17g', ARGV[5] + #taken * 1e-6)  -- keeps the order of claims
      redis.call('HSET', key, 'status', 'started', 'worker_name', ARGV[1], 'started_at', ARGV[3],
        'last_heartbeat', ARGV[3], '{ATTEMPT}', attempt)
      redis.call('PERSIST', key)
      redis.call('HSET', 'rq:execution:' .. id .. ':' .. execution, 'id', execution,
        'created_at', ARGV[4], 'last_heartbeat', ARGV[4], 'worker_name', ARGV[1])
      redis.call('ZADD', 'rq:executions:' .. id, score, execution)
      redis.call('ZADD', wip, score, id .. ':' .. execution)
      local fields = redis.call('HMGET', key, {", ".join(f"'{name}'" for name in FIELDS)})
      taken[#taken + 1] = {{q, id, attempt, execution, unpack(fields)}}
      room[m] = room[m] - 1
    end
    redis.call('LPOP', queue)
  end
end
return taken
"""

# Started → finished, failed or canceled. KEYS: job, wip, execution, executions, registry, results,
# outbox, outboxes, log, live, worker, lease of another worker that must be gone ('' in ARGV[14]
# means: not looked at). ARGV: job id, execution id, status, ended_at, seconds to keep (-1: for
# ever), registry score, error JSON ('' if none), outbox row, run, end id, end payload, name of a
# counter of the worker ('' for none), max results kept, lease to look at, now (seconds), seconds
# that it ran, result as field, value, …
# Answers 0 if the lease is lost, else 1 + the number of dependents.
SETTLE = (
    END_LUA
    + f"""
if ARGV[14] ~= '' and redis.call('EXISTS', KEYS[12]) == 1 then return 0 end
if not redis.call('ZSCORE', KEYS[2], ARGV[1] .. ':' .. ARGV[2]) then return 0 end
redis.call('XADD', KEYS[7], '*', '{outbox.FIELD}', ARGV[8])
redis.call('ZREM', KEYS[2], ARGV[1] .. ':' .. ARGV[2])
redis.call('SADD', KEYS[8], ARGV[9])
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[2])
local dependents = redis.call('SCARD', KEYS[1] .. ':dependents')
if redis.call('EXISTS', KEYS[1]) == 1 then
  local keep = tonumber(ARGV[5])
  if keep == 0 and dependents > 0 then keep = 60 end  -- they are queued with the job's own hash
  redis.call('HSET', KEYS[1], 'status', ARGV[3], 'ended_at', ARGV[4])
  if ARGV[7] ~= '' then redis.call('HSET', KEYS[1], '{ERROR}', ARGV[7]) end
  if keep == 0 then
    redis.call('DEL', KEYS[1], KEYS[6])
  else
    redis.pcall('ZREMRANGEBYSCORE', KEYS[5], 0, ARGV[15])
    redis.pcall('ZADD', KEYS[5], ARGV[6], ARGV[1])
    redis.pcall('XADD', KEYS[6], 'MAXLEN', ARGV[13], '*', unpack(ARGV, 17))
    if keep > 0 then
      for _, key in ipairs({{KEYS[1], KEYS[6], KEYS[1] .. ':dependents',
        KEYS[1] .. ':dependencies'}}) do redis.call('EXPIRE', key, keep) end
    end
  end
end
end_stream(KEYS[9], KEYS[10], ARGV[10], ARGV[11])
if redis.call('EXISTS', KEYS[11]) == 1 then
  if ARGV[12] ~= '' then redis.pcall('HINCRBY', KEYS[11], ARGV[12], 1) end
  redis.pcall('HINCRBYFLOAT', KEYS[11], 'total_working_time', ARGV[16])
end
return 1 + dependents
"""
)

# Started → queued. KEYS: job, wip, execution, executions, queue, lease. ARGV: job id, execution id,
# LPUSH or RPUSH, counter to raise ('' for none), its limit, 1 if the lease must be gone, 1 if the
# attempt was never begun and doesn't count.
# Answers 0 if the lease is lost, 1 if the job waits again, 2 if the counter would pass its limit:
# nothing has changed then.
RETURN = f"""
if ARGV[6] == '1' and redis.call('EXISTS', KEYS[6]) == 1 then return 0 end
if not redis.call('ZSCORE', KEYS[2], ARGV[1] .. ':' .. ARGV[2]) then return 0 end
if redis.call('EXISTS', KEYS[1]) == 1 then
  if ARGV[4] ~= '' then
    local used = tonumber(redis.call('HGET', KEYS[1], ARGV[4]) or 0) or 0
    if used + 1 > tonumber(ARGV[5]) then return 2 end
    redis.call('HSET', KEYS[1], ARGV[4], used + 1)
  end
  redis.call('HSET', KEYS[1], 'status', 'queued')
  redis.call('HDEL', KEYS[1], 'worker_name', 'started_at')
  if ARGV[7] == '1' then redis.call('HINCRBY', KEYS[1], '{ATTEMPT}', -1) end
  redis.call(ARGV[3], KEYS[5], ARGV[1])
end
redis.call('ZREM', KEYS[2], ARGV[1] .. ':' .. ARGV[2])
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[2])
return 1
"""

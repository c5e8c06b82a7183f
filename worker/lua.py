"""The scripts that move a job between RQ's keys, each one step that happens whole or not at all.

The keys are RQ 2.12's own, so RQ's tools read them; what they hold stands in rq/job.py,
rq/executions.py, rq/registry.py and rq/results.py. A job that a worker has is an entry
`<job>:<execution>` in `rq:wip:<queue>`: the lease of this attempt. Whoever ends or returns the job
removes it, and one who finds it gone changes nothing.
"""

from __future__ import annotations

from jobs import outbox
from jobs.state import ATTEMPT, ERROR
from jobs.stream import END_LUA

LOST = "chatjobs_lost"  # field of the job's hash: workers that died with it
RETRIED = "chatjobs_retried"  # field of the job's hash: retries that its errors have used

# Queue → started. KEYS: queue, wip. ARGV: how many, worker, execution prefix, now (RQ's format),
# now (seconds), wip score. Answers id, attempt, execution, … of what was taken. Ids without a job
# hash are dropped, as RQ drops them.
CLAIM = f"""
local taken = {{}}
while #taken < 3 * ARGV[1] do
  local id = redis.call('LPOP', KEYS[1])
  if not id then break end
  local key = 'rq:job:' .. id
  if redis.call('TYPE', key).ok == 'hash' then
    if not tonumber(redis.call('HGET', key, '{ATTEMPT}') or 0) then
      redis.call('HDEL', key, '{ATTEMPT}')
    end
    local attempt = redis.call('HINCRBY', key, '{ATTEMPT}', 1)
    local execution = ARGV[3] .. attempt
    redis.call('HSET', key, 'status', 'started', 'worker_name', ARGV[2], 'started_at', ARGV[4],
      'last_heartbeat', ARGV[4])
    redis.call('HSET', 'rq:execution:' .. id .. ':' .. execution, 'created_at', ARGV[5],
      'last_heartbeat', ARGV[5], 'worker_name', ARGV[2])
    redis.call('ZADD', 'rq:executions:' .. id, ARGV[6], execution)
    redis.call('ZADD', KEYS[2], ARGV[6], id .. ':' .. execution)
    taken[#taken + 1] = id
    taken[#taken + 1] = attempt
    taken[#taken + 1] = execution
  end
end
return taken
"""

# Started → finished, failed or canceled. KEYS: job, wip, execution, executions, registry, results,
# outbox, outboxes, log, live, worker, lease of another worker that must be gone ('' in ARGV[14]
# means: not looked at). ARGV: job id, execution id, status, ended_at, seconds to keep (-1: for
# ever), registry score, error JSON ('' if none), outbox row, run, end id, end payload, name of the
# worker's counter, max results kept, lease to look at, result as field, value, …
# Answers 0 if the lease is lost, else 1 + the number of dependents.
SETTLE = (
    END_LUA
    + f"""
if ARGV[14] ~= '' and redis.call('EXISTS', KEYS[12]) == 1 then return 0 end
if redis.call('ZREM', KEYS[2], ARGV[1] .. ':' .. ARGV[2]) == 0 then return 0 end
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[2])
local keep = tonumber(ARGV[5])
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'status', ARGV[3], 'ended_at', ARGV[4])
  if ARGV[7] ~= '' then redis.call('HSET', KEYS[1], '{ERROR}', ARGV[7]) end
  if keep == 0 then
    redis.call('DEL', KEYS[1])
  else
    redis.call('ZADD', KEYS[5], ARGV[6], ARGV[1])
    redis.call('XADD', KEYS[6], 'MAXLEN', ARGV[13], '*', unpack(ARGV, 15))
    if keep > 0 then
      redis.call('EXPIRE', KEYS[1], keep)
      redis.call('EXPIRE', KEYS[6], keep)
    end
  end
end
redis.call('XADD', KEYS[7], '*', '{outbox.FIELD}', ARGV[8])
redis.call('SADD', KEYS[8], ARGV[9])
end_stream(KEYS[9], KEYS[10], ARGV[10], ARGV[11])
if redis.call('EXISTS', KEYS[11]) == 1 then redis.call('HINCRBY', KEYS[11], ARGV[12], 1) end
return 1 + redis.call('SCARD', KEYS[1] .. ':dependents')
"""
)

# Started → queued. KEYS: job, wip, execution, executions, queue, lease. ARGV: job id, execution id,
# LPUSH or RPUSH, counter to raise ('' for none), its limit, 1 if the lease must be gone.
# Answers 0 if the lease is lost, 1 if the job waits again, 2 if the counter would pass its limit:
# nothing has changed then.
RETURN = """
if ARGV[6] == '1' and redis.call('EXISTS', KEYS[6]) == 1 then return 0 end
if not redis.call('ZSCORE', KEYS[2], ARGV[1] .. ':' .. ARGV[2]) then return 0 end
local there = redis.call('EXISTS', KEYS[1]) == 1
if ARGV[4] ~= '' and there then
  local used = tonumber(redis.call('HGET', KEYS[1], ARGV[4]) or 0) or 0
  if used + 1 >= tonumber(ARGV[5]) then return 2 end
  redis.call('HSET', KEYS[1], ARGV[4], used + 1)
end
redis.call('ZREM', KEYS[2], ARGV[1] .. ':' .. ARGV[2])
redis.call('DEL', KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[2])
if there then
  redis.call('HSET', KEYS[1], 'status', 'queued')
  redis.call('HDEL', KEYS[1], 'worker_name', 'started_at')
  redis.call(ARGV[3], KEYS[5], ARGV[1])
end
return 1
"""

-- Prelude for claims: which jobs are left to workers with a longer context. Needs the functions of queue.lua
-- and statuses.lua.
--
-- The field chatjobs_longer of a job is '<tokens> <worker>': a worker has found that the job needs a context
-- of so many tokens, and has returned it for that worker, which has such a context. Any worker with such a
-- context takes it. The others leave it as long as that worker publishes such a context for the model, or is there
-- and publishes nothing: what it has is not known then. A worker that has died is removed. Then one of them
-- takes the job, looks for another worker, and fails it if there is none.
--
-- Atomic as part of the script that calls these functions.
local LOOK_AGAIN_MS = 1000

-- The tokens that a job needs, and the worker that it was returned for; nil for any other job.
local function longer_context_of(job)
  local value = redis.call('HGET', job, 'chatjobs_longer')
  local tokens, worker = string.match(value or '', '^(%d+) (.+)$')
  return tonumber(tokens), worker
end

-- Decides for one claim. left_ms: milliseconds until the jobs that were left are looked at again; -1 without
-- one.
local function longer_contexts()
  local self = {left_ms = -1}

  -- True if a job is left to another worker. context: tokens of the caller for the queue; 0 if not known.
  function self.is_left(job, queue, context)
    local tokens, worker = longer_context_of(job)
    if not tokens or context == 0 or tokens <= context then return false end
    local name = string.gsub(name_of(queue), ' worker%.tasks%.[a-z_]+$', '')
    local model = string.match(name, '^%a+:(.+)$')
    local its = model and published(worker, 'contexts', model)
    local has_it = type(its) == 'number' and its >= tokens
    if not has_it and not is_silent(worker) then return false end
    self.left_ms = LOOK_AGAIN_MS
    return true
  end

  return self
end

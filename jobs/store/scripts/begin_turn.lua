#!lua flags=allow-oom
-- Reads the session of a job that a worker has claimed, and makes a job that was enqueued without
-- chatjobs its next one. The caller loads this script behind the functions of queue.lua and
-- turns.lua.
--
-- KEYS  job: hash of the job
--       session: hash of the session
--       turns: list of its turns
--       open: list of its jobs that have not ended
-- ARGV  job_id: id of the job
--       name: id of the session
--       model: model of the job
--       edits: '1' if its turn takes the place of the last one
-- Returns {'begun', system text, turns, replaces}, or a refusal: {'session'} if there is no such session,
--       {'session_model', its model}, {'session_field', field} if another program has written a field,
--       or {'busy', job id} if another job of the session runs.
--       replaces: the turn that an edit replaces, '' if it replaces none.
--
-- An edit replaces the turn that is the last one when the job first begins in its place of the session's
-- list. A job that has left the list, and is requeued, replaces no other: later turns may follow.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it.
local job, session, turns, open = unpack(KEYS)
local job_id, name, model, edits = unpack(ARGV)

local refusal = refuse_session(name, model)
if refusal then return refusal end
local running = first_open(name)
if running and running ~= job_id then return {'busy', running} end
local stored = redis.call('LRANGE', turns, 0, -1)  -- before the first write: it may fail
local replaces = ''
if edits == '1' then
  if running or redis.call('HEXISTS', job, 'chatjobs_session') == 0 then
    replaces = stored[#stored] or ''
  end
  redis.call('HSETNX', job, 'chatjobs_replaces', replaces)
  replaces = redis.call('HGET', job, 'chatjobs_replaces')
end
if not running then
  redis.call('RPUSH', open, job_id)
  redis.call('HSET', job, 'chatjobs_session', name)
end
keep_session(name)
return {'begun', redis.call('HGET', session, 'system') or '', stored, replaces}

#!lua flags=allow-oom
-- Reads the session of a job that a worker has claimed, and makes a job that was enqueued without
-- chatjobs its next one. The caller loads this script behind the functions of rq_tenants.lua and
-- rq_turns.lua.
--
-- KEYS  job: hash of the job
--       session: hash of the session
--       turns: list of its turns
--       open: list of its jobs that have not ended
-- ARGV  job_id: id of the job
--       name: id of the session
--       model: model of the job
-- Returns {'begun', system text, turns}, or a refusal: {'session'} if there is no such session,
--       {'session_model', its model}, or {'busy', job id} if another job of the session runs.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it.
local job, session, turns, open = unpack(KEYS)
local job_id, name, model = unpack(ARGV)

local refusal = refuse_session(name, model)
if refusal then return refusal end
local running = first_open(name)
if running and running ~= job_id then return {'busy', running} end
if not running then
  redis.call('RPUSH', open, job_id)
  redis.call('HSET', job, 'chatjobs_session', name)
end
keep_session(name)
return {'begun', redis.call('HGET', session, 'system') or '', redis.call('LRANGE', turns, 0, -1)}

#!lua flags=allow-oom
-- Removes what Redis holds of a row of a run: its reservation, and its job if that has ended or, if asked,
-- waits. The caller loads this script behind the functions of queue.lua, reservations.lua and
-- delete_job.lua.
--
-- KEYS  producer: the lease on the run
--       rows: hash of the reserved rows near this one
--       job_keys…: keys of delete_job
-- ARGV  token: of the process that holds the lease
--       field: field of the row in rows
--       job_id: id of the row's job
--       withdraw: '1' if a job that waits is removed as well
-- Returns 1 if Redis holds nothing of the row any more; 0 if its job has not ended; -1 if another process
--       holds the lease.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply.
--
-- Atomic: the server runs the whole script before any other command, so a worker claims a job that waits
-- or does not see it. A full Redis runs it: it makes room.
local producer, rows = unpack(KEYS)
local job_keys = {unpack(KEYS, 3)}
local token, field, job_id, withdraw = unpack(ARGV)

if redis.call('GET', producer) ~= token then return -1 end
local status = redis.call('HGET', job_keys[1], 'status')
if status and not has_ended(status) then
  if status ~= 'queued' or withdraw ~= '1' or not remove_job(job_keys[8], job_id) then return 0 end
end
if status then delete_job(job_keys, {job_id}) end
redis.call('HDEL', rows, field)
return 1

-- Writes the row of a run that no job can run, unless a request has the row. The caller loads this script
-- behind queue.lua and reservations.lua.
--
-- KEYS  producer: the lease on the run
--       rows: hash of the reserved rows near this one
--       outbox: stream of the rows of the run
--       outboxes: set of the runs that have rows in their outbox
-- ARGV  token: of the process that holds the lease
--       field: field of the row in rows
--       digest: of the error, as a request has one
--       row_seconds: seconds until the reservation expires
--       run: name of the run
--       row: row for the outbox
-- Returns {'written'}; {'ended'} if this error is written already; {'row', reservation} if a request has
--       the row; {'producer'} if another process holds the lease.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply.
--
-- Atomic: the server runs the whole script before any other command, so the row is in the outbox and
-- reserved, or neither. It is not rolled back when a command fails, so keys are checked first.
local producer, rows, outbox, outboxes = unpack(KEYS)
local token, field, digest, row_seconds, run, row = unpack(ARGV)

if redis.call('GET', producer) ~= token then return {'producer'} end
local reserved = redis.call('HGET', rows, field)
if reserved == digest then return {'ended'} end
if reserved and reserved ~= '' then return {'row', reserved} end
append_row(outbox, outboxes, run, row)
reserve_rows({rows}, '1:' .. field, digest, '')
rows_written({rows}, '1:' .. field, row_seconds)
return {'written'}

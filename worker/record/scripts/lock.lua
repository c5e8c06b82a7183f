#!lua flags=allow-oom
-- Gives one recorder the turn to look at the outboxes of all runs.
--
-- KEYS  turn: name of the recorder that has looked last; expires when the next one may look
--       outboxes: set of the runs that have rows in their outbox
-- ARGV  recorder: name of the recorder that asks
--       milliseconds: time between two turns
--       milliseconds_per_run: the same for each run, if that is more
-- Returns 1 if it is the turn of this recorder, 0 if it is not, -1 if there is no outbox.
--
-- Atomic: the server runs the whole script before any other command, so one recorder has the turn. A
-- full Redis runs it: the key is small and expires.
local turn, outboxes = unpack(KEYS)
local recorder, milliseconds, milliseconds_per_run = unpack(ARGV)

local runs = redis.call('SCARD', outboxes)
if runs == 0 then return -1 end
local pause = math.max(milliseconds, math.ceil(runs * milliseconds_per_run))
if redis.call('SET', turn, recorder, 'NX', 'PX', pause) then return 1 end
-- A key that does not expire is none of ours, and nobody would ever look.
if redis.call('PTTL', turn) == -1 then redis.call('DEL', turn) end
return 0

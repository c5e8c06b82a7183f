#!lua flags=allow-oom
-- Gives one recorder the lock to look at the outboxes of all runs.
--
-- KEYS  lock: name of the recorder that has looked last; expires when the next one may look
--       outboxes: set of the runs that have rows in their outbox
-- ARGV  recorder: name of the recorder that asks
--       milliseconds: time that the lock is held
--       milliseconds_per_run: the same for each run, if that is more
-- Returns 1 if this recorder has the lock now, 0 if one has it already, -1 if there is no outbox.
--
-- Atomic: the server runs the whole script before any other command, so one recorder has the lock. A
-- full Redis runs it: the key is small and expires.
local lock, outboxes = unpack(KEYS)
local recorder, milliseconds, milliseconds_per_run = unpack(ARGV)

local runs = redis.call('SCARD', outboxes)
if runs == 0 then return -1 end
local pause = math.max(milliseconds, math.ceil(runs * milliseconds_per_run))
if redis.call('SET', lock, recorder, 'NX', 'PX', pause) then return 1 end
-- Nobody would look for a long time: a key that does not expire is none of ours, and one that expires
-- later than any recorder wants is of before the clock of Redis was set back.
local left = redis.call('PTTL', lock)
if left == -1 or left > pause then redis.call('DEL', lock) end
return 0

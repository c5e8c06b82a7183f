#!lua flags=allow-oom
-- Gives a worker a leader lock, or extends the lock that it holds.
--
-- KEYS  lock: name of the worker that holds the lock; expires
-- ARGV  name: name of the worker
--       milliseconds: time that the lock is held
-- Returns 1 if the worker holds the lock now, else 0.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: the key
-- is small and expires.
local lock = unpack(KEYS)
local name, milliseconds = unpack(ARGV)

-- Nobody would be elected for a long time: a key that is no name, or does not expire, is none of ours,
-- and one that expires later than a lock can is of before the clock of Redis was set back.
local left = redis.call('PTTL', lock)
if redis.call('TYPE', lock).ok ~= 'string' or left == -1 or left > tonumber(milliseconds) then
  redis.call('DEL', lock)
end
local holder = redis.call('SET', lock, name, 'NX', 'GET', 'PX', milliseconds)
if not holder then return 1 end
if holder ~= name then return 0 end
redis.call('PEXPIRE', lock, milliseconds)
return 1

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

-- A key that is no name, or does not expire, is none of ours: nobody would ever be elected.
if redis.call('TYPE', lock).ok ~= 'string' or redis.call('PTTL', lock) == -1 then
  redis.call('DEL', lock)
end
local holder = redis.call('SET', lock, name, 'NX', 'GET', 'PX', milliseconds)
if not holder then return 1 end
if holder ~= name then return 0 end
redis.call('PEXPIRE', lock, milliseconds)
return 1

#!lua flags=allow-oom
-- Elects a worker for an office, or extends its term.
--
-- KEYS  office: name of the worker that holds the office; expires
-- ARGV  name: name of the worker
--       milliseconds: length of the term
-- Returns 1 if the worker holds the office now, else 0.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: the key
-- is small and expires.
local office = unpack(KEYS)
local name, milliseconds = unpack(ARGV)

-- A key that is no name, or does not expire, is none of ours: nobody would ever be elected.
if redis.call('TYPE', office).ok ~= 'string' or redis.call('PTTL', office) == -1 then
  redis.call('DEL', office)
end
local holder = redis.call('SET', office, name, 'NX', 'GET', 'PX', milliseconds)
if not holder then return 1 end
if holder ~= name then return 0 end
redis.call('PEXPIRE', office, milliseconds)
return 1

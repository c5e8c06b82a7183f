#!lua flags=allow-oom
-- Notes the results folder of this Redis, unless it has one.
--
-- KEYS  results: JSON about the results folder of all workers
-- ARGV  folder: JSON about the folder of the calling worker
-- Returns 1 if it is noted, 0 if there is one already.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: the value
-- is small, and without it no worker could start and make room.
local results = unpack(KEYS)
local folder = unpack(ARGV)

return redis.call('SET', results, folder, 'NX') and 1 or 0

#!lua flags=allow-oom
-- Wakes a worker. The caller loads this script behind the functions of queue.lua.
--
-- KEYS  list: list that the worker waits on
-- ARGV  milliseconds: how long the list of one worker is kept; '' for that of a queue
-- Returns nothing.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: the list has
-- a greatest length.
local list = unpack(KEYS)
local milliseconds = unpack(ARGV)

wake(list, milliseconds ~= '' and milliseconds or nil)

#!lua flags=allow-oom
-- Adds answers of a worker to a command of an operator.
--
-- KEYS  answers: the list of the answers
-- ARGV  seconds: how long the list is kept
--       texts…: the answers
-- Returns 1.
--
-- Atomic: the server runs the whole script before any other command. A full Redis runs it: the
-- worker would stop at an answer that it can't send, and make no room.
local answers = unpack(KEYS)
local seconds = unpack(ARGV)
local texts = {unpack(ARGV, 2)}

for _, text in ipairs(texts) do redis.call('RPUSH', answers, text) end
redis.call('EXPIRE', answers, seconds)
return 1

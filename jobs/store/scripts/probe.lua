#!lua flags=allow-oom
-- Tries each command that workers send, on a key that nothing else uses.
--
-- KEYS  key: a key that the commands may write
--       other: a second one
-- ARGV  commands…: words of each command with spaces between; KEY and OTHER stand for the keys
-- Returns for each command that the user may not run what Redis says, after the command's number.
--
-- Atomic: the server runs the whole script before any other command, and both keys are deleted. A full
-- Redis runs it: it leaves nothing.
local key, other = unpack(KEYS)
local commands = {unpack(ARGV)}

local refused = {}
for number, text in ipairs(commands) do
  local words = {}
  for word in string.gmatch(text, '%S+') do
    words[#words + 1] = word == 'KEY' and key or word == 'OTHER' and other or word
  end
  redis.pcall('DEL', key, other)
  local reply = redis.pcall(unpack(words))
  if type(reply) == 'table' and reply.err and string.find(reply.err, 'permission') then
    refused[#refused + 1] = {number, reply.err}
  end
end
redis.pcall('DEL', key, other)
return refused

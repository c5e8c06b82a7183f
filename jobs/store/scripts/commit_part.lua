#!lua flags=allow-oom
-- Drops a plan and its outbox entries, once their part is written.
--
-- KEYS  outbox: stream of the rows of the run
--       plans: hash of the plans of the run, see plan.lua
--       outboxes: set of the runs that have rows in their outbox
--       wanted: set of the runs whose rows somebody waits for
--       backlog: the counted rows of all outboxes
-- ARGV  name: name of the part
--       first, last: ids of its first and last entry
--       run: name of the run
-- Returns 1 if the plan was there, 0 if another recorder has committed it.
--
-- Atomic: the server runs the whole script before any other command. All its writes are removals,
-- which a full Redis accepts. The plan goes first: a plan that is gone is never committed again.
local outbox, plans, outboxes, wanted, backlog = unpack(KEYS)
local name, first, last, run = unpack(ARGV)

local entries = redis.call('XRANGE', outbox, first, last)  -- it fails for a key of another type
if redis.call('HDEL', plans, name) == 0 then return 0 end
for _, entry in ipairs(entries) do
  redis.call('XDEL', outbox, entry[1])
end
if redis.call('XLEN', outbox) == 0 and redis.call('HLEN', plans) <= 1 then
  redis.call('DEL', outbox, plans)
  redis.pcall('SREM', outboxes, run)  -- another program may have written these two
  redis.pcall('SREM', wanted, run)
  if redis.call('EXISTS', outboxes) == 0 then redis.call('DEL', backlog) end
end
return 1

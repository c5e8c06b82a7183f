#!lua flags=allow-oom
-- Plans the next part of a run, or takes over a plan that its recorder has left.
--
-- KEYS  outbox: stream of the rows of the run
--       plans: hash with one plan (JSON) per part in progress, by part name, and under `cursor` the
--         id of the last outbox entry that a plan covers
-- ARGV  recorder: name of the recorder that asks
--       hold_seconds: time that the plan belongs to it
--       max_rows, max_bytes: entries of a part and bytes of their values, at most
--       due_rows, due_seconds: number of entries, or age of the oldest one, from which a part is due
--       oldest, oldest_seconds: the oldest entry that the caller has seen before, and for how long; ''
--       and 0 for none
--       till: id of the last entry that may be planned; + for any
-- Returns {damaged, name, first id, last id, count} of a part to write, {damaged, oldest id} if none is
--       due, {damaged} if there is no entry.
--       damaged lists the fields that hold no plan, because another program has written them. They
--       are left as they are. Without a valid cursor, nothing is planned.
--
-- The clock of Redis may be set back. Then the ids of entries are in the future and say nothing about
-- their age, which is how long the caller has seen them; and a plan that belongs to its recorder for
-- longer than it may has been left.
--
-- Only the first entry is read until a part is due: reading a long outbox blocks the server.
--
-- Atomic: the server runs the whole script before any other command, so two recorders never plan
-- the same entries. The cursor is written before the plan: both are writes to one hash, which run
-- even when Redis is full (flag allow-oom, set by the caller on Redis 7).
local outbox, plans = unpack(KEYS)
local recorder, hold_seconds, max_rows, max_bytes, due_rows, due_seconds, oldest,
  oldest_seconds, till = unpack(ARGV)
max_rows, max_bytes = tonumber(max_rows), tonumber(max_bytes)
due_rows, due_seconds = tonumber(due_rows), tonumber(due_seconds)

local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

local damaged = {}

local function hold(name, plan)
  plan.till, plan.held, plan.owner = now + hold_seconds, tonumber(hold_seconds), recorder
  redis.call('HSET', plans, name, cjson.encode(plan))
  return {damaged, name, plan.first, plan.last, plan.count}
end

-- True if a recorder has left its plan.
local function is_left(plan)
  local held = tonumber(plan.held) or tonumber(hold_seconds)  -- of a version that does not say it
  return now > plan.till or plan.till - now > held + 1
end

-- The plan in a field; nil for anything else. The name of a part says which entries it has.
local function read_plan(name, value)
  local first, last = string.match(name, '^part%-(%d+%-%d+)%-(%d+%-%d+)$')
  local is_json, plan = pcall(cjson.decode, value)
  if not first or not is_json or type(plan) ~= 'table' or plan.first ~= first or plan.last ~= last
    or type(plan.count) ~= 'number' or type(plan.till) ~= 'number'
    or type(plan.owner) ~= 'string' then return nil end
  return plan
end

local cursor
local fields = redis.call('HGETALL', plans)
for i = 1, #fields, 2 do
  local name, value = fields[i], fields[i + 1]
  if name == 'cursor' then
    cursor = value
  else
    local plan = read_plan(name, value)
    if not plan then
      damaged[#damaged + 1] = name
    elseif is_left(plan) or plan.owner == recorder then
      return hold(name, plan)
    end
  end
end
if cursor and not string.match(cursor, '^%d+%-%d+$') then
  damaged[#damaged + 1] = 'cursor'
  return {damaged}
end

local function read(count)
  local entries = redis.call('XRANGE', outbox, cursor and '(' .. cursor or '-', till, 'COUNT', count)
  if #entries > 0 then cursor = entries[#entries][1] end
  return entries
end

local entries = read(1)
if #entries == 0 then return {damaged} end
local first = entries[1][1]
local age = math.max(now - string.match(first, '^(%d+)') / 1000,
  first == oldest and tonumber(oldest_seconds) or 0)
if age < due_seconds and redis.call('XLEN', outbox) < due_rows then return {damaged, first} end

local count, size = 0, 0
while #entries > 0 and count < max_rows and size < max_bytes do
  count = count + #entries
  for _, entry in ipairs(entries) do
    for _, text in ipairs(entry[2]) do size = size + #text end
  end
  if count < max_rows and size < max_bytes then entries = read(math.min(100, max_rows - count)) end
end
if age < due_seconds and count < due_rows and size < max_bytes then return {damaged, first} end

redis.call('HSET', plans, 'cursor', cursor)
return hold('part-' .. first .. '-' .. cursor, {first = first, last = cursor, count = count})

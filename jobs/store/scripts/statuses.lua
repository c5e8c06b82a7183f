-- Prelude for claims: what workers publish about themselves, each read once in a script.
--
-- Atomic as part of the script that calls these functions.
local read_statuses = {}  -- by worker

-- The status of a worker; {} if it publishes none, or another program has written the key.
local function status_of(worker)
  if not read_statuses[worker] then
    local text = redis.pcall('GET', 'chatjobs:worker:' .. worker)
    local readable, status = pcall(cjson.decode, type(text) == 'string' and text or '{}')
    read_statuses[worker] = readable and type(status) == 'table' and status or {}
  end
  return read_statuses[worker]
end

local are_silent = {}  -- by worker

-- True if a worker is there and publishes nothing: its loop has not come to it, as after an outage, or it has
-- died and is removed soon.
local function is_silent(worker)
  if are_silent[worker] == nil then
    are_silent[worker] = redis.call('EXISTS', 'chatjobs:worker:' .. worker) == 0
      and redis.call('ZSCORE', 'chatjobs:workers', worker) ~= false
  end
  return are_silent[worker]
end

-- A value of a table in the status of a worker; nil without one.
local function published(worker, field, name)
  local values = status_of(worker)[field]
  return type(values) == 'table' and values[name] or nil
end

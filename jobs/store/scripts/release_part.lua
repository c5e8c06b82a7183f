#!lua flags=allow-oom
-- Gives up a plan, so that another recorder takes it at once.
--
-- KEYS  plans: hash of the plans of the run, see plan.lua
-- ARGV  name: name of the part
--       recorder: name of the recorder that gives it up
-- Returns 1 if the plan was this recorder's, else 0.
--
-- Atomic: the server runs the whole script before any other command, so no plan of another recorder
-- is given up.
local plans = unpack(KEYS)
local name, recorder = unpack(ARGV)

local value = redis.call('HGET', plans, name)
local is_json, plan = pcall(cjson.decode, value or '')
if not is_json or type(plan) ~= 'table' or plan.owner ~= recorder then return 0 end
plan.till, plan.owner = 0, ''
redis.call('HSET', plans, name, cjson.encode(plan))
return 1

"""The plans of parts, in Redis: which outbox entries make up which file, and who is making it.

Each script is one step that happens whole or not at all. The hash `keys.parts(run)` holds a plan
per part in the making, by its name, and under `cursor` the last entry that any plan covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs import keys
from jobs.results import outbox

# Redis 7: a full Redis lets these run, since they are what empties it.
WHEN_FULL = "#!lua flags=allow-oom\n"

# KEYS: outbox, plans. ARGV: recorder, seconds that a plan is held, entries and bytes at most,
# entries or age (seconds) from which a part is made. Answers name, first, last, count of a plan
# that was left behind, else of a new one, else nothing. The first entry alone is looked at until a
# part is due: reading a long outbox stops everybody.
PLAN = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local till = now + ARGV[2]
local function hold(name, plan)
  plan.till, plan.owner = till, ARGV[1]
  redis.call('HSET', KEYS[2], name, cjson.encode(plan))
  return {name, plan.first, plan.last, plan.count}
end
local cursor
local plans = redis.call('HGETALL', KEYS[2])
for i = 1, #plans, 2 do
  if plans[i] == 'cursor' then
    cursor = plans[i + 1]
  else
    local plan = cjson.decode(plans[i + 1])
    if now > plan.till or plan.owner == ARGV[1] then return hold(plans[i], plan) end
  end
end
local function read(count)
  local found = redis.call('XRANGE', KEYS[1], cursor and '(' .. cursor or '-', '+', 'COUNT', count)
  if #found > 0 then cursor = found[#found][1] end
  return found
end
local found = read(1)
if #found == 0 then return {} end
local most, bytes, enough = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local first = found[1][1]
local age = now - string.match(first, '^(%d+)') / 1000
if age < tonumber(ARGV[6]) and redis.call('XLEN', KEYS[1]) < enough then return {} end
local count, size = 0, 0
while #found > 0 and count < most and size < bytes do
  count = count + #found
  for _, entry in ipairs(found) do
    for _, part in ipairs(entry[2]) do size = size + #part end
  end
  if count < most and size < bytes then found = read(math.min(100, most - count)) end
end
if age < tonumber(ARGV[6]) and count < enough and size < bytes then return {} end
redis.call('HSET', KEYS[2], 'cursor', cursor)
return hold('part-' .. first .. '-' .. cursor, {first = first, last = cursor, count = count})
"""

# KEYS: outbox, plans, outboxes. ARGV: name, first, last, run. Answers 1 if the plan was there.
COMMIT = """
if redis.call('HDEL', KEYS[2], ARGV[1]) == 0 then return 0 end
local found = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[3])
for _, entry in ipairs(found) do redis.call('XDEL', KEYS[1], entry[1]) end
if redis.call('XLEN', KEYS[1]) == 0 and redis.call('HLEN', KEYS[2]) <= 1 then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('SREM', KEYS[3], ARGV[4])
end
return 1
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one part holds: outbox entries `first` to `last` of a run, `count` of them."""

    run: str
    name: str
    first: str
    last: str
    count: int


class PartPlans:
    """The plans of one Redis, made in the name of one recorder."""

    def __init__(self, redis: Redis, recorder: str, hold_seconds: float) -> None:
        self._redis: Any = redis  # its stubs leave open whether replies are bytes
        self._recorder, self._hold_seconds = recorder, hold_seconds
        version = str(self._redis.info("server").get("redis_version", "0"))
        prefix = WHEN_FULL if int(version.partition(".")[0]) >= 7 else ""
        self._plan = redis.register_script(prefix + PLAN)
        self._commit = redis.register_script(prefix + COMMIT)

    def runs(self) -> list[str]:
        """The runs that have rows waiting."""
        return sorted(run.decode(errors="replace") for run in self._redis.smembers(keys.OUTBOXES))

    def open(self) -> bool:
        """Whether a part of any run is in the making."""
        plans = (self._redis.hkeys(keys.parts(run)) for run in self.runs())
        return any(set(names) - {b"cursor"} for names in plans)

    def next(self, run: str, *, most: tuple[int, int], due: tuple[int, float]) -> Plan | None:
        """A part to make, if there is one. `most`: rows and bytes in it; `due`: rows, or the age of
        its oldest row in seconds, from which it is made."""
        found = self._plan(
            keys=[keys.outbox(run), keys.parts(run)],
            args=[self._recorder, self._hold_seconds, *most, *due],
        )
        if not found:
            return None
        name, first, last, count = found
        return Plan(run, name.decode(), first.decode(), last.decode(), int(count))

    def rows(self, plan: Plan) -> Sequence[bytes | None]:
        """The rows of a plan, as the outbox has them; None for an entry without one."""
        entries = self._redis.xrange(keys.outbox(plan.run), plan.first, plan.last)
        return [fields.get(outbox.FIELD.encode()) for _, fields in entries]

    def is_open(self, plan: Plan) -> bool:
        """Whether the plan is there still: nobody has committed it."""
        return bool(self._redis.hexists(keys.parts(plan.run), plan.name))

    def commit(self, plan: Plan) -> bool:
        """Drop a plan and its rows, which are in their file now."""
        return bool(
            self._commit(
                keys=[keys.outbox(plan.run), keys.parts(plan.run), keys.OUTBOXES],
                args=[plan.name, plan.first, plan.last, plan.run],
            )
        )

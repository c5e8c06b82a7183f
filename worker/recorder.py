"""Outbox → Parquet: every row in exactly one file, whatever dies when.

A part is planned in Redis before it is written: which outbox entries it holds fixes its name and
its rows. The steps are plan, wait until plan and entries are durable, write, rename, commit (drop
the plan and the entries). A plan that its recorder left behind is made again by whoever finds it,
into the same file; a recorder that was frozen can only ever write that same file.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from jobs import keys, outbox
from jobs.results import (
    RUN_FILE,
    SAMPLES,
    TEMPORARY,
    rows_of,
    table_of,
    write_part,
    write_run_card,
)
from jobs.types import JobError

logger = logging.getLogger(__name__)

PART_ROWS = 5_000  # entries that a part holds at most
PART_SECONDS = 2.0  # age of its oldest entry at which a smaller part is written
PLAN_SECONDS = 30.0  # how long a plan belongs to the recorder that took it
LOOK_SECONDS = 0.2  # how often the outboxes are looked at
FSYNC_SECONDS = 2.5  # appendfsync everysec has synced what is older
RETRY_SECONDS = 5.0  # pause after a failed write

# KEYS: outbox, plans. ARGV: recorder, now (seconds), seconds that a plan is held, entries at most,
# entries or age (seconds) from which a part is made. Answers name, first, last, count of a plan
# that was left behind, else of a new one, else nothing.
PLAN = """
local now = tonumber(ARGV[2])
local plans = redis.call('HGETALL', KEYS[2])
for i = 1, #plans, 2 do
  if plans[i] ~= 'cursor' then
    local plan = cjson.decode(plans[i + 1])
    if now > plan.till or plan.owner == ARGV[1] then
      plan.till = now + tonumber(ARGV[3])
      plan.owner = ARGV[1]
      redis.call('HSET', KEYS[2], plans[i], cjson.encode(plan))
      return {plans[i], plan.first, plan.last, plan.count}
    end
  end
end
local cursor = redis.call('HGET', KEYS[2], 'cursor')
local from = cursor and '(' .. cursor or '-'
local found = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', ARGV[4])
if #found == 0 then return {} end
local first, last = found[1][1], found[#found][1]
local age = now - tonumber(string.match(first, '^(%d+)')) / 1000
if #found < tonumber(ARGV[5]) and age < tonumber(ARGV[6]) then return {} end
local name = 'part-' .. first .. '-' .. last
local plan = {first = first, last = last, count = #found, till = now + tonumber(ARGV[3]),
  owner = ARGV[1]}
redis.call('HSET', KEYS[2], name, cjson.encode(plan), 'cursor', last)
return {name, first, last, #found}
"""

# KEYS: outbox, plans, outboxes. ARGV: name, first, last, run.
COMMIT = """
if redis.call('HDEL', KEYS[2], ARGV[1]) == 0 then return 0 end
local found = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[3])
for _, entry in ipairs(found) do redis.call('XDEL', KEYS[1], entry[1]) end
if redis.call('XLEN', KEYS[1]) == 0 and redis.call('HLEN', KEYS[2]) <= 1 then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('SREM', KEYS[3], ARGV[4])
end
return #found
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one part holds: outbox entries `first` to `last` of a run, `count` of them."""

    run: str
    name: str
    first: str
    last: str
    count: int


def check_folder(root: Path) -> None:
    """Raise JobError unless results can be written there."""
    probe = root / f".probe-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise JobError(
            "internal",
            f"the results folder {root} can't be written ({error.strerror}): choose another one "
            "with --results, or give this user the right to write there",
        ) from None


class Recorder:
    """Writes the parts of all runs, in a thread of its own. Several recorders share the work."""

    def __init__(
        self,
        client: redis.Redis,
        root: Path,
        *,
        name: str,
        idle: Callable[[], bool],
        part_seconds: float = PART_SECONDS,
        plan_seconds: float = PLAN_SECONDS,
    ) -> None:
        self._redis: Any = client  # its stubs leave open whether replies are bytes
        self._root, self._name = root, name
        self._idle = idle  # nothing runs here: no reason to wait for company
        self._part_seconds, self._plan_seconds = part_seconds, plan_seconds
        self._plan = client.register_script(PLAN)
        self._commit = client.register_script(COMMIT)
        self._stop = threading.Event()
        self._finishing = threading.Event()
        self._empty = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._loop, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout: float) -> None:
        """Write what is in the outboxes now, however little, and stop."""
        self._finishing.set()
        self._empty.wait(timeout)
        self._stop.set()
        self._thread.join(timeout)

    def backlog(self) -> int:
        """Entries that wait in all outboxes. Raises redis.RedisError."""
        runs = self._redis.smembers(keys.OUTBOXES)
        pipeline = self._redis.pipeline(transaction=False)
        for run in runs:
            pipeline.xlen(keys.outbox(run.decode()))
        sizes: list[int] = pipeline.execute() if runs else []
        return sum(sizes)

    def _loop(self) -> None:
        while not self._stop.is_set():
            finishing = self._finishing.is_set()
            try:
                wrote = self._round()
            except (OSError, redis.RedisError) as error:
                if not self._failed:
                    logger.error("rows stay in Redis, they can't be written now: %s", error)
                self._failed = True
                self._stop.wait(RETRY_SECONDS if not finishing else LOOK_SECONDS)
                continue
            if self._failed:
                logger.info("rows are written again")
            self._failed = False
            if finishing and not wrote:
                self._empty.set()
            self._stop.wait(LOOK_SECONDS)

    def _round(self) -> bool:
        """Write the parts that are due. True if any was."""
        wrote = False
        for run in self._redis.smembers(keys.OUTBOXES):
            while (plan := self._next(run.decode())) is not None:
                self._make(plan)
                wrote = True
        return wrote

    def _next(self, run: str) -> Plan | None:
        hurry = self._finishing.is_set() or self._idle()
        enough = (1, 0.0) if hurry else (PART_ROWS, self._part_seconds)
        found = self._plan(
            keys=[keys.outbox(run), keys.parts(run)],
            args=[self._name, time.time(), self._plan_seconds, PART_ROWS, *enough],
        )
        if not found:
            return None
        name, first, last, count = found
        return Plan(run, name.decode(), first.decode(), last.decode(), int(count))

    def _make(self, plan: Plan) -> None:
        entries = self._redis.xrange(keys.outbox(plan.run), plan.first, plan.last)
        # Fewer entries and no plan: another recorder has finished it while this one was frozen.
        if len(entries) == plan.count or self._redis.hexists(keys.parts(plan.run), plan.name):
            self._wait_until_durable()
            folder = self._root / plan.run
            rows = [row for _, fields in entries for row in _rows(fields)]
            temporary = folder / TEMPORARY / f"{plan.name}.{self._name}.parquet"
            write_part(temporary, folder / SAMPLES / f"{plan.name}.parquet", table_of(rows))
            self._describe(folder, rows)
        self._commit(
            keys=[keys.outbox(plan.run), keys.parts(plan.run), keys.OUTBOXES],
            args=[plan.name, plan.first, plan.last, plan.run],
        )

    def _wait_until_durable(self) -> None:
        """A row that is in a file must not come back: Redis must not forget that its job ended."""
        if not self._redis.info("persistence").get("aof_enabled"):
            return
        try:
            self._redis.execute_command("WAITAOF", 1, 0, int(FSYNC_SECONDS * 1000))
        except redis.ResponseError:  # older than Redis 7.2
            time.sleep(FSYNC_SECONDS)

    def _describe(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        """run.json and the data-set card, once."""
        if rows and not (folder / RUN_FILE).exists():
            about = ("run_id", "schema_version", "engine", "engine_version", "torch_version")
            write_run_card(folder, {name: rows[0].get(name) for name in about})


def _rows(fields: dict[bytes, bytes]) -> list[dict[str, Any]]:
    """The rows of one outbox entry."""
    return rows_of(outbox.decode(fields[outbox.FIELD.encode()]))

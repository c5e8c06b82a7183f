"""Outbox → Parquet: every row in exactly one file, whatever dies when.

A part is planned in Redis before it is written: which outbox entries it holds fixes its name and
its rows. The steps are plan, wait until plan and entries are durable, write, rename, commit (drop
the plan and the entries). A plan that its recorder left behind is made again by whoever finds it,
into the same file; a recorder that was frozen can only ever write that same file. All recorders of
a Redis write into the same results folder.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs.errors import JobError
from jobs.keys import RUN_ID
from jobs.results import outbox
from jobs.results.files import RUN_FILE, SAMPLES, TEMPORARY, table_of, write_part, write_run_card
from jobs.results.rows import Row, rows_of
from worker.record.part_plans import PartPlans, Plan

logger = logging.getLogger(__name__)

PART_ROWS = 5_000  # entries that a part holds at most
PART_BYTES = 64 * 2**20  # or bytes of their JSON
PART_SECONDS = 2.0  # age of its oldest entry at which a smaller part is written
PLAN_SECONDS = 30.0  # how long a plan belongs to the recorder that took it
LOOK_SECONDS = 0.1  # how often the outboxes are looked at
FSYNC_SECONDS = 2.5  # appendfsync everysec has synced what is older
RETRY_SECONDS = 5.0  # pause after a failed write

CARD = ("run_id", "schema_version", "engine", "engine_version", "torch_version")


class NotDurable(Exception):
    """Redis has not put on its own disk yet what a part is made of."""


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
    """Writes the parts of all runs, in a thread of its own. Several recorders share the work.

    `idle` says whether nothing runs here, so that there is no reason to wait for company.
    Raises redis.RedisError if Redis can't be reached.
    """

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
        # One connection that is never replaced in secret: WAITAOF waits for what was written on it.
        client.set_retry(Retry(NoBackoff(), 0))
        self._redis: Any = client.client()  # type: ignore[no-untyped-call]
        self._root, self._name = root, name
        self._idle, self._part_seconds = idle, part_seconds
        self._parts = PartPlans(self._redis, name, plan_seconds)
        self._stop = threading.Event()
        self._finishing = threading.Event()
        self._wake = threading.Event()
        self._empty = threading.Event()
        self._trouble = ""
        self._with_others = False
        self._thread = threading.Thread(target=self._loop, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self) -> None:
        """Look at the outboxes now: something has changed."""
        self._wake.set()

    def finish(
        self, seconds: float, *, hurried: Callable[[], bool], with_others: bool = False
    ) -> bool:
        """Write what is in the outboxes, however little, and stop. True if all was written.

        `with_others` waits for the parts that other recorders are making, or have died with. Gives
        up after `seconds`, or when `hurried`: the rows are safe in Redis.
        """
        self._with_others = with_others
        self._finishing.set()
        self._wake.set()
        looks = int(seconds / LOOK_SECONDS)
        while looks > 0 and not hurried() and not self._empty.wait(LOOK_SECONDS):
            looks -= 1
        self._stop.set()  # a part in the making is finished, or made again by another recorder
        self._wake.set()
        if self._empty.is_set():
            self._thread.join()
            self._redis.close()
        return self._empty.is_set()

    def _loop(self) -> None:
        while not self._empty.is_set() and not self._stop.is_set():
            finishing = self._finishing.is_set()
            pause = LOOK_SECONDS
            try:
                wrote = self._round()
            except NotDurable:
                pass
            except (OSError, redis.RedisError) as error:
                self._report(f"rows stay in Redis, they can't be written now: {error}")
                pause = RETRY_SECONDS
            except Exception:  # a defect; but without this thread no row would be written again
                logger.exception("rows stay in Redis, writing them failed")
                pause = RETRY_SECONDS
            else:
                if self._trouble:
                    logger.info("rows are written again")
                    self._trouble = ""
                if finishing and wrote:
                    continue
                if finishing and not (self._with_others and self._parts.open()):
                    self._empty.set()
            self._wake.wait(pause)
            self._wake.clear()

    def _report(self, trouble: str) -> None:
        if trouble != self._trouble:
            logger.error("%s", trouble)
        self._trouble = trouble

    def _round(self) -> bool:
        """Write the parts that are due. True if any was."""
        wrote = False
        for run in self._parts.runs():
            if RUN_ID.fullmatch(run) is None:
                continue  # not ours: a run is the name of a folder
            while not self._stop.is_set() and (plan := self._next(run)) is not None:
                self._make(plan)
                wrote = True
        return wrote

    def _next(self, run: str) -> Plan | None:
        hurry = self._finishing.is_set() or self._idle()
        due = (1, 0.0) if hurry else (PART_ROWS, self._part_seconds)
        return self._parts.next(run, most=(PART_ROWS, PART_BYTES), due=due)

    def _make(self, plan: Plan) -> None:
        values = self._parts.rows(plan)
        # Fewer entries and no plan: another recorder has finished it while this one was frozen.
        if len(values) == plan.count or self._parts.is_open(plan):
            self._wait_until_durable()
            self._write(plan, [row for value in values for row in _rows(value, plan)])
        self._commit(plan)

    def _wait_until_durable(self) -> None:
        """A row that is in a file must not come back: Redis must not forget that its job ended."""
        if not self._redis.info("persistence").get("aof_enabled"):
            return
        try:
            synced, _ = self._redis.execute_command("WAITAOF", 1, 0, int(FSYNC_SECONDS * 1000))
        except redis.ResponseError:  # older than Redis 7.2
            if self._stop.wait(FSYNC_SECONDS):
                raise NotDurable from None
            return
        if not synced and self._syncs():
            raise NotDurable

    def _syncs(self) -> bool:
        """Whether Redis syncs its append-only file at all; who turned that off accepts the risk."""
        try:
            policy = self._redis.config_get("appendfsync").get("appendfsync")
        except redis.ResponseError:  # servers for hire may not tell
            return True
        return bool(policy != "no")

    def _write(self, plan: Plan, rows: list[Row]) -> None:
        folder = self._root / plan.run
        temporary = folder / TEMPORARY / f"{plan.name}.{self._name}.parquet"
        try:
            write_part(temporary, folder / SAMPLES / f"{plan.name}.parquet", _table(rows, plan))
        except OSError:
            temporary.unlink(missing_ok=True)  # half a file on a full disk
            raise
        for left in temporary.parent.glob(f"{plan.name}.*.parquet"):
            left.unlink(missing_ok=True)  # by recorders that died with this plan
        if rows and not (folder / RUN_FILE).exists():
            row = next((row for row in rows if row.get("engine")), rows[0])
            write_run_card(folder, {name: row.get(name) for name in CARD})

    def _commit(self, plan: Plan) -> None:
        self._parts.commit(plan)


def _rows(value: bytes | None, plan: Plan) -> list[Row]:
    """The rows of one outbox entry; none, and a line in the log, if it isn't one."""
    try:
        return rows_of(outbox.decode(value or b""))
    except Exception as error:
        logger.error("an entry of %s in run %s is no row: %s", plan.name, plan.run, error)
        return []


def _table(rows: list[Row], plan: Plan) -> pa.Table:
    """All rows as a table; one that doesn't fit is left out with a line in the log."""
    try:
        return table_of(rows)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return table_of([row for row in rows if _fits(row, plan)])


def _fits(row: Row, plan: Plan) -> bool:
    try:
        table_of([row])
    except Exception as error:
        job = row.get("job_id")
        logger.error("the row of job %s in run %s can't be written: %s", job, plan.run, error)
        return False
    return True

"""Outbox → Parquet: every row in exactly one file, whichever process dies at whichever step.

A part is planned in Redis before it is written: the plan fixes its outbox entries, and they fix its
name and its rows. The steps are: plan, wait until plan and entries are durable, write, rename,
commit (delete the plan and the entries). A plan whose recorder has died is taken over by another
one, which writes the same file; a recorder that was suspended meanwhile can only write that same
file. All recorders of one Redis share a results folder.
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

PART_ROWS = 5_000  # entries of a part, at most
PART_BYTES = 64 * 2**20  # bytes of their JSON, at most
PART_SECONDS = 2.0  # age of the oldest entry at which a smaller part is written
PLAN_SECONDS = 30.0  # how long a plan belongs to its recorder
POLL_SECONDS = 0.1  # pause between polls of the outboxes
IDLE_SECONDS = 2.0  # the same if no run had an outbox at the last poll
FSYNC_SECONDS = 2.5  # with appendfsync everysec, older writes are on disk
RETRY_SECONDS = 5.0  # pause after a failed write

RUN_CARD_FIELDS = ("run_id", "schema_version", "engine", "engine_version", "torch_version")


class NotDurable(Exception):
    """Redis has not yet written the entries of a part to its own disk."""


def check_folder(root: Path) -> None:
    """Raise JobError unless files can be written to the results folder."""
    probe = root / f".probe-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise JobError(
            "internal",
            f"the results folder {root} can't be written ({error.strerror}): choose another one "
            "with --results, or give this user write permission",
        ) from None


class Recorder:
    """Writes the parts of all runs, on its own thread. Several recorders share the work.

    `idle`: whether this worker runs no job; waiting would then not make the part larger.
    Raises redis.RedisError if Redis cannot be reached.
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
        # One connection without reconnects: WAITAOF waits for the writes of its own connection.
        client.set_retry(Retry(NoBackoff(), 0))
        self._redis: Any = client.client()  # type: ignore[no-untyped-call]
        self._root, self._name = root, name
        self._idle, self._part_seconds = idle, part_seconds
        self._plans = PartPlans(self._redis, name, plan_seconds)
        self._stop = threading.Event()
        self._finishing = threading.Event()
        self._woken = threading.Event()
        self._empty = threading.Event()
        self._last_error = ""
        self._with_others = False
        self._any_runs = False  # had rows at the last poll
        self._thread = threading.Thread(target=self._loop, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Poll the outboxes now."""
        self._woken.set()

    def finish(
        self, seconds: float, *, aborted: Callable[[], bool], with_others: bool = False
    ) -> bool:
        """Write all rows, without waiting for larger parts, and stop. True if all were written.

        `with_others`: also wait for the parts of other recorders, dead ones included. Gives up
        after `seconds`, or when `aborted` returns True; the remaining rows stay in Redis.
        """
        self._with_others = with_others
        self._finishing.set()
        self._woken.set()
        polls = int(seconds / POLL_SECONDS)
        while polls > 0 and not aborted() and not self._empty.wait(POLL_SECONDS):
            polls -= 1
        self._stop.set()  # a part in progress is completed here, or by another recorder
        self._woken.set()
        if self._empty.is_set():
            self._thread.join()
            self._redis.close()
        return self._empty.is_set()

    def _loop(self) -> None:
        while not self._empty.is_set() and not self._stop.is_set():
            finishing = self._finishing.is_set()
            try:
                wrote = self._write_due_parts()
                pause = POLL_SECONDS if self._any_runs or finishing else IDLE_SECONDS
            except NotDurable:
                pause = POLL_SECONDS
            except (OSError, redis.RedisError) as error:
                self._log_once(f"rows can't be written and stay in Redis: {error}")
                pause = RETRY_SECONDS
            except Exception:  # a bug; without this thread no row would ever be written
                logger.exception("writing rows failed; they stay in Redis")
                pause = RETRY_SECONDS
            else:
                if self._last_error:
                    logger.info("rows are written again")
                    self._last_error = ""
                if finishing and wrote:
                    continue
                if finishing and not (self._with_others and self._plans.any_open()):
                    self._empty.set()
            self._woken.wait(pause)
            self._woken.clear()

    def _log_once(self, error: str) -> None:
        if error != self._last_error:
            logger.error("%s", error)
        self._last_error = error

    def _write_due_parts(self) -> bool:
        """Write all parts that are due. True if there was one."""
        wrote = False
        runs = self._plans.runs()
        self._any_runs = bool(runs)
        for run in runs:
            if RUN_ID.fullmatch(run) is None:
                continue  # not from chatjobs: a run id must be usable as a folder name
            while not self._stop.is_set() and (plan := self._plan_next(run)) is not None:
                self._execute(plan)
                wrote = True
        return wrote

    def _plan_next(self, run: str) -> Plan | None:
        at_once = self._finishing.is_set() or self._idle()
        return self._plans.next(
            run,
            max_rows=PART_ROWS,
            max_bytes=PART_BYTES,
            due_rows=1 if at_once else PART_ROWS,
            due_seconds=0.0 if at_once else self._part_seconds,
        )

    def _execute(self, plan: Plan) -> None:
        values = self._plans.rows(plan)
        # Fewer entries and no plan: another recorder has written it while this one was suspended.
        if len(values) == plan.count or self._plans.is_open(plan):
            self._wait_until_durable()
            self._write(plan, [row for value in values for row in _rows(value, plan)])
        self._commit(plan)

    def _wait_until_durable(self) -> None:
        """Wait until a crash of Redis cannot undo the settlements of these rows: their jobs would
        run again, and their rows would be written twice."""
        if not self._redis.info("persistence").get("aof_enabled"):
            return
        try:
            synced, _ = self._redis.execute_command("WAITAOF", 1, 0, int(FSYNC_SECONDS * 1000))
        except redis.ResponseError:  # older than Redis 7.2
            if self._stop.wait(FSYNC_SECONDS):
                raise NotDurable from None
            return
        if not synced and self._fsync_enabled():
            raise NotDurable

    def _fsync_enabled(self) -> bool:
        """Whether Redis calls fsync at all; with `appendfsync no` the operator accepts the risk."""
        try:
            policy = self._redis.config_get("appendfsync").get("appendfsync")
        except redis.ResponseError:  # hosted servers may disable CONFIG
            return True
        return bool(policy != "no")

    def _write(self, plan: Plan, rows: list[Row]) -> None:
        folder = self._root / plan.run
        temporary = folder / TEMPORARY / f"{plan.name}.{self._name}.parquet"
        try:
            write_part(temporary, folder / SAMPLES / f"{plan.name}.parquet", _table(rows, plan))
        except OSError:
            temporary.unlink(missing_ok=True)  # incomplete: the disk is full
            raise
        for leftover in temporary.parent.glob(f"{plan.name}.*.parquet"):
            leftover.unlink(missing_ok=True)  # of recorders that died while they wrote this part
        if rows and not (folder / RUN_FILE).exists():
            row = next((row for row in rows if row.get("engine")), rows[0])
            write_run_card(folder, {name: row.get(name) for name in RUN_CARD_FIELDS})

    def _commit(self, plan: Plan) -> None:
        self._plans.commit(plan)


def _rows(value: bytes | None, plan: Plan) -> list[Row]:
    """The rows of one outbox entry; none if it cannot be decoded, which is logged."""
    try:
        return rows_of(outbox.decode(value or b""))
    except Exception as error:
        logger.error("invalid outbox entry in %s of run %s: %s", plan.name, plan.run, error)
        return []


def _table(rows: list[Row], plan: Plan) -> pa.Table:
    """All rows as a table; a row that does not fit the schema is left out and logged."""
    try:
        return table_of(rows)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return table_of([row for row in rows if _fits(row, plan)])


def _fits(row: Row, plan: Plan) -> bool:
    try:
        table_of([row])
    except Exception as error:
        job = row.get("job_id")
        logger.error("the row of job %s in run %s doesn't fit: %s", job, plan.run, error)
        return False
    return True

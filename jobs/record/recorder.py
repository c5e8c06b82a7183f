"""Outbox → Parquet: every row in exactly one file, whichever process dies at whichever step.

A part is planned in Redis before it is written: the plan fixes its outbox entries, and they fix its
name and its rows. The steps are: plan, wait until plan and entries are durable, write, link,
commit (delete the plan and the entries). The parts of several runs wait together. A plan whose
recorder has died is taken over by another one, which writes the same file; a recorder that was
suspended meanwhile can only write that same file, if it is not there. All recorders of one Redis
share a results folder.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import pyarrow as pa
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs.disk_faults import explain, fails_all
from jobs.embedded import HASH_BYTES
from jobs.keys import RUN_ID
from jobs.operations import rows_of
from jobs.record.folder import ResultsFolder
from jobs.record.row_spans import rows_written
from jobs.results import outbox
from jobs.results.files import SAMPLES, table_of, write_part
from jobs.results.rows import Row
from jobs.results.run_json import RUN_JSON, VERSIONS, RunJson
from jobs.results.unfinished import TEMPORARY
from jobs.store.backlog import read_unwritten
from jobs.store.damage import Damaged, causes
from jobs.store.durable import NotDurable, read_persistence, wait_until_durable
from jobs.store.part_plans import Look, PartPlans, Plan, RecorderLock
from jobs.store.worker_status import ResultsStatus
from jobs.tracing import Tracing

logger = logging.getLogger(__name__)

PART_ROWS = 5_000  # entries of a part, at most
PART_BYTES = 64 * 2**20  # bytes of their JSON, at most
# Age of the oldest entry at which a smaller part is written: while jobs run, and when none does. It
# is written at once for `wait_for_rows`, and when the worker stops.
PART_SECONDS = 30.0
IDLE_PART_SECONDS = 5.0
PLAN_SECONDS = 30.0  # how long a plan belongs to its recorder
OUTBOX_POLL_SECONDS = 0.5  # pause between polls of the outboxes
LOCK_SECONDS = 0.4  # between two polls by any recorder; less than its own pause
QUIET_SECONDS = 2.0  # the same if no run had an outbox at the last poll
SOON_POLL_SECONDS = 0.1  # longest pause while the worker stops, or has just become idle
SOON_SECONDS = 1.0  # how long a worker has just become idle: whoever waits for rows asks for them
FIRST_POLL_SECONDS = 0.0125  # first pause then, since most ask at once; it doubles with each poll
ROUND_PARTS = 100  # parts, one per run, that wait together until they are durable
DURABLE_SECONDS = 20.0  # how long they wait before that is reported
WRITE_RETRY_SECONDS = 5.0  # pause after a failed write
FINISH_PAUSE_SECONDS = 1.0  # the same while the worker stops
GIVE_UP_SECONDS = 0.5  # how long the thread may take to give up
REPEAT_LOG_SECONDS = 60.0  # between two log lines about the same fault
SLOW_FILE_SECONDS = 60.0  # a disk that takes longer for one file is reported


class Recorder:
    """Writes the parts of all runs, on its own thread. Several recorders share the work.

    `idle`: whether this worker runs no job, so that waiting hardly makes the part larger.
    Raises redis.RedisError if Redis cannot be reached.
    """

    def __init__(
        self,
        client: redis.Redis,
        folder: ResultsFolder,
        *,
        name: str,
        idle: Callable[[], bool],
        part_seconds: float = PART_SECONDS,
        plan_seconds: float = PLAN_SECONDS,
        tracing: Tracing | None = None,
    ) -> None:
        # Without retries: what was read before a crash of Redis must not be written after it.
        client.set_retry(Retry(NoBackoff(), 0))
        self._redis = client
        self._folder, self._name = folder, name
        self._idle, self._part_seconds = idle, part_seconds
        self._tracing = tracing
        self._plans = PartPlans(self._redis, name, plan_seconds)
        self._stop = threading.Event()
        self._finishing = threading.Event()
        self._woken = threading.Event()
        self._empty = threading.Event()
        self._fault = ""  # why rows can't be written now
        self._last_fault = ""  # the same, found since it finishes: one from before may have passed
        self._log_at = 0.0  # monotonic: when it is logged again
        self._file_since: float | None = None  # monotonic: begin of the file in progress
        self._with_others = False
        self._last_entries: dict[str, str] | None = None  # by run, when it began to finish
        self._any_runs = False  # had rows at the last poll
        self._soon_until = 0.0  # monotonic
        self._soon_pause = SOON_POLL_SECONDS
        self._thread = threading.Thread(target=self._loop, name="recorder", daemon=True)

    @property
    def state(self) -> ResultsStatus:
        """The results folder, and why rows can't be written to it now ("" if they can)."""
        since, root = self._file_since, self._folder.root
        fault = self._fault
        if since is not None and (seconds := time.monotonic() - since) > SLOW_FILE_SECONDS:
            fault = f"{root}: the disk has not answered for {seconds:.0f} s: see if it hangs"
        return {"path": str(root), "error": fault}

    def start(self) -> None:
        server = read_persistence(self._redis)
        if not server.append_only:
            logger.log(
                logging.WARNING if server.shared else logging.INFO,
                "Redis keeps no append-only file (appendonly no): if it crashes, the jobs and the "
                "rows that it holds are lost",
            )
        packed = _packed_bytes(self._redis)
        if packed is not None and packed < HASH_BYTES:
            logger.info(
                "Redis packs hashes whose values have at most %d bytes (hash-max-listpack-value): "
                "with %d, a job would take about half the memory",
                packed,
                HASH_BYTES,
            )
        self._thread.start()

    def wake(self) -> None:
        """This worker became idle: poll the outboxes now, and often for a while."""
        now = time.monotonic()
        if now >= self._soon_until:  # else it has been idle a moment before, as between short jobs
            self._soon_pause = FIRST_POLL_SECONDS
        self._soon_until = now + SOON_SECONDS
        self._woken.set()

    def finish(self, over: Callable[[str], bool], *, with_others: bool = False) -> bool:
        """Write the rows that are in Redis now, without waiting for larger parts, and stop. True if
        they are written, or are in the parts of other recorders.

        `with_others`: also wait for the parts of other recorders, dead ones included. Gives up when
        `over` returns True, which is called often, with why the last rows can't be written; rows
        that are left stay in Redis.
        """
        self._with_others = with_others
        self._finishing.set()
        self._woken.set()
        while not over(self._last_fault) and not self._empty.wait(SOON_POLL_SECONDS):
            pass
        self._stop.set()  # a part in progress is completed here, or by another recorder
        self._woken.set()
        self._thread.join(GIVE_UP_SECONDS)
        if not self._thread.is_alive():
            self._redis.close()
        return self._empty.is_set()

    def _loop(self) -> None:
        while not self._empty.is_set() and not self._stop.is_set():
            finishing = self._finishing.is_set()
            soon = self._soon()
            pause = self._soon_pause if soon else OUTBOX_POLL_SECONDS
            self._soon_pause = min(2 * self._soon_pause, SOON_POLL_SECONDS)
            try:
                wrote = self._may_look() and self._write_due_parts()
                if not (self._any_runs or soon):
                    pause = QUIET_SECONDS
                if self._fault and (wrote or not self._any_runs):
                    self._folder.probe()
                    logger.info("rows are written again")
                    self._fault = ""
                # A round that is stopped plans nothing, whatever is left.
                done = finishing and not wrote and not self._stop.is_set()
                if done and not (self._with_others and self._plans.any_open()):
                    self._empty.set()
            except (NotDurable, redis.RedisError) as error:
                if self._stop.is_set():
                    return
                self._report(self._explain(error))
                pause = pause if isinstance(error, NotDurable) else WRITE_RETRY_SECONDS
            except OSError as error:
                self._report(explain(error, self._folder.root))
                pause = WRITE_RETRY_SECONDS
            except Exception as error:  # a bug; without this thread no row would ever be written
                self._report(f"{type(error).__name__}: {error}", error)
                pause = WRITE_RETRY_SECONDS
            else:
                if finishing and wrote:
                    continue
            if finishing:
                self._last_fault = self._fault
            self._woken.wait(min(pause, FINISH_PAUSE_SECONDS) if finishing else pause)
            self._woken.clear()

    def _report(self, fault: str, bug: Exception | None = None) -> None:
        """Say why rows can't be written: once, and again every REPEAT_LOG_SECONDS."""
        now = time.monotonic()
        if fault == self._fault and now < self._log_at:
            return
        self._fault, self._log_at = fault, now + REPEAT_LOG_SECONDS
        waiting = ""
        with suppress(redis.RedisError):
            found = read_unwritten(self._redis)
            waiting = f" (they are {found.count}, the first one for {found.oldest:.0f} s)"
        logger.error(
            "rows can't be written and stay in Redis%s: %s; the next try is in %g s",
            waiting,
            fault,
            WRITE_RETRY_SECONDS,
            exc_info=bug,
        )

    def _explain(self, error: NotDurable | redis.RedisError) -> str:
        """An error of Redis, or the key of another type that is its cause."""
        with suppress(redis.RedisError):
            if isinstance(error, Damaged) and (found := causes(self._redis, error, ())):
                return str(found[0])
        return f"Redis: {error}"

    def _soon(self) -> bool:
        return self._finishing.is_set() or time.monotonic() < self._soon_until

    def _may_look(self) -> bool:
        """True if it is time to read the outboxes: always while this worker stops or has just
        become idle."""
        if self._soon():
            return True
        lock = self._plans.acquire_lock(LOCK_SECONDS)
        self._any_runs = lock is not RecorderLock.NO_OUTBOX
        return lock is RecorderLock.ACQUIRED

    def _write_due_parts(self) -> bool:
        """Write one part of each run that has one due. True if there was one."""
        if self._finishing.is_set() and self._last_entries is None:
            self._last_entries = self._plans.last_entries()
        runs = [run for run in self._plans.runs() if RUN_ID.fullmatch(run)]  # folder names
        if self._last_entries is not None:  # other workers end jobs meanwhile
            runs = [run for run in runs if run in self._last_entries]
        self._any_runs = bool(runs)
        if runs:
            self._check_folder()  # before a plan, so that another recorder makes it
        wanted = self._plans.wanted() if runs else set()
        plans: list[Plan] = []
        while runs and not self._stop.is_set() and len(plans) < ROUND_PARTS:
            size = ROUND_PARTS - len(plans)
            plans += self._plan(runs[:size], wanted)
            runs = runs[size:]
        if not plans:
            return False
        failed: Exception | None = None
        try:
            self._wait_until_durable()
            for plan in plans:
                if self._stop.is_set():
                    raise NotDurable("the worker stops")
                try:
                    self._execute(plan)
                except Damaged as error:
                    failed = failed or error
                except (NotDurable, redis.RedisError):
                    raise
                except OSError as error:
                    if fails_all(error):
                        raise
                    failed = failed or error  # such as a folder of another user: other runs go on
                except Exception as error:  # of this part alone
                    failed = failed or error
            if failed is not None:
                raise failed
        except Exception:  # another recorder may have a working disk; what is committed is no plan
            for plan in plans:
                self._plans.release(plan)
            raise
        return True

    def _plan(self, runs: Sequence[str], wanted: Collection[str] = ()) -> list[Plan]:
        """Plan the next part of each of these runs that has one due. `wanted`: those whose rows
        somebody waits for."""
        age = min(IDLE_PART_SECONDS, self._part_seconds) if self._idle() else self._part_seconds
        last = self._last_entries
        looks = [
            Look(run, 1, 0.0, last[run])
            if last is not None
            else Look(run, 1, 0.0)
            if run in wanted
            else Look(run, PART_ROWS, age)
            for run in runs
        ]
        return self._plans.next(looks, max_rows=PART_ROWS, max_bytes=PART_BYTES)

    def _wait_until_durable(self) -> None:
        """Wait until a crash of Redis cannot undo the plans, nor the settlements of their rows: the
        jobs would run again, and their rows would be written twice."""
        wait_until_durable(self._redis, DURABLE_SECONDS, stopped=self._stop.is_set)

    def _execute(self, plan: Plan) -> None:
        """Write the file of a plan that is durable."""
        values = self._plans.rows(plan)
        rows: list[Row] = []
        # Without the plan, the values may not be all: another recorder has written the file while
        # this one was suspended, or Redis has lost the plan in a crash.
        if self._plans.is_open(plan):
            rows = [row for value in values for row in _rows(value, plan)]
            self._check_folder()
            self._file_since = time.monotonic()
            try:
                self._write(plan, rows)
            finally:
                self._file_since = None
            self._check_folder()  # else the file may be below a mount point, and is no part of it
        self._commit(plan)
        if self._tracing is not None:
            rows_written(self._tracing, rows)

    def _check_folder(self) -> None:
        self._file_since = time.monotonic()
        try:
            self._folder.check()
        finally:
            self._file_since = None

    def _write(self, plan: Plan, rows: list[Row]) -> None:
        folder = self._folder.root / plan.run
        temporary = folder / TEMPORARY / f"{plan.name}.{self._name}.parquet"
        try:
            write_part(temporary, folder / SAMPLES / f"{plan.name}.parquet", _table(rows, plan))
        except OSError:
            temporary.unlink(missing_ok=True)  # incomplete: the disk is full
            raise
        for leftover in temporary.parent.glob(f"{plan.name}.*.parquet"):
            leftover.unlink(missing_ok=True)  # of recorders that died while they wrote this part
        if rows and not (folder / RUN_JSON).exists():
            row = next((row for row in rows if row.get("engine")), rows[0])
            RunJson({name: row.get(name) for name in ("run_id", *VERSIONS)}).write(folder)

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
        about = {"job": job, "run": plan.run}
        text = "the row of job %s in run %s doesn't fit: %s"
        logger.error(text, job, plan.run, error, extra=about)
        return False
    return True


def _packed_bytes(client: redis.Redis) -> int | None:
    """Up to which size Redis packs the values of a hash; None if this user may not read it."""
    name = "hash-max-listpack-value"
    try:
        settings: dict[str, str] = client.config_get(name)  # type: ignore[assignment]
    except redis.ResponseError:
        return None
    value = settings.get(name, "")
    return int(value) if value.isdigit() else None

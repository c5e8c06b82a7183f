"""The runs of the results folder and how far they are, for the page. Reads each part file once."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from redis import Redis

from jobs.errors import JobError
from jobs.results.files import Results
from jobs.results.newest import newest_runs
from jobs.results.run_json import RunJson
from jobs.store.producer_lease import are_held
from jobs.store.results_folder import read_id, read_record

SHOWN = 100  # runs that are looked at, those that were written last
READ_SECONDS = 0.5  # for new files in one look; the others have their turn in the next one


@dataclass(frozen=True, slots=True)
class RunProgress:
    """A run at one moment. `state`: running, interrupted or done; "" for a run of jobs that no
    `chatjobs run` has made. `rows`: samples in Parquet, of which `failed` have no answer; None
    until all files are read. `expected`: samples of the whole run; None if that is not known.
    `unwritten`: jobs that have ended, and whose rows are not in Parquet."""

    run: str
    state: str
    rows: int | None
    failed: int
    expected: int | None
    unwritten: int


class _Counts(NamedTuple):
    rows: int
    failed: int


class RunReader:
    """Reads the runs of one folder, if it is that of the workers."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._counts: dict[Path, _Counts] = {}  # part files never change

    def read(self, redis: Redis, unwritten: Mapping[str, int]) -> list[RunProgress]:
        """The runs, those first that have rows to write, then the one that was written last.
        Raises redis.RedisError."""
        names = newest_runs(self._results)[:SHOWN] if self._is_of(redis) else []
        in_redis = sorted(unwritten)[:SHOWN]
        shown = list(dict.fromkeys([*in_redis, *names]))
        held = are_held(redis, shown)
        deadline = time.monotonic() + READ_SECONDS
        known: dict[Path, _Counts] = {}
        found = []
        for run, is_held in zip(shown, held, strict=True):
            counts = self._count(run, known, deadline) if run in names else _Counts(0, 0)
            about = self._about(run) if run in names else RunJson({})
            state = about.state or ""
            if is_held:
                state = "running"
            elif state == "running":
                state = "interrupted"  # its process is gone
            rows, failed = counts or (None, 0)
            found.append(
                RunProgress(run, state, rows, failed, about.expected, unwritten.get(run, 0))
            )
        self._counts = known
        return found

    def _is_of(self, redis: Redis) -> bool:
        """True unless the workers of this Redis write to another folder."""
        try:
            record = read_record(redis)
            return record is None or record.id == read_id(self._results.root)
        except (JobError, OSError):
            return False

    def _about(self, run: str) -> RunJson:
        try:
            return RunJson.read(self._results.root / run)
        except (JobError, OSError):
            return RunJson({})  # `chatjobs run` names the fault

    def _count(self, run: str, known: dict[Path, _Counts], deadline: float) -> _Counts | None:
        """The samples in the files of a run, which are added to `known`; None if the time is over
        before all are read."""
        rows = failed = 0
        complete = True
        for file in self._files(run):
            counts = self._counts.get(file)
            if counts is None:
                if time.monotonic() >= deadline:
                    complete = False
                    continue
                counts = _count_in(file)
            known[file] = counts
            rows += counts.rows
            failed += counts.failed
        return _Counts(rows, failed) if complete else None

    def _files(self, run: str) -> Collection[Path]:
        try:
            return self._results.files(run)
        except (JobError, OSError):
            return ()  # it was removed meanwhile


def _count_in(file: Path) -> _Counts:
    """The samples in a part file; none in one that can't be read."""
    try:
        table = pq.read_table(file, columns=["choice_index", "status"])
    except (pa.ArrowException, OSError):
        return _Counts(0, 0)
    first = pc.equal(table.column("choice_index"), 0)
    lost = pc.and_(first, pc.not_equal(table.column("status"), "ok"))
    return _Counts(pc.sum(first).as_py() or 0, pc.sum(lost).as_py() or 0)

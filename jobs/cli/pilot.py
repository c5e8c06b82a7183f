"""Runs a few rows of a data set through the queue, to measure how long all of them would take.

The rows belong to a run of their own, `<run>-pilot`, so that none of them counts in the run itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from jobs.api.score_request import ScoreRequest
from jobs.cli.failures import Interrupted
from jobs.cli.waiting import Rows, WaitNotice
from jobs.errors import JobError
from jobs.runs.packs import packs, prompt_of

if TYPE_CHECKING:
    from jobs import Client, Results
    from jobs.data_sets.source import RequestRow
    from jobs.operations import Request

SUFFIX = "-pilot"
MAX_NAME = 100  # characters of the name of a run
COLUMNS = (
    "job_id", "row_index", "choice_index", "operation", "status", "error_type", "error_message",
    "started_at", "finished_at", "input_tokens", "output_tokens", "scored_tokens", "choices",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pilot:
    """The rows of a pilot. seconds: from the first start to the last end. input_tokens: of each row
    that has not failed, with those that were scored."""

    run: str
    rows: int
    failed: int
    seconds: float
    input_tokens: list[int]
    output_tokens: int
    scored_tokens: int
    errors: list[str]

    @property
    def rows_per_second(self) -> float | None:
        """None if all rows have failed."""
        return self.rows / self.seconds if self.seconds and self.rows > self.failed else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "rows": self.rows,
            "failed": self.failed,
            "seconds": self.seconds,
            "rows_per_second": self.rows_per_second,
            "input_tokens": sum(self.input_tokens),
            "output_tokens": self.output_tokens,
            "scored_tokens": self.scored_tokens,
        }


def pilot_run(name: str) -> str:
    """The run of the pilots of a run."""
    return name[: MAX_NAME - len(SUFFIX)] + SUFFIX


def run_pilot(
    connected: Client,
    store: Results,
    name: str,
    rows: Sequence[RequestRow],
    *,
    workers: int,
    quiet: bool,
) -> Pilot:
    """Run rows as interactive jobs, and wait for their rows in Parquet. `workers`: that serve them.
    Ctrl-C cancels the jobs, and raises Interrupted."""
    run = pilot_run(name)
    ready: list[Any] = [_request(one, run) for one in _requests(rows, workers)]  # all of one kind
    ids = [str(one.job.id) for one in ready]
    try:
        jobs = connected.submit_many(ready)
        with WaitNotice(connected.connection, quiet=quiet) as notice:
            for job in jobs:
                notice.watch(job)
                with suppress(JobError):  # its row has the error
                    job.result()
            notice.watch(Rows((run,)))
            connected.wait_for_rows(jobs)
    except KeyboardInterrupt:
        for one in ids:
            connected.job(one).cancel()
        raise Interrupted("interrupted; the jobs of the pilot are cancelled") from None
    return _measured(store, run, ids)


def _requests(rows: Sequence[RequestRow], workers: int) -> Iterator[Request]:
    """The requests of the jobs, packed as the run packs its rows, with a pack for each worker."""
    ordered = sorted(rows, key=prompt_of)
    share = -(-len(ordered) // max(1, workers))
    for start in range(0, len(ordered), share):
        for pack in packs(ordered[start : start + share], lambda _: False):
            yield pack.request


def _request(request: Request, run: str) -> Request:
    """A request that runs now and changes nothing but its own run, with an id by which it can be
    cancelled."""
    options: dict[str, Any] = {"run": run, "id": f"pilot-{uuid4().hex}", "priority": "interactive"}
    unset = ("row", "repeat", "custom_id", "session", "turn", "delay", "at")
    changed: dict[str, Any] = {
        "job": request.job.model_copy(update={**options, **dict.fromkeys(unset)})
    }
    if isinstance(request, ScoreRequest):
        changed["items"] = [
            {name: value for name, value in item.items() if name not in unset}
            for item in request.items
        ]
    return request.model_copy(update=changed)


def _measured(store: Results, run: str, ids: Collection[str]) -> Pilot:
    choices = [row for row in store.table(run, COLUMNS).to_pylist() if row["job_id"] in ids]
    rows = [row for row in choices if row["choice_index"] == 0]
    failed = [row for row in rows if row["status"] != "ok"]
    started = [row["started_at"] for row in rows if row["started_at"] is not None]
    ended = [row["finished_at"] for row in rows if row["finished_at"] is not None]
    scored: Counter[tuple[str, int]] = Counter()  # tokens, by the keys of rows
    for row in choices:
        scored[_key(row)] += _scored_tokens(row)
    return Pilot(
        run=run,
        rows=len(rows),
        failed=len(failed),
        seconds=(max(ended) - min(started)).total_seconds() if started and ended else 0.0,
        input_tokens=[
            # Those of a text are the ones that are scored.
            row["input_tokens"] + (scored[_key(row)] if row["operation"] != "perplexity" else 0)
            for row in rows
            if row["input_tokens"] is not None
        ],
        output_tokens=sum(row["output_tokens"] or 0 for row in choices),
        scored_tokens=scored.total(),
        errors=[f"{row['error_type']}: {row['error_message']}" for row in failed],
    )


def _key(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["job_id"], row["row_index"]


def _scored_tokens(row: Mapping[str, Any]) -> int:
    """The tokens that were scored for a row of the files: those of all choices, whichever was
    picked."""
    found: int = sum(one["scored_tokens"] or 0 for one in row["choices"] or [row])
    return found

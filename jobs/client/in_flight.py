"""Many requests with a bounded number of jobs in flight, and items packed into scoring jobs.

For callers that want results and no handles, such as the adapter of lm-evaluation-harness. A job
whose caller stops is cancelled.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import islice
from typing import Any

from jobs.api.answer import ChatCompletion
from jobs.api.request import ChatRequest
from jobs.api.score_packs import Measure, PackLimits, packed
from jobs.api.score_request import MAX_ITEMS, ScoreRequest, count_sequences
from jobs.api.score_result import ScoredItem, ScoreResult
from jobs.client.client import Client
from jobs.client.job import Job
from jobs.errors import JobError

MAX_JOBS = 64  # in flight
LIMITS = PackLimits(  # of a scoring job
    items=MAX_ITEMS,
    sequences=64,  # as many as a batch holds, and workers share the others
    characters=250_000,
)

Outcome = ChatCompletion | ScoreResult | JobError


def outcomes(
    client: Client, requests: Iterable[ChatRequest | ScoreRequest], max_jobs: int = MAX_JOBS
) -> Generator[tuple[int, Outcome]]:
    """The number of each request and its result or error, as the jobs end. At most `max_jobs` are
    in flight, and no more requests are read from the iterator; those left when the iteration stops
    are cancelled. Raises JobError if a request can't be enqueued."""
    source, number = iter(requests), 0
    flight: dict[Job[Any, Any], int] = {}
    try:
        while True:
            new: list[Any] = list(islice(source, max_jobs - len(flight)))
            for job in client.submit_many(new):
                flight[job] = number
                number += 1
            if not flight:
                return
            ended = list(islice(client.as_completed(list(flight)), max(1, max_jobs // 4)))
            found = client.gather(ended, return_exceptions=True)
            for job, outcome in zip(ended, found, strict=True):
                yield flight.pop(job), outcome
    finally:
        for job in flight:
            with suppress(JobError):
                job.cancel()


def score_many(
    client: Client,
    model: str,
    items: Iterable[Mapping[str, Any]],
    *,
    max_jobs: int = MAX_JOBS,
    job: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Generator[tuple[int, ScoredItem]]:
    """The number of each item and its result, as the jobs end that the items are packed into. An
    item whose job has failed has the error of the job. `job`, `fields`: of all requests; `job.row`
    is the row_index of the first item. Raises JobError if a job can't be enqueued."""
    jobs: dict[int, tuple[int, int]] = {}  # number of its first item, and count
    options: Any = dict(job or {})
    row = options.get("row")

    def requests() -> Iterator[ScoreRequest]:
        first = 0
        for number, together in enumerate(pack(items)):
            if row is not None:
                options["row"] = row + first
            yield ScoreRequest(model=model, items=together, job=options, **fields)
            jobs[number] = first, len(together)
            first += len(together)

    with closing(outcomes(client, requests(), max_jobs)) as found:
        for number, outcome in found:
            first, count = jobs.pop(number)
            if isinstance(outcome, ScoreResult):
                scored = outcome.items
            else:
                assert isinstance(outcome, JobError)
                scored = [ScoredItem(error=outcome.to_dict())] * count
            yield from enumerate(scored, first)


def pack(items: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """The items in lists that one scoring job each takes."""

    def measure(item: Mapping[str, Any]) -> Measure:
        return Measure(None, "", count_sequences(item), len(json.dumps(item)))

    return packed(items, LIMITS, measure)

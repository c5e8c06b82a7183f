"""`FakeWorker`: answers the jobs of a test with scripted answers, on an in-memory Redis."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import fakeredis

from jobs.api.answer import ChatCompletion
from jobs.api.request import ChatRequest
from jobs.client.aio import AsyncClient
from jobs.client.client import Client
from jobs.operations import rows_of
from jobs.results.outbox import DEFAULT_RUN
from jobs.results.rows import Row
from jobs.sizes import counted
from jobs.testing.connections import (
    ScriptingRedis,
    connected_async_client,
    connected_client,
)
from jobs.testing.replies import Answer, Reply, check_reply
from jobs.testing.stepper import Stepper

# One reply to every request, a list of replies in the order of the requests, or a function.
Answers = (
    str | Answer | ChatCompletion | Exception | Sequence[Reply] | Callable[[ChatRequest], Reply]
)


class FakeWorker:
    """Answers jobs as a worker does, but with the answers that a test gives it.

        with FakeWorker("Hello!") as worker:
            job = worker.client().submit({"model": "any", "messages": [...]})
            assert job.result().text == "Hello!"
            assert worker.requests[0].messages[0].text == "..."

    `answers` is one reply for all requests, a list with one reply per request, or a function that
    is called with each `ChatRequest`. A reply is a string, an `Answer`, a `ChatCompletion`, a list
    with one string or `Answer` per choice, or an exception: the job fails with that JobError.

    Jobs, streams, results and errors go through an in-memory Redis in the formats of a real
    worker, and the clients are `Client` and `AsyncClient`. Jobs of all models are answered.

    There is no thread. The worker advances while a client waits: in `result`, between two chunks of
    `stream`, when a loop polls `status`, and in `run`. In one step it starts all jobs that wait, or
    gives each running job its next token. So a test takes the same steps each time, a job that
    nobody waits for stays queued, and a job can be cancelled in the middle of its stream.

    Not imitated: scoring jobs, lost workers, the turns of tenants, `job.ttl`, retries that
    `job.retries` does not ask for and the pauses before them, limits on tokens, stop strings, and
    log-probabilities.
    """

    def __init__(self, answers: Answers = "OK") -> None:
        self.requests: list[ChatRequest] = []  # of all attempts that were started, in order
        if isinstance(answers, Sequence) and not isinstance(answers, str | bytes):
            for reply in answers:
                check_reply(reply)
        elif not callable(answers):
            check_reply(answers)
        self._answers = answers
        self._server = fakeredis.FakeServer()
        self._redis: Any = ScriptingRedis(server=self._server)
        self._stepper = Stepper(self._redis, self._reply)

    def client(self, url: str | None = None) -> Client:
        """A new client of the in-memory Redis. `url` is ignored, so that this method can replace
        the class `Client` in the code under test."""
        return connected_client(self._server, self._stepper)

    def async_client(self, url: str | None = None) -> AsyncClient:
        """A new client for asyncio. Use one client per event loop."""
        return connected_async_client(self._server, self._stepper)

    def run(self) -> None:
        """Answer all jobs that were submitted, also those that nobody waits for."""
        while (pause := self._stepper.advance()) < math.inf:
            time.sleep(pause)

    def rows(self, run: str = DEFAULT_RUN) -> list[Row]:
        """The rows of a run that would be in Parquet: one per choice of each job that has ended."""
        return [row for entry in self._stepper.record().get(run, []) for row in rows_of(entry)]

    def record(self, results: str | Path) -> None:
        """Write the rows of all jobs that have ended to Parquet, as `<results>/<run>/samples`.
        Rows that this method wrote before are replaced."""
        from jobs.results.files import table_of, write_tables
        from jobs.results.run_json import RunJson
        from jobs.results.unfinished import TEMPORARY

        for run in self._stepper.record():
            folder, part = Path(results) / run, "part-0.parquet"
            table = table_of(self.rows(run))
            write_tables(folder / TEMPORARY / part, folder / "samples" / part, [table])
            RunJson({"run_id": run}).write(folder)

    def close(self) -> None:
        self._redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"FakeWorker({counted(len(self.requests), 'request')})"

    def _reply(self, request: ChatRequest) -> Reply:
        """The reply to the next request. Raises what a function of the test raises."""
        self.requests.append(request)
        answers = self._answers
        if isinstance(answers, str | Answer | ChatCompletion | Exception):
            return answers
        if not isinstance(answers, Sequence):
            return answers(request)
        number = len(self.requests)
        if number > len(answers):
            raise AssertionError(
                f"the FakeWorker has {counted(len(answers), 'answer')}, and request {number} came: "
                f"{request.messages[-1].text[:200]!r}"
            )
        return answers[number - 1]

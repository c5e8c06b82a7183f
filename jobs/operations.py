"""The operations that jobs run, by the function that names each on the wire.

A kind of job begins with an entry here. Client, store, worker and recorder ask this registry, and
nothing else knows the names of the functions. `worker.host.operations` says how an engine runs
each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from jobs.api.answer import ChatCompletion, FinishReason, Usage
from jobs.api.job_options import JobOptions
from jobs.api.request import ChatRequest
from jobs.api.score_request import ScoreRequest
from jobs.api.score_result import ScoreResult
from jobs.api.wire import json_of
from jobs.results.chat_rows import chat_rows
from jobs.results.outbox import OutboxEntry, operation_of
from jobs.results.rows import Row
from jobs.results.score_rows import score_rows


class Request(Protocol):
    """The checked request of a job. `parse` raises InvalidRequest."""

    model: str
    job: JobOptions

    @classmethod
    def parse(cls, data: Any) -> Self: ...

    @property
    def publishes(self) -> bool:
        """True if its deltas go to the token stream in Redis."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...

    def to_dict(self) -> dict[str, Any]: ...


class Result(Protocol):
    """The answer to a request."""

    @property
    def usage(self) -> Usage | None: ...

    @property
    def finish_reason(self) -> FinishReason:
        """The reason at the end of its token stream."""

    def to_dict(self) -> dict[str, Any]: ...

    def least_detail_bytes(self) -> int:
        """Bytes that its details have as JSON, at least; computed without encoding them."""

    def without_details(self) -> Self:
        """The answer without what a row that is too large leaves out."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of job."""

    func: str  # on the wire: the function of RQ's job
    name: str  # in the column `operation`
    title: str  # in the description of RQ's job
    request: type[Request]
    result: type[Result]
    cost: Callable[[Any], int]  # of a request: the sequences that it adds to the batch
    rows: Callable[[OutboxEntry], list[Row]]


CHAT = Operation(
    func="worker.tasks.chat_completion",
    name="chat",
    title="chat completion",
    request=ChatRequest,
    result=ChatCompletion,
    cost=lambda request: request.n or 1,
    rows=chat_rows,
)

SCORE = Operation(
    func="worker.tasks.score",
    name="score",
    title="scoring",
    request=ScoreRequest,
    result=ScoreResult,
    cost=lambda request: request.cost,
    rows=score_rows,
)

OPERATIONS = {operation.func: operation for operation in (CHAT, SCORE)}


def operation_named(func: str | None) -> Operation:
    """The operation of a function. A job of another one has a row as a chat has."""
    return OPERATIONS.get(func or "", CHAT)


def parse_request(data: Any) -> Request:
    """The checked request of a JSON object, or of its text: a scoring request if it has `items`.
    Raises InvalidRequest."""
    if isinstance(data, ChatRequest | ScoreRequest):
        return data
    if isinstance(data, str | bytes | bytearray):
        data = json_of(data)
    scores = isinstance(data, Mapping) and "items" in data and "messages" not in data
    return (ScoreRequest if scores else ChatRequest).parse(data)


def result_of(data: Any) -> ChatCompletion | ScoreResult:
    """The result of a job from the JSON value that a worker has written. Raises ValidationError."""
    scores = isinstance(data, dict) and data.get("object") == "score"
    return (ScoreResult if scores else ChatCompletion).model_validate(data)


def operation_for(request: Request) -> Operation:
    """The operation that takes such a request."""
    return next(one for one in OPERATIONS.values() if isinstance(request, one.request))


def rows_of(entry: OutboxEntry) -> list[Row]:
    """The rows of an ended job. One of an unknown operation has the columns that all jobs share."""
    name = operation_of(entry)
    found = (one for one in OPERATIONS.values() if one.name == name)
    return next(found, CHAT).rows(entry)

"""An operation of its own passes queue, loop, backend and recorder; values are encoded once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pydantic_core
import pytest
from pydantic import Field
from rq import Queue

from jobs import ChatRequest, JobError
from jobs.api.answer import FinishReason, Usage
from jobs.api.job_options import JobOptions
from jobs.api.wire import Checked, Wire
from jobs.operations import CHAT, OPERATIONS, SCORE, Operation
from jobs.results.outbox import OutboxEntry
from jobs.results.rows import Row, shared_columns
from jobs.store.enqueue import Enqueued, enqueue
from tests.worker.fake_backend import FakeBackend, text_of
from tests.worker.queue.rq_jobs import fetch
from tests.worker.site import Site
from worker.backend import Outcome, Sink
from worker.queue.served import Served
from worker.queue.status_collector import StatusCollector


class LengthRequest(Checked):
    """Asks for the lengths of texts."""

    model: str
    texts: list[str]
    job: JobOptions = Field(default_factory=JobOptions)

    @property
    def publishes(self) -> bool:
        return False


class Lengths(Wire):
    lengths: list[int]
    usage: Usage | None = None

    @property
    def finish_reason(self) -> FinishReason:
        return "stop"

    def least_detail_bytes(self) -> int:
        return 0

    def without_details(self) -> Lengths:
        return self


def length_rows(entry: OutboxEntry) -> list[Row]:
    """One row for each text."""
    lengths = (entry["completion"] or {}).get("lengths", [None])
    return [
        {**shared_columns(entry), "choice_index": number, "output_tokens": length}
        for number, length in enumerate(lengths)
    ]


LENGTHS = Operation(
    func="worker.tasks.lengths",
    name="lengths",
    title="lengths",
    request=LengthRequest,
    result=Lengths,
    cost=lambda request: len(request.texts),
    rows=length_rows,
)


class Measuring(FakeBackend):
    """Runs the operation in `submit`."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[int] = []

    def submit(self, operation: Operation, request: Any, sink: Sink) -> Any:
        if operation is CHAT:
            return super().submit(operation, request, sink)
        self.costs.append(operation.cost(request))
        if "" in request.texts:
            sink.ended(Outcome(error=JobError("internal", "requested by the test")))
        else:
            sink.ended(Outcome(result=Lengths(lengths=[len(text) for text in request.texts])))
        return SimpleNamespace(cancel=lambda: None)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch, site: Site) -> Callable[..., str]:
    """Enqueues a job of the operation; returns its id."""
    monkeypatch.setitem(OPERATIONS, LENGTHS.func, LENGTHS)

    def lengths(*texts: str) -> str:
        request = LengthRequest(model="fake", texts=texts, job=JobOptions(retries=0))
        (enqueued,) = enqueue(site.redis, [request])
        assert isinstance(enqueued, Enqueued)
        return enqueued.id

    return lengths


def value_of(site: Site, job: str) -> Any:
    return fetch(site, site.client.job(job)).return_value(refresh=True)


def rows_by_job(site: Site) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in site.rows():
        found.setdefault(row["job_id"], []).append(row)
    return found


def test_jobs_of_another_operation_end_beside_chats(
    site: Site, lengths: Callable[..., str]
) -> None:
    first, chat, second = lengths("a", "bcd"), site.submit(), lengths("ef")
    backend = Measuring()
    published = StatusCollector(backend, Served()).read(time.monotonic())
    assert published["funcs"] == sorted((CHAT.func, SCORE.func, LENGTHS.func))
    site.burst(backend)
    assert backend.costs == [2, 1]
    assert value_of(site, first) == {"lengths": [1, 3]}
    assert value_of(site, second) == {"lengths": [2]}
    assert chat.result(timeout=1).text == text_of(chat.request)
    rows = rows_by_job(site)
    assert [row["output_tokens"] for row in rows[first]] == [1, 3]
    assert [row["choice_index"] for row in rows[first]] == [0, 1]
    operations = {job: {row["operation"] for row in found} for job, found in rows.items()}
    assert operations == {first: {"lengths"}, second: {"lengths"}, chat.id: {"chat"}}


def test_jobs_of_another_operation_fail_in_rows_of_their_own(
    site: Site, queue: Queue, lengths: Callable[..., str]
) -> None:
    failed, cancelled = lengths(""), lengths("b")
    refused = queue.enqueue(LENGTHS.func, request={"model": "fake", "texts": "not a list"}).id
    assert site.client.job(cancelled).cancel()
    site.burst(Measuring())
    rows = rows_by_job(site)
    for job, code, word in (
        (failed, "internal", "requested by the test"),
        (refused, "invalid_request", "texts"),
        (cancelled, "cancelled", "cancelled"),
    ):
        (row,) = rows[job]
        assert (row["operation"], row["error_type"]) == ("lengths", code)
        assert word in row["error_message"]


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The texts that this process has decoded and encoded as JSON, outside of the recorder."""
    found: list[tuple[str, str]] = []

    def watched(kind: str, convert: Callable[..., Any]) -> Callable[..., Any]:
        def call(value: Any, *args: Any, **options: Any) -> Any:
            result = convert(value, *args, **options)
            text = value if kind == "decoded" else result
            if threading.current_thread() is threading.main_thread():
                found.append((kind, text if isinstance(text, str) else text.decode()))
            return result

        return call

    for module in (pydantic_core, json):
        for name in ("from_json", "to_json", "loads", "dumps"):
            if hasattr(module, name):
                kind = "decoded" if name in ("from_json", "loads") else "encoded"
                monkeypatch.setattr(module, name, watched(kind, getattr(module, name)))
    yield found


def test_a_request_is_decoded_once_and_an_answer_encoded_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, coded: list[tuple[str, str]]
) -> None:
    """The row has both: the request is encoded again there, the answer is not."""
    parsed: list[str] = []
    construct = ChatRequest.__init__

    def watched(self: ChatRequest, **fields: Any) -> None:
        construct(self, **fields)
        parsed.append(self.messages[0].text)

    job = site.submit("a question", priority="bulk")
    answer = text_of(job.request)
    monkeypatch.setattr(ChatRequest, "__init__", watched)
    coded.clear()
    site.burst()
    texts = {
        text: [kind for kind, found in coded if text in found] for text in ("a question", answer)
    }
    assert texts == {"a question": ["decoded", "encoded"], answer: ["encoded"]}
    assert parsed == ["a question"]
    assert job.result(timeout=1).text == answer
    (row,) = site.rows()
    assert row["text"] == answer

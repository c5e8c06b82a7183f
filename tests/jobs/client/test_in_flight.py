"""Many requests in a bounded window, and items packed into scoring jobs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jobs import ChatCompletion, ChatRequest, JobError
from jobs.client.in_flight import LIMITS, outcomes, pack, score_many
from jobs.testing import Answer, FakeWorker


def test_a_bounded_number_is_in_flight_and_each_outcome_has_its_number() -> None:
    def reply(request: ChatRequest) -> str:
        number = int(request.messages[0].text)
        if number == 7:
            raise JobError("internal", "the seventh fails")
        return f"answer {number}"

    read = 0

    def requests() -> Iterator[ChatRequest]:
        nonlocal read
        for number in range(20):
            read += 1
            message = {"role": "user", "content": str(number)}
            yield ChatRequest(model="m", messages=[message], job={"retries": 0})

    with FakeWorker(reply).client() as client:
        found: dict[int, Any] = {}
        for number, outcome in outcomes(client, requests(), 4):
            found[number] = outcome
            assert read - len(found) <= 4
    assert sorted(found) == list(range(20))
    assert isinstance(found.pop(7), JobError)
    assert all(isinstance(one, ChatCompletion) for one in found.values())
    assert all(one.text == f"answer {number}" for number, one in found.items())


def test_jobs_in_flight_are_cancelled_when_the_caller_stops() -> None:
    requests = [
        ChatRequest(
            model="m", messages=[{"role": "user", "content": "hi"}], job={"id": f"job-{number}"}
        )
        for number in range(8)
    ]
    # The first two end, and others never: a quarter of the window is taken at once.
    never = Answer("", delay=math.inf)
    answers: list[str | Answer] = ["one", "two", *[never] * 6]
    with FakeWorker(answers).client() as client:
        found = outcomes(client, requests, 8)
        assert next(found)[0] in (0, 1)
        found.close()
        jobs = [client.job(f"job-{number}") for number in range(8)]
        ends = client.gather(jobs, return_exceptions=True)
    codes = [end.code if isinstance(end, JobError) else None for end in ends]
    assert codes == [None, None, *["cancelled"] * 6]


def test_items_are_packed_by_sequences_and_size() -> None:
    def item(continuations: int, prompt: str = "p") -> dict[str, Any]:
        return {
            "type": "loglikelihood",
            "prompt": prompt,
            "continuations": ["c"] * continuations,
        }

    given = [item(4) for _ in range(LIMITS.sequences // 4 + 1)]
    assert [len(one) for one in pack(given)] == [LIMITS.sequences // 4, 1]
    long = "p" * (LIMITS.characters // 2)
    assert [len(one) for one in pack([item(1), item(1, long), item(1, long)])] == [2, 1]
    # One that is larger than any job may be is not lost.
    assert [len(one) for one in pack([item(1), item(2 * LIMITS.sequences), item(1)])] == [1, 1, 1]


def test_the_items_of_a_job_that_failed_have_its_error() -> None:
    items = [{"type": "perplexity", "text": str(number)} for number in range(LIMITS.sequences + 1)]
    with FakeWorker().client() as client:
        found = dict(score_many(client, "m", items, job={"run": "r", "row": 5, "retries": 0}))
        assert sorted(found) == list(range(LIMITS.sequences + 1))
        assert all(one.failure is not None for one in found.values())

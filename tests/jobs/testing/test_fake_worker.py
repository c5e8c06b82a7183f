"""FakeWorker: scripted answers reach clients as those of a real worker do."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import ChatCompletion, ChatRequest, JobError, Results, keys
from jobs.api.answer import AssistantMessage, Choice, Usage
from jobs.api.params import JobFields, RequestFields
from jobs.store.job_state import Status
from jobs.testing import Answer, Answers, FakeWorker
from jobs.testing.attempts import Attempts
from tests.waiting import PATIENCE

REQUEST: RequestFields = {"model": "any", "messages": [{"role": "user", "content": "one two"}]}


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    with FakeWorker("Hello big world") as worker:
        yield worker


def texts_of(answers: Answers, count: int) -> list[str]:
    client = FakeWorker(answers).client()
    return [job.result(timeout=PATIENCE).text for job in client.submit_many([REQUEST] * count)]


def test_one_answer_goes_to_all_requests(worker: FakeWorker) -> None:
    client = worker.client()
    job = client.submit({**REQUEST, "job": {"id": "mine"}})
    completion = job.result(timeout=PATIENCE)
    assert (
        completion.text == client.submit(REQUEST).result(timeout=PATIENCE).text == "Hello big world"
    )
    assert (completion.id, completion.model) == ("chatcmpl-mine", "any")
    assert completion.choices[0].finish_reason == "stop"
    assert job.status() is Status.FINISHED
    assert [request.messages[0].text for request in worker.requests] == ["one two"] * 2
    assert worker.requests[0].job.id == "mine"


def test_durable_jobs_are_answered(worker: FakeWorker) -> None:
    assert worker.client().submit(REQUEST, durable=True).result(timeout=PATIENCE).text


def test_a_list_has_one_answer_per_request() -> None:
    assert texts_of(["a", Answer("b"), ["c"]], 3) == ["a", "b", "c"]


def test_a_request_too_many_fails_the_test() -> None:
    client = FakeWorker(["a"]).client()
    client.submit(REQUEST).result(timeout=PATIENCE)
    job = client.submit(REQUEST)
    with pytest.raises(AssertionError, match="has 1 answer, and request 2 came: 'one two'"):
        job.result(timeout=PATIENCE)
    assert job.status() is Status.FAILED


def test_a_function_answers_each_request() -> None:
    def reply(request: ChatRequest) -> str:
        if request.temperature == 0:
            raise JobError("context_length_exceeded", "too long", "messages")
        return request.messages[-1].text.upper()

    client = FakeWorker(reply).client()
    assert client.submit(REQUEST).result(timeout=PATIENCE).text == "ONE TWO"
    with pytest.raises(JobError, match="too long") as caught:
        client.submit({**REQUEST, "temperature": 0}).result(timeout=PATIENCE)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_a_mistake_in_the_function_is_raised_in_the_test() -> None:
    def reply(request: ChatRequest) -> str:
        assert request.temperature == 0, "the application must set temperature"
        return ""

    job = FakeWorker(reply).client().submit(REQUEST)
    with pytest.raises(AssertionError, match="must set temperature"):
        job.result(timeout=PATIENCE)
    with pytest.raises(JobError, match="AssertionError: the application must set temperature"):
        job.result(timeout=PATIENCE)


def test_an_exception_is_the_error_of_the_job() -> None:
    client = FakeWorker([JobError("timeout", "too slow"), ValueError("bad")]).client()
    first, second = client.submit_many([REQUEST] * 2)
    with pytest.raises(JobError, match="timeout: too slow"):
        list(first.stream())
    with pytest.raises(JobError, match="internal: ValueError: bad"):
        second.result(timeout=PATIENCE)
    assert first.status() is second.status() is Status.FAILED


def test_a_stream_has_one_chunk_per_word(worker: FakeWorker) -> None:
    job = worker.client().submit({**REQUEST, "stream_options": {"include_usage": True}})
    *chunks, usage = job.stream()
    assert [chunk.text for chunk in chunks] == ["Hello ", "big ", "world"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert usage.usage == job.result(timeout=PATIENCE).usage
    assert usage.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
    }
    assert [chunk.text for chunk in job.stream(after=chunks[0].cursor)] == ["big ", "world", ""]


def test_a_list_of_strings_is_the_chunks_of_the_stream() -> None:
    answer = Answer(["Hel", "lo"], reasoning=["I ", "think"], finish_reason="length")
    job = FakeWorker(answer).client().submit(REQUEST)
    deltas = [chunk.choices[0].delta for chunk in job.stream()]
    assert [delta.reasoning_content for delta in deltas] == ["I ", "think", None, None]
    assert [delta.content for delta in deltas] == [None, None, "Hel", "lo"]
    completion = job.result(timeout=PATIENCE)
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].message.reasoning_content == "I think"
    assert completion.usage.completion_tokens == 4
    assert completion.usage.completion_tokens_details.reasoning_tokens == 2


def test_a_bulk_job_gives_its_answer_in_one_chunk(worker: FakeWorker) -> None:
    job = worker.client().submit({**REQUEST, "job": {"priority": "bulk"}})
    assert [chunk.text for chunk in job.stream()] == ["Hello big world"]


def test_every_choice_gets_the_answer_or_one_of_its_own() -> None:
    client = FakeWorker(["same", ["a a", Answer("b")]]).client()
    request: RequestFields = {**REQUEST, "n": 2}
    first, second = (job.result(timeout=PATIENCE) for job in client.submit_many([request] * 2))
    assert [choice.message.content for choice in first.choices] == ["same", "same"]
    assert [choice.message.content for choice in second.choices] == ["a a", "b"]
    assert second.usage.completion_tokens == 3


def test_the_number_of_choices_must_be_that_of_the_request() -> None:
    job = FakeWorker([["a", "b"]]).client().submit(REQUEST)
    with pytest.raises(AssertionError, match="2 choices for a request with n=1"):
        job.result(timeout=PATIENCE)


def test_tool_calls_reach_the_stream_and_the_result() -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    job = FakeWorker(Answer(tool_calls=[call])).client().submit(REQUEST)
    (chunk,) = job.stream()
    (choice,) = chunk.choices
    assert choice.delta.tool_calls is not None
    (delta,) = choice.delta.tool_calls
    assert delta.function is not None
    assert delta.function.model_dump() == call["function"]
    assert choice.finish_reason == "tool_calls"
    message = job.result(timeout=PATIENCE).choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.name == "add"


def test_a_completion_is_taken_with_its_usage() -> None:
    usage = Usage(prompt_tokens=7, completion_tokens=8, total_tokens=15)
    choice = Choice(index=0, message=AssistantMessage(content="a b"), finish_reason="length")
    given = ChatCompletion(id="x", created=1, model="m", choices=[choice], usage=usage)
    job = FakeWorker(given).client().submit(REQUEST)
    assert "".join(chunk.text for chunk in job.stream()) == "a b"
    completion = job.result(timeout=PATIENCE)
    assert (completion.choices, completion.usage) == ([choice], usage)
    assert completion.id == f"chatcmpl-{job.id}"


def test_an_error_may_come_after_some_text() -> None:
    error = JobError("out_of_memory", "the cache is full")
    job = FakeWorker(Answer("one two", error=error)).client().submit(REQUEST)
    received = []
    with pytest.raises(JobError, match="the cache is full"):
        received.extend(chunk.text for chunk in job.stream())
    received = []
    with pytest.raises(JobError):
        for chunk in job.stream():
            received.append(chunk.text)
    assert received == ["one ", "two"]


def test_a_retry_takes_the_next_answer_and_restarts_the_stream() -> None:
    error = JobError("internal", "first attempt")
    worker = FakeWorker([Answer("old", error=error), "new"])
    job = worker.client().submit({**REQUEST, "job": {"retries": 1}})
    chunks = list(job.stream(on_restart="reset"))
    assert [(chunk.reset, chunk.text) for chunk in chunks] == [
        (None, "old"),
        (True, ""),
        (None, "new"),
    ]
    assert len(worker.requests) == 2


def test_a_job_is_queued_until_somebody_waits(worker: FakeWorker) -> None:
    client = worker.client()
    job, other = client.submit_many([REQUEST] * 2)
    assert worker.requests == []
    assert job.cancel()
    with pytest.raises(JobError, match="cancelled before it was run"):
        job.result(timeout=PATIENCE)
    assert other.status() is Status.QUEUED
    assert worker.requests == []
    assert other.result(timeout=PATIENCE).text == "Hello big world"
    assert len(worker.requests) == 1


def test_polling_the_status_ends(worker: FakeWorker) -> None:
    job = worker.client().submit(REQUEST)
    seen = [job.status()]
    while not seen[-1].over:
        seen.append(job.status())
    assert list(dict.fromkeys(seen)) == [Status.QUEUED, Status.STARTED, Status.FINISHED]


def test_a_job_is_cancelled_in_the_middle_of_its_stream(worker: FakeWorker) -> None:
    job = worker.client().submit(REQUEST)
    received = []
    with pytest.raises(JobError) as caught:
        for chunk in job.stream():
            received.append(chunk.text)
            assert job.cancel()
    assert caught.value.code == "cancelled"
    assert received == ["Hello "]
    assert job.status() is Status.CANCELLED
    (row,) = worker.rows()
    assert (row["status"], row["text"]) == ("cancelled", "Hello ")


def test_jobs_that_nobody_waits_for_are_run(worker: FakeWorker) -> None:
    jobs = worker.client().submit_many([REQUEST] * 3)
    worker.run()
    assert {job.status() for job in jobs} == {Status.FINISHED}
    assert len(worker.requests) == 3


def test_a_delay_is_waited_for_and_an_endless_one_lets_waiting_time_out() -> None:
    worker = FakeWorker([Answer("late", delay=0.5), Answer(delay=math.inf)])
    first, second = worker.client().submit_many([REQUEST] * 2)
    with pytest.raises(JobError, match=r"has not ended after 0\.01 s"):
        first.result(timeout=0.01)
    worker.run()
    assert (first.status(), second.status()) == (Status.FINISHED, Status.STARTED)
    with pytest.raises(JobError, match=r"has not ended after 0\.01 s"):
        second.result(timeout=0.01)
    assert second.cancel()
    worker.run()
    assert second.status() is Status.CANCELLED


def test_a_waiting_thread_notices_what_another_one_does() -> None:
    worker = FakeWorker(Answer(delay=math.inf))
    job = worker.client().submit(REQUEST)
    while job.status() is not Status.STARTED:
        pass
    thread = threading.Thread(target=lambda: worker.client().job(job.id).cancel())
    thread.start()
    with pytest.raises(JobError, match="was cancelled"):
        job.result(timeout=PATIENCE)
    thread.join()


def test_threads_may_wait_side_by_side(worker: FakeWorker) -> None:
    client, received = worker.client(), []

    def ask() -> None:
        received.append(client.submit(REQUEST).result(timeout=PATIENCE).text)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received == ["Hello big world"] * 8


def test_rows_are_those_of_parquet(worker: FakeWorker, tmp_path: Path) -> None:
    options: JobFields = {"run": "sums", "target": "3"}
    rows: list[RequestFields] = [{**REQUEST, "job": {**options, "row": row}} for row in range(2)]
    worker.client().submit_many(rows)
    worker.run()
    assert [row["target"] for row in worker.rows("sums")] == ["3", "3"]
    assert worker.rows() == []
    worker.record(tmp_path)
    table = Results(tmp_path).table(run="sums")
    assert table.column("text").to_pylist() == ["Hello big world"] * 2
    assert sorted(table.column("row_index").to_pylist()) == [0, 1]
    worker.client().submit({**rows[0], "job": {**options, "row": 2}}).result(timeout=PATIENCE)
    worker.record(tmp_path)
    assert Results(tmp_path).table(run="sums").num_rows == 3


def test_rows_leave_the_outbox_when_a_client_looks_for_them(worker: FakeWorker) -> None:
    client = worker.client()
    client.submit(REQUEST).result(timeout=PATIENCE)
    assert client.submit(REQUEST).cancel()
    assert client.connection.run("xrevrange", keys.outbox("default"), count=1) == []
    assert [row["status"] for row in worker.rows()] == ["ok", "cancelled"]


@pytest.mark.parametrize(
    "answers", [5, None, {"a": 1}, b"a", [5], [None], [["a", 5]], {"a"}], ids=str
)
def test_answers_of_a_wrong_type_are_refused_at_once(answers: Any) -> None:
    with pytest.raises(TypeError, match="a FakeWorker's answer must be"):
        FakeWorker(answers)


def test_a_function_that_returns_no_reply_fails_with_what_is_possible() -> None:
    answers: Any = lambda request: 5  # noqa: E731
    job = FakeWorker(answers).client().submit(REQUEST)
    with pytest.raises(TypeError, match=r"a FakeWorker's answer must be .* got 5"):
        job.result(timeout=PATIENCE)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"tool_calls": [{"id": "1"}]}, ValueError, r"tool_calls\[0\]: .*function.* is required"),
        ({"finish_reason": "x"}, ValueError, "finish_reason: must be 'stop', .* got 'x'"),
        ({"content": 5}, TypeError, "content: expected a string or a list of strings, got 5"),
        ({"reasoning": ["a", 5]}, TypeError, "reasoning: expected a string or a list of strings"),
        ({"error": "x"}, TypeError, "error: expected a JobError, got 'x'"),
        ({"delay": -1}, ValueError, "delay: must be at least 0, got -1"),
    ],
    ids=str,
)
def test_fields_of_an_answer_are_checked_at_once(
    fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Answer(**fields)


def test_a_retried_job_waits_in_the_list_of_its_tenant_and_wakes_a_worker() -> None:
    client = FakeWorker("unused").client()
    job = client.submit({**REQUEST, "job": {"tenant": "t"}})
    redis = client.redis
    redis.delete(keys.wake("chat:any"))
    attempts = Attempts(redis)
    (claimed,) = attempts.claim()
    assert attempts.retry(claimed, 1, JobError("internal", "x"))
    assert redis.lrange(keys.tenant_queue("chat:any", "t"), 0, -1) == [job.id.encode()]
    assert redis.hget(keys.TENANT_JOBS, "chat:any") == b"1"
    assert redis.llen(keys.wake("chat:any")) == 1


def test_the_end_of_a_job_frees_its_own_bytes_alone() -> None:
    client = FakeWorker("unused").client()
    first, second = client.submit_many([REQUEST, REQUEST])
    attempts = Attempts(client.redis)
    claimed = attempts.claim()
    assert [job.lease.job for job in claimed] == [first.id, second.id]
    attempts.fail(claimed[0], JobError("internal", "x"))
    left = client.redis.hget(keys.OPEN_BYTES, "rq:queue:chat:any")
    assert left == client.redis.hget(f"rq:job:{second.id}", "chatjobs_bytes")
    attempts.fail(claimed[1], JobError("internal", "x"))
    assert not client.redis.exists(keys.OPEN_BYTES)


def test_a_scoring_job_fails_with_a_sentence(worker: FakeWorker) -> None:
    item = {"type": "perplexity", "text": "a"}
    job = worker.client().submit({"model": "any", "items": [item]})
    with pytest.raises(JobError, match="answers chat jobs, and this is a scoring job"):
        job.result(timeout=PATIENCE)
    assert [row["operation"] for row in worker.rows()] == ["perplexity"]

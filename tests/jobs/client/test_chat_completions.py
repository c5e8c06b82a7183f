"""`client.chat.completions.create`: the arguments and the answers of the openai package."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai.resources.chat.completions import AsyncCompletions, Completions
from openai.types.chat import ChatCompletion as OpenAICompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel

from jobs import AsyncClient, Client, IgnoredFieldWarning, JobError, StreamRestarted, WaitTimeout
from jobs.api.params import CompletionFields
from jobs.client.chat_completions import AsyncChatStream
from jobs.store.job_state import Status
from jobs.store.rq_layout import queue_key
from tests.jobs.conftest import StepwiseWorker
from tests.waiting import PATIENCE, wait_until

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
# Attributes of openai's answers that have no meaning here.
ABSENT = {
    "accepted_prediction_tokens",
    "annotations",
    "audio",
    "audio_tokens",
    "function_call",
    "metadata",
    "moderation",
    "obfuscation",
    "rejected_prediction_tokens",
    "service_tier",
}


@contextmanager
def working(client: Client, worker: StepwiseWorker, work: Callable[[str], None]) -> Iterator[None]:
    """A worker in the background that takes one job of the model `demo`."""

    def run() -> None:
        wait_until(lambda: queued(client))
        work(queued(client)[0])

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


def answering(worker: StepwiseWorker, *texts: str) -> Callable[[str], None]:
    """Writes the texts as chunks, then ends the job."""

    def work(job_id: str) -> None:
        attempt = worker.start(job_id)
        for number, text in enumerate(texts, 1):
            worker.write(job_id, attempt, number, text)
        worker.finish(job_id, "".join(texts), attempt=attempt)

    return work


def queued(client: Client) -> list[str]:
    return [one.decode() for one in client.redis.lrange(queue_key("chat:demo"), 0, -1)]


def all_jobs(client: Client) -> list[str]:
    return [one.decode().removeprefix("rq:job:") for one in client.redis.keys("rq:job:*")]


@pytest.mark.parametrize("method", [Completions.create, AsyncCompletions.create])
def test_the_arguments_are_those_of_openai(method: Any) -> None:
    theirs = inspect.signature(method).parameters
    assert CompletionFields.__annotations__.keys() == theirs.keys() - {"self", "stream"}
    required = {name for name, one in theirs.items() if one.default is one.empty} - {"self"}
    assert CompletionFields.__required_keys__ == required


def test_an_answer_reads_like_openais(client: Client, worker: StepwiseWorker) -> None:
    with working(client, worker, answering(worker, "forty-", "two")):
        answer = client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, timeout=PATIENCE
        )
    assert answer.choices[0].message.content == "forty-two"
    theirs = OpenAICompletion.model_validate(answer.model_dump())
    assert_same_attributes(answer, theirs)
    (job_id,) = all_jobs(client)
    request = client.job(job_id).request
    assert request.temperature == 0
    assert request.stream is False


def test_chunks_read_like_openais(client: Client, worker: StepwiseWorker) -> None:
    with working(client, worker, answering(worker, "forty-", "two")):
        stream = client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            timeout=PATIENCE,
        )
        chunks = list(stream)
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "forty-two"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and not chunks[-1].choices
    for chunk in chunks:
        assert_same_attributes(chunk, OpenAIChunk.model_validate(chunk.model_dump()))
    assert list(stream) == []
    assert client.job(stream.job.id).status() == Status.FINISHED


def assert_same_attributes(ours: Any, theirs: BaseModel) -> None:
    """Code that reads openai's object finds the same values in ours."""
    absent = ABSENT | ({"refusal"} if isinstance(theirs, ChoiceDelta) else set())
    for name in type(theirs).model_fields.keys() - absent:
        compare(getattr(ours, name), getattr(theirs, name))


def compare(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, BaseModel):
        assert_same_attributes(ours, theirs)
    elif isinstance(theirs, list):
        for one, other in zip(ours, theirs, strict=True):
            compare(one, other)
    else:
        assert ours == theirs


def test_fields_beyond_openais_are_given_in_extra_body(
    client: Client, worker: StepwiseWorker
) -> None:
    with working(client, worker, answering(worker, "x")):
        client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            extra_body={"top_k": 5, "job": {"custom_id": "mine"}},
            timeout=PATIENCE,
        )
    (job_id,) = all_jobs(client)
    request = client.job(job_id).request
    assert (request.top_k, request.job.custom_id) == (5, "mine")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temprature": 1}, r"create\(\) got an unexpected keyword argument 'temprature'$"),
        ({"top_k": 1}, "unexpected keyword argument 'top_k': put it into extra_body"),
        ({"timeout": "1 min"}, "takes a timeout in seconds, or an openai.Timeout, got '1 min'"),
        ({"timeout": True}, "takes a timeout in seconds, or an openai.Timeout, got True"),
    ],
)
def test_wrong_arguments_are_a_type_error(client: Client, fields: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        client.chat.completions.create(model="demo", messages=MESSAGES, **fields)
    assert not queued(client)


def test_model_and_messages_are_required(client: Client) -> None:
    fields: Any = {"model": "demo"}
    with pytest.raises(TypeError, match="missing the required keyword argument 'messages'"):
        client.chat.completions.create(**fields)


def test_a_bad_value_is_refused_with_its_field(client: Client) -> None:
    with pytest.raises(JobError, match="temperature: ") as caught:
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"


def test_openais_marks_of_absent_arguments_are_absent(
    client: Client, worker: StepwiseWorker
) -> None:
    fields: Any = {"temperature": openai.NOT_GIVEN, "top_p": openai.omit, "timeout": 30}
    with working(client, worker, answering(worker, "x")):
        client.chat.completions.create(model="demo", messages=MESSAGES, **fields)
    (job_id,) = all_jobs(client)
    request = client.job(job_id).request
    assert request.temperature is None and request.top_p is None


def test_arguments_of_the_transport_are_named_in_a_warning(
    client: Client, worker: StepwiseWorker
) -> None:
    with (
        working(client, worker, answering(worker, "x")),
        pytest.warns(IgnoredFieldWarning, match="extra_headers and extra_query") as caught,
    ):
        line = inspect.currentframe().f_lineno + 1
        client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            extra_headers={"X-A": "b"},
            extra_query={"a": "b"},
            timeout=PATIENCE,
        )
    found = [one for one in caught if one.category is IgnoredFieldWarning]
    assert [(one.filename, one.lineno) for one in found] == [(__file__, line)]


def test_a_call_that_times_out_cancels_its_job(client: Client) -> None:
    with pytest.raises(JobError) as caught:
        client.chat.completions.create(model="demo", messages=MESSAGES, timeout=0.1)
    assert caught.value.code == "timeout"
    (job_id,) = all_jobs(client)
    assert client.job(job_id).status() == Status.CANCELLED


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "timeout",
    [
        openai.Timeout(0.1),
        openai.Timeout(60, read=0.1),
        openai.Timeout(0.1, connect=None),
    ],
    ids=repr,
)
def test_a_timeout_of_the_openai_package_is_taken(
    client: Client, redis_url: str, timeout: Any, stream: bool
) -> None:
    """As long as no data comes, as its `read` says."""

    def create() -> None:
        answer = client.chat.completions.create(
            model="demo", messages=MESSAGES, stream=stream, timeout=timeout
        )
        list(answer)

    async def create_async() -> None:
        async with AsyncClient(redis_url) as aclient:
            answer = await aclient.chat.completions.create(
                model="demo", messages=MESSAGES, stream=stream, timeout=timeout
            )
            assert isinstance(answer, AsyncChatStream)
            [chunk async for chunk in answer]

    for call in (create, lambda: asyncio.run(create_async())):
        with pytest.raises(WaitTimeout, match=r"0\.1 s"):
            call()


@pytest.mark.parametrize(
    "timeout", [openai.Timeout(None), openai.Timeout(0.01, read=None), openai.NOT_GIVEN, None, 30]
)
def test_a_timeout_without_a_limit_waits(
    client: Client, worker: StepwiseWorker, timeout: Any
) -> None:
    with working(client, worker, answering(worker, "x")):
        answer = client.chat.completions.create(model="demo", messages=MESSAGES, timeout=timeout)
    assert answer.text == "x"


def test_a_stream_without_chunks_times_out_and_cancels_its_job(client: Client) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, timeout=0.1
    )
    with pytest.raises(JobError, match=r"no chunk of job \w+ for 0\.1 s \(status: queued\)"):
        next(stream)
    assert stream.job.status() == Status.CANCELLED
    assert list(stream) == []


def test_leaving_a_stream_early_cancels_its_job(client: Client, worker: StepwiseWorker) -> None:
    with client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, timeout=PATIENCE
    ) as stream:
        job_id = stream.job.id
        worker.write(job_id, worker.start(job_id), 1, "forty-")
        assert next(stream).text == "forty-"
    assert client.redis.hget(f"rq:job:{job_id}", "chatjobs_cancel") == b"1"
    assert list(stream) == []
    stream.close()


def test_a_stream_goes_on_when_its_job_starts_again(client: Client, worker: StepwiseWorker) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, timeout=PATIENCE
    )
    job_id = stream.job.id
    worker.write(job_id, worker.start(job_id), 1, "forty-")
    text = next(stream).choices[0].delta.content or ""
    worker.requeue(job_id)
    attempt = worker.start(job_id)
    worker.write(job_id, attempt, 1, "forty-two")
    worker.finish(job_id, "forty-two", attempt=attempt)
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    assert text == "forty-two"


def test_an_answer_that_starts_again_and_differs_is_an_error_once_a_part_was_read(
    client: Client, worker: StepwiseWorker
) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, timeout=PATIENCE
    )
    job_id = stream.job.id
    worker.write(job_id, worker.start(job_id), 1, "forty-")
    assert next(stream).text == "forty-"
    worker.requeue(job_id)
    worker.write(job_id, worker.start(job_id), 1, "other")
    with pytest.raises(StreamRestarted, match=r"started again, .* repeat the request") as caught:
        next(stream)
    assert (caught.value.code, caught.value.retryable) == ("worker_lost", True)
    assert client.redis.hget(f"rq:job:{job_id}", "chatjobs_cancel") == b"1"
    assert list(stream) == []


def test_a_failed_job_raises_its_error(client: Client, worker: StepwiseWorker) -> None:
    def fail(job_id: str) -> None:
        worker.start(job_id)
        worker.fail(job_id, JobError("context_length_exceeded", "too long", "messages"))

    for stream in (False, True):
        with working(client, worker, fail), pytest.raises(JobError, match="too long"):
            answer = client.chat.completions.create(
                model="demo", messages=MESSAGES, stream=stream, timeout=PATIENCE
            )
            list(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_a_task_that_is_cancelled_while_it_submits_leaves_no_job(
    client: Client, redis_url: str, stream: bool
) -> None:
    arrived, going_on = threading.Event(), threading.Event()

    async def ask() -> None:
        async with AsyncClient(redis_url) as aclient:
            submit = aclient._producer.submit

            def held(*given: Any, **options: Any) -> Any:
                job = submit(*given, **options)
                arrived.set()
                going_on.wait()
                return job

            aclient._producer.submit = held  # type: ignore[method-assign]
            create = aclient.chat.completions.create
            task = asyncio.create_task(create(model="demo", messages=MESSAGES, stream=stream))
            await asyncio.to_thread(arrived.wait)
            task.cancel()
            await asyncio.sleep(0)
            going_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(ask())
    (job_id,) = all_jobs(client)
    assert client.job(job_id).status() == Status.CANCELLED


def test_the_asyncio_twin(client: Client, worker: StepwiseWorker, redis_url: str) -> None:
    async def ask() -> None:
        async with AsyncClient(redis_url) as aclient:
            create = aclient.chat.completions.create
            with working(client, worker, answering(worker, "forty-", "two")):
                answer = await create(model="demo", messages=MESSAGES, timeout=PATIENCE)
            assert_same_attributes(answer, OpenAICompletion.model_validate(answer.model_dump()))
            with working(client, worker, answering(worker, "forty-", "two")):
                stream = await create(
                    model="demo", messages=MESSAGES, stream=True, timeout=PATIENCE
                )
                texts = [chunk.text async for chunk in stream]
            assert "".join(texts) == "forty-two"

            async with await create(
                model="demo", messages=MESSAGES, stream=True, timeout=PATIENCE
            ) as stream:
                worker.write(stream.job.id, worker.start(stream.job.id), 1, "forty-")
                assert (await anext(stream)).text == "forty-"
            cancelled = client.redis.hget(f"rq:job:{stream.job.id}", "chatjobs_cancel")
            assert cancelled == b"1"

            with pytest.raises(JobError, match="no chunk of job"):
                stream = await create(model="demo", messages=MESSAGES, stream=True, timeout=0.1)
                await anext(stream)
            assert await stream.job.status() == Status.CANCELLED

            task = asyncio.create_task(create(model="demo", messages=MESSAGES))
            while not (ids := queued(client)):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client.job(ids[0]).status() == Status.CANCELLED

    asyncio.run(ask())

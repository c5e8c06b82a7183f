"""The token stream through Redis: no token lost or repeated, and always an end."""

from __future__ import annotations

import math

import pytest

from jobs import JobError, StreamRestarted, keys
from jobs.api.answer import ChoiceLogprobs, TokenLogprob
from jobs.client import follow
from jobs.errors import InvalidRequest
from jobs.store.connection.protocol import run_sync
from jobs.store.job_state import read_outcome
from jobs.store.requeue import requeue
from jobs.stream.delta import Delta
from jobs.stream.entries import Entry
from tests.jobs.conftest import completion_of
from tests.jobs.stream.subscribers import Subscriber, client_url, text_of, wait_for_subscriber
from tests.waiting import wait_until

REQUEST = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
WITH_USAGE = {**REQUEST, "stream_options": {"include_usage": True}}


def test_a_subscriber_sees_tokens_as_they_are_written(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    chunks = job.stream()
    for seq, text in enumerate(["a", "b", "c"], 1):
        worker.write(job.id, 1, seq, text)
        chunk = next(chunks)
        assert (chunk.text, chunk.cursor) == (text, f"1-{seq}")
        assert chunk.choices[0].delta.role == ("assistant" if seq == 1 else None)
    worker.write(job.id, 1, 4, "", finish_reason="stop")
    worker.finish(job.id, "abc")
    (last,) = chunks
    assert last.choices[0].finish_reason == "stop"


def test_a_late_subscriber_sees_every_token_once(client, worker):
    job = client.submit(WITH_USAGE)
    worker.start(job.id)
    for seq, text in enumerate("abc", 1):
        worker.write(job.id, 1, seq, text)
    late = Subscriber(client_url(client), job.id)
    wait_for_subscriber(worker, job.id)
    worker.write(job.id, 1, 4, "d", finish_reason="stop")
    worker.finish(job.id, "abcd")
    chunks = late.end()
    assert [chunk.text for chunk in chunks] == ["a", "b", "c", "d", ""]
    assert chunks[-1].usage.prompt_tokens == 3
    assert chunks[-1].choices == []
    assert [chunk.text for chunk in job.stream()] == ["a", "b", "c", "d", ""]


def test_a_log_of_many_pages_is_read_whole(client, worker, monkeypatch):
    monkeypatch.setattr(follow, "PAGE", 7)
    job = client.submit(REQUEST)
    worker.start(job.id)
    for seq in range(1, 50):
        worker.write(job.id, 1, seq, f"{seq} ")
    whole = "".join(f"{seq} " for seq in range(1, 50))
    worker.finish(job.id, whole)
    chunks = list(job.stream())
    assert text_of(chunks) == whole
    assert len(chunks) == 50  # the entries have no finish reason: a last chunk adds it


def test_each_cursor_resumes_right_after_its_chunk(client, worker):
    job = client.submit(WITH_USAGE)
    worker.start(job.id)
    for seq, text in enumerate("abc", 1):
        worker.write(job.id, 1, seq, text)
    worker.finish(job.id, "abcd")
    chunks = list(job.stream())
    assert text_of(chunks) == "abcd"
    for number, chunk in enumerate(chunks):
        assert list(job.stream(after=chunk.cursor)) == chunks[number + 1 :]


def test_a_cursor_of_an_earlier_attempt_that_differs_gets_an_error_or_a_reset(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "old")
    worker.requeue(job.id)
    worker.start(job.id)
    worker.write(job.id, 2, 1, "new")
    worker.finish(job.id, "new", attempt=2)
    with pytest.raises(StreamRestarted, match="differs from the part that was read") as caught:
        next(job.stream("1-1"))
    assert caught.value.job_id == job.id and caught.value.retryable
    assert [chunk.text for chunk in job.stream()] == ["new", ""]  # as the error says
    chunks = list(job.stream(after="1-1", on_restart="reset"))
    assert chunks[0].reset
    assert text_of(chunks) == "new"
    again = list(job.stream(after=chunks[0].cursor))
    assert again == chunks[1:]


def test_a_malformed_cursor_is_refused(client, worker):
    job = client.submit(REQUEST)
    with pytest.raises(JobError, match="a cursor has the form <attempt>-<seq>, got 'x'"):
        next(job.stream(after="x"))


def test_a_stream_goes_on_with_a_new_attempt_that_agrees(client, worker):
    """Its text comes once, whatever the parts in which each attempt writes it."""
    job = client.submit(REQUEST)
    worker.start(job.id)
    live = Subscriber(client_url(client), job.id, plain=True)
    wait_for_subscriber(worker, job.id)
    worker.write(job.id, 1, 1, "half a ")
    worker.write(job.id, 1, 2, "sen")
    worker.requeue(job.id)
    worker.start(job.id)
    resumed = [
        Subscriber(client_url(client), job.id, after, plain=True) for after in ("1-1", "1-2")
    ]
    for seq, text in enumerate(["ha", "lf a sente", "nce"], 1):
        worker.write(job.id, 2, seq, text)
        worker.write(job.id, 1, 2 + seq, "of the first worker, which resumes")
    worker.finish(job.id, "half a sentence", attempt=2)
    chunks = live.end()
    assert live.error is None
    assert "".join(chunk.text for chunk in chunks) == "half a sentence"
    assert [c.delta.role for chunk in chunks for c in chunk.choices].count("assistant") == 1
    for one, rest in zip(resumed, ("sentence", "tence"), strict=True):
        assert "".join(chunk.text for chunk in one.end()) == rest
        assert one.error is None


def test_a_new_attempt_that_differs_ends_a_plain_loop_with_an_error(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    plain, live = (Subscriber(client_url(client), job.id, plain=plain) for plain in (True, False))
    wait_for_subscriber(worker, job.id)
    worker.write(job.id, 1, 1, "half a sen")
    wait_until(lambda: plain.chunks and live.chunks)
    worker.requeue(job.id)
    worker.start(job.id)
    worker.write(job.id, 2, 1, "ha")
    worker.write(job.id, 2, 2, "ste ")
    worker.write(job.id, 1, 2, "tence")  # the first worker resumes
    worker.write(job.id, 2, 3, "makes waste")
    assert "".join(chunk.text for chunk in plain.end()) == "half a sen"
    assert isinstance(plain.error, StreamRestarted)
    assert job.status() == "started"
    worker.finish(job.id, "haste makes waste", attempt=2)
    chunks = live.end()
    assert text_of(chunks) == "haste makes waste"
    assert sum(bool(chunk.reset) for chunk in chunks) == 1
    roles = [c.delta.role for chunk in chunks for c in chunk.choices]
    assert roles.count("assistant") == 2


@pytest.mark.parametrize("shown", [(), ("an ",), ("an answer that is longer",)])
def test_a_new_attempt_that_ends_without_output_in_the_log_is_compared(client, worker, shown):
    """With its completion."""
    job = client.submit(REQUEST)
    worker.start(job.id)
    live = Subscriber(client_url(client), job.id, plain=True)
    wait_for_subscriber(worker, job.id)
    for seq, text in enumerate(shown, 1):
        worker.write(job.id, 1, seq, text)
    wait_until(lambda: len(live.chunks) == len(shown))
    worker.requeue(job.id)
    worker.start(job.id)
    worker.finish(job.id, "an answer", attempt=2)
    text = "".join(chunk.text for chunk in live.end())
    if shown == ("an answer that is longer",):
        assert isinstance(live.error, StreamRestarted)
    else:
        assert text == "an answer" and live.error is None


@pytest.mark.parametrize("value", ["ignore", None, True])
def test_an_unknown_way_to_restart_is_refused(client, value):
    with pytest.raises(InvalidRequest, match="on_restart: raise or reset, got"):
        next(client.job("any").stream(on_restart=value))


def test_several_choices_in_one_entry_are_one_chunk_with_a_delta_each(client, worker):
    job = client.submit({**REQUEST, "n": 2, "logprobs": True})
    worker.start(job.id)
    token = TokenLogprob(token="x", logprob=-1.0)
    last = Delta(0, "b", logprobs=(token,), finish_reason="stop")
    worker.writer.write_many([Entry(job.id, 1, 1, (Delta(0, "a"), Delta(1, "x"), last))])
    completion = completion_of(job.id, "ab", "xyz")
    completion.choices[0].logprobs = ChoiceLogprobs(content=[token])
    worker.complete(job.id, completion)
    first, rest = job.stream()
    assert [(c.index, c.delta.content, c.finish_reason) for c in first.choices] == [
        (0, "ab", "stop"),
        (1, "x", None),
    ]
    assert first.choices[0].logprobs.content == [token]
    assert [(c.index, c.delta.content, c.finish_reason) for c in rest.choices] == [
        (1, "yz", "stop")
    ]


def test_a_job_that_publishes_nothing_streams_its_answer_at_the_end(client, worker):
    job = client.submit({**REQUEST, "job": {"priority": "bulk"}})
    worker.start(job.id)
    live = Subscriber(client_url(client), job.id)
    wait_for_subscriber(worker, job.id)
    worker.finish(job.id, "all of it")
    (chunk,) = live.end()
    assert chunk.text == "all of it"
    assert chunk.choices[0].delta.role == "assistant"
    assert chunk.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("after", [None, "1-2"])
def test_an_expired_log_is_replaced_by_the_result(client, worker, after):
    job = client.submit(REQUEST)
    worker.start(job.id)
    for seq, text in enumerate("abc", 1):
        worker.write(job.id, 1, seq, text)
    worker.finish(job.id, "abc")
    worker.redis.delete(keys.log(job.id))
    if after is not None:
        with pytest.raises(StreamRestarted):
            next(job.stream(after))
    chunks = list(job.stream(after, on_restart="reset"))
    assert text_of(chunks) == "abc"
    assert bool(chunks[0].reset) == (after is not None)


def test_a_trimmed_log_is_completed_from_the_result(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    for seq, text in enumerate("abcdef", 1):
        worker.write(job.id, 1, seq, text)
    worker.redis.xtrim(keys.log(job.id), maxlen=2, approximate=False)
    late = Subscriber(client_url(client), job.id)
    wait_for_subscriber(worker, job.id)
    worker.write(job.id, 1, 7, "g")
    worker.finish(job.id, "abcdefg")
    (chunk,) = late.end()
    assert chunk.text == "abcdefg"


def test_entries_that_were_not_written_come_from_the_result(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "abc")
    worker.write(job.id, 1, 3, "ghi")  # entry 2 is lost
    worker.finish(job.id, "abcdefghijkl")
    chunks = list(job.stream())
    assert [chunk.text for chunk in chunks] == ["abc", "defghijkl"]


def test_a_stream_that_differs_from_the_answer_is_reset_to_it(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "something else")
    worker.finish(job.id, "the answer")
    assert text_of(job.stream(on_restart="reset")) == "the answer"
    with pytest.raises(StreamRestarted):
        list(job.stream())


def test_a_failed_job_streams_its_partial_text_and_then_its_error(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "half")
    worker.fail(job.id, JobError("out_of_memory", "needs 9 GiB, 4 GiB are free"))
    chunks = job.stream()
    assert next(chunks).text == "half"
    with pytest.raises(JobError, match="needs 9 GiB") as caught:
        next(chunks)
    assert caught.value.code == "out_of_memory"


def test_a_job_requeued_after_its_failure_is_followed_to_its_second_end(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "half")
    worker.fail(job.id, JobError("worker_lost", "gone"))
    assert run_sync(requeue(job.id), client.connection)
    live = Subscriber(client_url(client), job.id)
    wait_for_subscriber(worker, job.id)
    worker.start(job.id)
    worker.write(job.id, 2, 1, "whole")
    worker.finish(job.id, "whole", attempt=2)
    assert text_of(live.end()) == "whole"
    assert live.error is None


def test_a_job_that_ends_while_its_log_is_read_is_not_waited_for(client, worker, monkeypatch):
    """The state is read before the log, and the end comes in between."""
    monkeypatch.setattr(follow, "SILENCE_SECONDS", math.inf)
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "a")

    read_log = client.redis.xrange

    def finish_first(*args, **options):
        if job.status() == "started":
            worker.finish(job.id, "a")
        return read_log(*args, **options)

    monkeypatch.setattr(client.redis, "xrange", finish_first)
    monkeypatch.setattr(client.connection, "listen", None)  # nothing to wait for
    assert text_of(job.stream()) == "a"


def test_an_unknown_job_raises_at_once(client):
    with pytest.raises(JobError, match="no job 'nobody' in Redis"):
        next(client.job("nobody").stream())


def test_a_stream_ends_even_if_every_message_is_lost(client, worker, monkeypatch):
    monkeypatch.setattr(follow, "SILENCE_SECONDS", 0.2)
    job = client.submit(REQUEST)
    worker.start(job.id)
    live = Subscriber(client_url(client), job.id)
    wait_for_subscriber(worker, job.id)
    worker.redis.xadd(keys.log(job.id), {"d": '{"p":[{"i":0,"c":"a"}]}'}, id="1-1")
    worker.redis.publish = None
    worker.finish(job.id, "ab")
    assert text_of(live.end()) == "ab"


def test_leaving_a_stream_early_ends_its_subscription(client, worker):
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "a")
    chunks = job.stream()
    assert next(chunks).text == "a"  # from the log
    worker.write(job.id, 1, 2, "b")
    assert next(chunks).text == "b"
    wait_for_subscriber(worker, job.id)
    chunks.close()
    wait_until(lambda: not worker.redis.pubsub_numsub(keys.live(job.id))[0][1])


def test_an_end_that_redis_lost_and_that_came_again_is_read_again(client, worker, monkeypatch):
    """A power cut takes back the end between the reads of a job's state and of its result."""
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "abc", finish_reason="stop")
    worker.finish(job.id, "abc")
    failed = []

    def lost_once(state, *more):
        if not failed:
            failed.append(state)
            raise JobError("internal", "the job has finished, but its result has expired")
        return (yield from read_outcome(state, *more))

    monkeypatch.setattr(follow, "read_outcome", lost_once)
    assert text_of(job.stream()) == "abc"
    assert failed

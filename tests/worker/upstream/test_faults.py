"""What goes wrong at an upstream fails no other job, loses none, and is said in one sentence."""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest

from jobs import JobError
from jobs.client.job import Job
from jobs.store.worker_status import read_workers
from tests.worker.site import Site, wait_until
from tests.worker.upstream.conftest import Burst
from tests.worker.upstream.fake_server import Answer, Exchange, FakeServer, echo, in_turn
from tests.worker.upstream.test_answers import text_of
from worker.upstream.address import Address
from worker.upstream.faults import retry_after


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that grow from seconds to minutes are short here."""
    monkeypatch.setattr("worker.upstream.availability.PAUSES", (0.01, 0.05))
    monkeypatch.setattr("worker.queue.circuit_breaker.BREAKER_PAUSE_SECONDS", (0.01, 0.02))
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 0.01)


def error_of(job: Job) -> JobError:
    with pytest.raises(JobError) as failure:
        job.result(timeout=1)
    return failure.value


def status(code: int, content: Any = None, **headers: str) -> Answer:
    body = {"error": {"message": "as the test says"}} if content is None else content
    return lambda exchange: exchange.respond(code, body, **headers)


def cut(exchange: Exchange) -> None:
    exchange.begin()
    exchange.chunk(content="half an ")
    exchange.cut()


def failures(site: Site, job: Job) -> list[str]:
    return [one["code"] for one in site.row(job)["failures"]]


# --- waits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 529])
def test_a_busy_upstream_is_waited_for_without_a_retry(
    site: Site, server: FakeServer, burst: Burst, code: int
) -> None:
    server.answer = in_turn(*[status(code)] * 4, echo)
    job = site.submit(retries=0)
    burst()
    assert job.result(timeout=1).text == text_of("hello")
    assert len(server.bodies) == 5
    assert not failures(site, job)
    assert site.row(job)["attempt"] == 1


def test_the_time_to_wait_is_the_one_that_the_upstream_says(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    sent: list[float] = []

    def answer(exchange: Exchange) -> None:
        sent.append(time.monotonic())
        if len(sent) == 1:
            exchange.respond(429, {"error": {"message": "slowly"}}, retry_after="1")
        else:
            echo(exchange)

    server.answer = answer
    jobs = site.submit_many(["first", "second"])
    burst(max_batch=1)
    assert [job.result(timeout=1).text for job in jobs] == [text_of("first"), text_of("second")]
    assert sent[1] - sent[0] >= 1.0


def test_the_header_has_seconds_or_a_date() -> None:
    now = datetime(2026, 11, 27, 12, 0, 0, tzinfo=UTC)
    date = format_datetime(datetime(2026, 11, 27, 12, 0, 30, tzinfo=UTC), usegmt=True)
    assert retry_after({"retry-after": "2.5"}, now) == 2.5
    assert retry_after({"retry-after-ms": "300", "retry-after": "1"}, now) == 0.3
    assert retry_after({"retry-after": date}, now) == 30.0
    assert retry_after({"retry-after": "Fri, 27 Nov 2026 11:00:00 GMT"}, now) == 0.0
    for text in ("", "soon", "-5", "1e400", "nan", "9" * 400):
        assert retry_after({"retry-after": text}, now) is None


def test_a_job_that_the_upstream_never_takes_fails_after_a_bound(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    def answer(exchange: Exchange) -> None:
        (status(500) if exchange.prompt == "bad" else echo)(exchange)

    server.answer = answer
    bad, good = site.submit("bad", retries=1), site.submit("good")
    burst()
    assert good.result(timeout=1).text == text_of("good")
    error = error_of(bad)
    assert (error.code, error.message) == ("internal", "the upstream answers 500: as the test says")
    assert failures(site, bad) == ["internal", "internal"]  # the retry of the job as well
    assert len(server.bodies) == 2 * 11 + 1


def test_a_long_wait_stops_the_claims_and_gives_the_jobs_back(
    site: Site, server: FakeServer, burst: Burst, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.upstream.exchange.LONGEST_HOLD", 0.5)
    monkeypatch.setattr("worker.upstream.availability.LONGEST_HOLD", 0.5)
    server.answer = in_turn(status(429, retry_after="1"), echo)
    job = site.submit(retries=0)
    burst()
    assert job.result(timeout=1).text == text_of("hello")
    row = site.row(job)
    assert row["attempt"] == 2
    assert "it asks to wait until 20" in row["failures"][0]["message"]


# --- losses ---------------------------------------------------------------------------------------


def test_a_connection_that_is_cut_in_mid_answer_is_a_retry_of_the_job(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    server.answer = in_turn(cut, echo)
    job = site.submit(retries=1)
    burst()
    assert job.result(timeout=1).text == text_of("hello")
    row = site.row(job)
    assert (row["attempt"], failures(site, job)) == (2, ["unavailable"])
    assert "lost in the middle of the answer" in row["failures"][0]["message"]
    chunks = list(job.stream())  # as one who follows from the start
    last = max((n for n, chunk in enumerate(chunks) if chunk.reset), default=-1)
    assert "".join(chunk.text for chunk in chunks[last + 1 :]) == text_of("hello")
    site.assert_settled([job])


def test_a_job_whose_connection_is_always_cut_fails_with_what_came(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    server.answer = cut
    job = site.submit(retries=1)
    burst()
    error = error_of(job)
    assert (error.code, site.row(job)["text"]) == ("unavailable", "half an ")
    assert "lost in the middle of the answer" in error.message


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n"])
def test_an_answer_that_ends_early_is_a_retry_of_the_job(
    site: Site, server: FakeServer, burst: Burst, end: bytes
) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.chunk(content="half")
        exchange.raw(end)

    server.answer = in_turn(answer, echo)
    job = site.submit(retries=1)
    burst()
    assert job.result(timeout=1).text == text_of("hello")
    assert failures(site, job) == ["unavailable"]


def test_an_upstream_that_is_gone_stops_the_claims_until_it_is_back(
    site: Site, server: FakeServer, burst: Burst, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    begun, gone, back = threading.Event(), threading.Event(), threading.Event()

    def answer(exchange: Exchange) -> None:
        if back.is_set():
            echo(exchange)
        else:
            exchange.begin()
            exchange.chunk(content="half an ")
            begun.set()
            gone.wait(60)
            exchange.cut()

    server.answer = answer
    jobs = site.submit_many([f"q{number}" for number in range(30)], retries=1)
    paused: list[str] = []
    sent: list[int] = []

    def look() -> bool:
        paused.extend(worker["paused"] for worker in read_workers(site.redis))
        return any("does not answer" in reason for reason in paused)

    # `serve` handles signals, which only a main thread can.
    def stop_and_start() -> None:
        begun.wait(60)
        gone.set()
        server.stop()
        try:
            wait_until(look)
            sent.append(len(server.bodies))
            wait_until(lambda: all(job.status().value in ("queued", "scheduled") for job in jobs))
            sent.append(len(server.bodies))
        finally:
            back.set()
            server.start()

    thread = threading.Thread(target=stop_and_start)
    thread.start()
    burst(max_batch=4)
    thread.join()
    assert len(sent) == 2
    assert sent[0] == sent[1] < len(jobs)
    assert [job.result(timeout=1).text for job in jobs] == [
        text_of(f"q{number}") for number in range(30)
    ]
    site.assert_settled(jobs)
    said = [one.getMessage() for one in caplog.records if "not claiming" in one.getMessage()]
    assert len(said) == 1
    assert f"not claiming jobs: the upstream {server.url} does not answer" in said[0]
    assert "claiming jobs again" in caplog.text


def test_an_upstream_that_does_not_take_the_key_any_more_fails_no_job(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    expired = {"error": {"message": "the key sk-secret has expired"}}

    def answer(exchange: Exchange) -> None:
        server.list_answer = in_turn(*[status(401, expired)] * 3, listed)
        exchange.respond(401, expired)

    def listed(exchange: Exchange) -> None:
        exchange.respond(200, {"data": server.models})

    server.answer = in_turn(answer, echo)
    job = site.submit(retries=0)
    burst(key="sk-secret")
    assert job.result(timeout=1).text == text_of("hello")
    (failure,) = site.row(job)["failures"]
    assert (
        "answers 401: the key *** has expired; is CHATJOBS_UPSTREAM_API_KEY right?"
        in (failure["message"])
    )


# --- answers that are errors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "content", "expected", "text"),
    [
        (400, {"error": {"message": "bad stop"}}, "invalid_request", "answers 400: bad stop"),
        (422, {"detail": "no such field"}, "invalid_request", "answers 422: no such field"),
        (413, b"too big", "invalid_request", "answers 413: too big"),
        (404, {"error": "gone"}, "model_not_found", "answers 404: gone"),
        (403, {"message": "not for you"}, "invalid_request", "answers 403: not for you"),
        (
            400,
            {"error": {"message": "too long", "code": "context_length_exceeded"}},
            "context_length_exceeded",
            "too long",
        ),
        (
            400,
            {"error": {"message": "This model's maximum context length is 8 tokens."}},
            "context_length_exceeded",
            "maximum context length",
        ),
        (301, b"", "internal", "answers 301: nothing: it has moved to http://else"),
    ],
)
def test_a_request_that_the_upstream_refuses_fails_alone_and_at_once(
    site: Site,
    server: FakeServer,
    burst: Burst,
    code: int,
    content: Any,
    expected: str,
    text: str,
) -> None:
    def answer(exchange: Exchange) -> None:
        if exchange.prompt == "bad":
            exchange.respond(code, content, location="http://else/v1")
        else:
            echo(exchange)

    server.answer = answer
    bad, *good = site.submit_many(["bad", "one", "two"], retries=0)
    burst()
    assert [job.result(timeout=1).text for job in good] == [text_of("one"), text_of("two")]
    error = error_of(bad)
    assert error.code == expected
    assert text in error.message
    assert len(server.bodies) == 3


def begins_with(raw: bytes) -> Answer:
    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.raw(raw)
        exchange.raw(b"")

    return answer


HTML = b"<!DOCTYPE html><html><head><title>Sign &amp; in</title></head></html>"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            status(200, HTML, content_type="text/html; charset=utf-8"),
            "no stream of events but text/html; charset=utf-8: an HTML page with the title "
            "'Sign & in' instead of JSON",
        ),
        (status(200, {"choices": []}), "no stream of events but application/json"),
        (begins_with(b"data: {not json\n\n"), "a chunk is not JSON: '{not json'"),
        (begins_with(b"data: [1]\n\n"), "a chunk is no JSON object: '[1]'"),
        (begins_with(b'data: {"choices": [{"delta": {"content": 7}}]}\n\n'), "int instead of a"),
        (begins_with(b'data: {"choices": [{"index": 5}]}\n\n'), "choice 5 of 1"),
        (begins_with(b"data: [DONE]\n\n"), "it ended without a finish_reason"),
        (
            begins_with(b'data: {"choices": [{"finish_reason": "odd"}]}\n\n'),
            "the unknown finish_reason 'odd'",
        ),
    ],
)
def test_an_answer_that_can_not_be_read_is_one_clear_error(
    site: Site, server: FakeServer, burst: Burst, answer: Answer, text: str
) -> None:
    server.answer = answer
    job = site.submit(retries=0)
    burst()
    error = error_of(job)
    assert error.code == "internal"
    assert error.message.startswith("the upstream's answer can't be read: ")
    assert text in error.message


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"message": "the engine died", "code": 500}, "unavailable"),
        ({"message": "bad prompt", "code": 400}, "invalid_request"),
        ({"message": "too long", "type": "context_length_exceeded"}, "context_length_exceeded"),
        ("something", "unavailable"),
    ],
)
def test_an_error_in_mid_answer_ends_the_job(
    site: Site, server: FakeServer, burst: Burst, error: Any, expected: str
) -> None:
    server.answer = begins_with(f"data: {json.dumps({'error': error})}\n\n".encode())
    job = site.submit(retries=0)
    burst()
    found = error_of(job)
    assert found.code == expected
    assert "the upstream ended the answer with an error: " in found.message


def test_a_content_filter_fails_the_job_and_keeps_what_came(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.chunk(content="some")
        exchange.chunk(reason="content_filter")
        exchange.end()

    server.answer = answer
    job = site.submit()
    burst()
    assert "content filter" in error_of(job).message
    assert site.row(job)["text"] == "some"


def test_an_upstream_whose_answers_are_all_broken_stops_the_claims(
    site: Site, server: FakeServer, burst: Burst, caplog: pytest.LogCaptureFixture
) -> None:
    server.answer = in_turn(*[status(200, HTML, content_type="text/html")] * 6, echo)
    jobs = site.submit_many([f"q{number}" for number in range(20)], retries=6)
    burst(max_batch=2)
    assert {job.status().value for job in jobs} == {"finished"}
    assert "claiming no jobs until a single one works: jobs fail: the upstream's answer" in (
        caplog.text
    )


# --- the end of a job -----------------------------------------------------------------------------


def test_a_cancelled_job_closes_its_connection(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    closed = threading.Event()
    jobs: list[Job] = []

    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.chunk(content="half an ")
        assert next(chunk.text for chunk in jobs[0].stream() if chunk.text) == "half an "
        jobs[0].cancel()
        if exchange.closed():
            closed.set()

    server.answer = answer
    jobs.append(site.submit())
    burst()
    assert closed.wait(60)
    assert jobs[0].status().value == "cancelled"
    assert site.row(jobs[0])["text"] == "half an "


def test_a_job_ends_at_its_time_to_live(site: Site, server: FakeServer, burst: Burst) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.closed()

    server.answer = answer
    job = site.submit(ttl=2)
    burst()
    assert error_of(job).code == "timeout"


def test_a_job_that_waits_for_the_upstream_can_be_cancelled(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    jobs: list[Job] = []

    def answer(exchange: Exchange) -> None:
        exchange.respond(429, {}, retry_after="50")
        jobs[0].cancel()

    server.answer = answer
    jobs.append(site.submit())
    burst()
    assert jobs[0].status().value == "cancelled"


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("http://[::1]:80/api", "http://[::1]:80/api"),
        ("https://user:pass%40word@host/v1", "https://host/v1"),
    ],
)
def test_an_address_shows_no_login(url: str, shown: str) -> None:
    address = Address.parse(url, {})
    assert str(address) == shown
    assert "pass" not in repr(address)


@pytest.mark.parametrize(
    "url",
    ["host:8000", "ftp://host/v1", "http://", "http://host:99999", "http://host/v1?key=secret"],
)
def test_an_address_of_another_form_is_refused_without_its_text(url: str) -> None:
    with pytest.raises(JobError, match="the URL of the upstream is invalid") as failure:
        Address.parse(url, {})
    assert "secret" not in failure.value.message


def test_a_login_and_a_key_exclude_each_other() -> None:
    with pytest.raises(JobError, match="has a login and CHATJOBS_UPSTREAM_API_KEY a key"):
        Address.parse("http://a:b@host", {"CHATJOBS_UPSTREAM_API_KEY": "k"})
    with pytest.raises(JobError, match="CHATJOBS_UPSTREAM_API_KEY has a space"):
        Address.parse("http://host", {"CHATJOBS_UPSTREAM_API_KEY": "k\n"})


def test_secrets_are_masked_in_what_the_upstream_says() -> None:
    address = Address.parse("http://u:p%2Fw@host", {})
    assert address.masked("p%2Fw, p/w and dTpwL3c=") == "***, *** and ***"

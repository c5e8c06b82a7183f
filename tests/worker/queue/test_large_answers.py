"""An answer or a request that is too large fails or shrinks alone; its neighbours are settled."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.sentinel import MasterNotFoundError
from rq import Queue

from jobs import JobError
from jobs.api.answer import ChoiceLogprobs, TokenLogprob, TopLogprob
from jobs.api.params import RequestFields
from jobs.operations import CHAT
from jobs.store.connection.transport import Demoted
from jobs.store.damage import Busy, Unwritable
from jobs.store.job_end import Settler
from jobs.store.job_store import JobStore
from jobs.store.limits import DEFAULTS, set_limit
from tests.worker.fake_backend import FakeBackend, FakeHandle, text_of
from tests.worker.queue.rq_jobs import QUEUE
from tests.worker.site import PATIENCE, Site
from worker.backend import Outcome
from worker.queue.attempts import Attempts

LIMIT = 20_000  # bytes
MIB = 2**20


def with_logprobs(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """All answers have log-probabilities of so many tokens."""
    make = FakeHandle.outcome

    def outcome(self: FakeHandle, error: JobError | None) -> Outcome:
        made = make(self, error)
        top = [TopLogprob(token="x", logprob=-1.0)] * 5
        content = [TokenLogprob(token="x", logprob=-1.0, top_logprobs=top)] * tokens
        for choice in made.result.choices:
            choice.logprobs = ChoiceLogprobs(content=content)
        return made

    monkeypatch.setattr(FakeHandle, "outcome", outcome)


@pytest.mark.parametrize("tokens", [110, 10_000])  # about the limit, and far above it
def test_a_row_that_is_too_large_loses_its_logprobs_first(
    site: Site, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    with_logprobs(monkeypatch, tokens)
    set_limit(site.redis, "row_bytes", LIMIT)
    job = site.submit()
    site.burst()
    answer = job.result(timeout=PATIENCE)
    assert answer.text == text_of(job.request)
    assert answer.choices[0].logprobs is None
    assert site.row(job)["top_logprobs"] is None


def test_a_row_within_the_limit_keeps_its_logprobs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_logprobs(monkeypatch, 20)
    set_limit(site.redis, "row_bytes", LIMIT)
    job = site.submit()
    site.burst()
    logprobs = job.result(timeout=PATIENCE).choices[0].logprobs
    assert logprobs is not None and len(logprobs.content or ()) == 20


def test_an_answer_that_is_too_large_fails_with_the_numbers(site: Site) -> None:
    set_limit(site.redis, "row_bytes", 8_000)
    large, small = site.submit(words=2000), site.submit()
    site.burst()
    with pytest.raises(
        JobError, match=r"too large for its row: \d+\.\d kB, and the limit \(row_bytes\) is 8\.0 kB"
    ):
        large.result(timeout=PATIENCE)
    assert small.result(timeout=PATIENCE).text
    site.assert_settled([large, small])


def test_an_answer_that_redis_does_not_take_fails_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a value larger than proto-max-bulk-len: the server closes the connection."""
    jobs = site.submit_many(["a", "b", "c"])
    send = Settler.send

    def send_or_fail(self: Settler, settlement: Any, *rest: Any) -> None:
        if settlement.lease.job == jobs[1].id and settlement.answer is not None:
            raise redis.ConnectionError("the server closed the connection")
        send(self, settlement, *rest)

    monkeypatch.setattr(Settler, "send", send_or_fail)
    site.burst(FakeBackend())
    assert jobs[0].result(timeout=PATIENCE).text and jobs[2].result(timeout=PATIENCE).text
    with pytest.raises(JobError, match="Redis did not take the answer"):
        jobs[1].result(timeout=PATIENCE)
    site.assert_settled(jobs)


def test_an_answer_does_not_fail_if_redis_comes_back_while_it_is_settled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection fails with all answers, and again with one alone; the next command works."""
    jobs = site.submit_many(["a", "b", "c"])
    send, failures = Settler.send, 2

    def send_or_fail(self: Settler, settlement: Any, *rest: Any) -> None:
        nonlocal failures
        if settlement.lease.job == jobs[1].id and failures:
            failures -= 1
            raise redis.ConnectionError("Connection refused")
        send(self, settlement, *rest)

    monkeypatch.setattr(Settler, "send", send_or_fail)
    site.burst(FakeBackend())
    assert failures == 0
    assert [job.result(timeout=PATIENCE).text for job in jobs] == [
        text_of(job.request) for job in jobs
    ]
    site.assert_settled(jobs)


def test_answers_beside_one_that_redis_refuses_for_now_are_not_settled_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis began to refuse writes in the middle of a round: no lease is lost for it."""
    jobs = site.submit_many(["a", "b", "c"])
    send, settle, failures = Settler.send, Attempts.settle, 1

    def send_or_fail(self: Settler, settlement: Any, dead: Any, pipeline: Any) -> None:
        nonlocal failures
        if settlement.lease.job == jobs[1].id and failures:
            failures -= 1
            pipeline.execute_command("NO-SUCH-COMMAND")
        else:
            send(self, settlement, dead, pipeline)

    def settle_together(self: Attempts) -> bool:
        return settle(self) if not failures or len(self._ended) == len(jobs) else False

    monkeypatch.setattr(Settler, "send", send_or_fail)
    monkeypatch.setattr(Attempts, "settle", settle_together)
    site.burst(FakeBackend())
    assert failures == 0
    assert all(job.result(timeout=PATIENCE).text for job in jobs)
    assert "settled before" not in caplog.text and "lost the lease" not in caplog.text
    site.assert_settled(jobs)


def test_an_answer_does_not_fail_if_redis_goes_away_again_while_it_is_settled(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the second try to settle it nor the ping before that reaches Redis."""
    job = site.submit()
    faults = {Settler: 2, JobStore: 1}

    def failing(kind: type, name: str) -> None:
        work = getattr(kind, name)

        def fail_or_work(*words: Any) -> Any:
            if faults[kind]:
                faults[kind] -= 1
                raise redis.ConnectionError("Connection refused")
            return work(*words)

        monkeypatch.setattr(kind, name, fail_or_work)

    failing(Settler, "settle_each")
    failing(JobStore, "ping")
    site.burst(FakeBackend())
    assert faults == {Settler: 0, JobStore: 0}
    assert job.result(timeout=PATIENCE).text == text_of(job.request)


@pytest.mark.parametrize(
    "error",
    [Demoted(), MasterNotFoundError("none"), Unwritable("NOREPLICAS"), Busy("BUSY")],
    ids=repr,
)
def test_an_answer_does_not_fail_during_a_failover(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: redis.RedisError
) -> None:
    """Redis replies to pings, and takes an answer at the third try, or an error in its place."""
    job = site.submit()
    settle, failures = Settler.settle_each, 3

    def settle_or_fail(self: Settler, settlements: Any, *rest: Any) -> Any:
        nonlocal failures
        if settlements[0].answer is not None and failures:
            failures -= 1
            raise error
        return settle(self, settlements, *rest)

    monkeypatch.setattr(Settler, "settle_each", settle_or_fail)
    site.burst(FakeBackend())
    assert failures == 0
    assert job.result(timeout=PATIENCE).text == text_of(job.request)


@pytest.mark.parametrize(
    ("limit", "what"),
    [("request_bytes", "the request"), ("message_bytes", "a message of the request")],
)
def test_a_large_request_of_another_producer_is_refused_at_its_claim(
    site: Site, limit: str, what: str
) -> None:
    large, other = site.submit("x" * 5000), site.submit("y")
    set_limit(site.redis, limit, 2000)
    refusal = rf"{what} has 5\.\d kB as JSON, and the limit \({limit}\) is 2\.0 kB: "
    refusal += rf"shorten it, or raise the limit \(chatjobs limits {limit}=N\)"
    with pytest.raises(JobError, match=refusal):
        site.submit("z" * 5000)
    site.burst()
    with pytest.raises(JobError, match=refusal):
        large.result(timeout=PATIENCE)
    assert other.result(timeout=PATIENCE).text


@pytest.mark.parametrize(
    ("prompts", "limit"),
    [
        (["x" * 20 * MIB], "request_bytes"),
        (["x" * 7 * MIB] * 3, "request_bytes"),
        (["x" * 9 * MIB], "message_bytes"),
    ],
    ids=["20-mib", "three-messages", "one-message"],
)
def test_the_default_limits_refuse_a_large_prompt(
    site: Site, queue: Queue, prompts: list[str], limit: str
) -> None:
    """At submit, and from another producer at its claim."""
    messages = [{"role": "user", "content": prompt} for prompt in prompts]
    request: RequestFields = {"model": "fake", "messages": messages}
    refusal = rf"\({limit}\) is {getattr(DEFAULTS, limit) / 1e6:.1f} MB: shorten it"
    with pytest.raises(JobError, match=refusal) as caught:
        site.client.submit(request)
    assert caught.value.code == "invalid_request"
    assert not site.redis.exists(f"rq:queue:{QUEUE}")
    foreign = site.client.job(queue.enqueue(CHAT.func, request=request).id)
    site.burst()
    with pytest.raises(JobError, match=refusal):
        foreign.result(timeout=PATIENCE)

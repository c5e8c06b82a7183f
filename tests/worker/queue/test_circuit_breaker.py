"""A machine that fails jobs leaves the queue to others until it works again."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from jobs import JobError, keys
from jobs.api.request import ChatRequest
from jobs.operations import CHAT, Operation
from jobs.store.leases import MAX_MACHINE_ERRORS
from jobs.store.worker_status import read_workers
from tests.worker.fake_backend import FakeBackend, text_of
from tests.worker.site import Site, wait_until
from worker.backend import MachineError, Outcome, Sink
from worker.host.preparer import Preparation
from worker.queue.circuit_breaker import OPEN_FAILURES, CircuitBreaker

ERROR = MachineError("internal", "OSError: no memory")


class Recovering(FakeBackend):
    """Cannot fork for the first starts."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.tried: list[str] = []
        self.statuses: list[Any] = []
        self._failures = failures
        self.site: Site | None = None

    def submit(self, operation: Operation, request: Any, sink: Sink) -> Any:
        self.tried.append(str(request.job.id))
        self.sick = len(self.tried) <= self._failures
        return super().submit(operation, request, sink)

    def memory(self) -> Any:  # called at each check
        if self.site is not None:
            found = self.site.redis.zrange(keys.WORKERS, 0, -1)
            value = found and self.site.redis.get(keys.worker(found[0].decode()))
            self.statuses += [json.loads(value)["paused"]] if value else []
        return super().memory()


def test_jobs_of_a_sick_worker_wait_for_its_recovery(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.store.presence.STATUS_LEASES", 60.0)  # each check reads them
    caplog.set_level(logging.INFO)
    jobs = site.submit_many([f"q{i}" for i in range(40)])
    backend = Recovering(failures=4)
    backend.site = site
    site.burst(backend)
    assert [job.result(timeout=1).text for job in jobs] == [text_of(job.request) for job in jobs]
    assert len(backend.tried) == 44
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert (
        "3 failures in a row: claiming no jobs until a single one works: jobs cannot be" in messages
    )
    assert "a job works: claiming jobs again" in messages
    assert any("jobs cannot be started" in status for status in backend.statuses)
    assert {site.hash(job).get("chatjobs_retried") for job in jobs} == {None}
    site.assert_settled(jobs)


def test_a_sick_worker_leaves_the_jobs_to_a_healthy_one(site: Site) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(200)])
    sick = site.worker(sick=True)
    wait_until(lambda: "failures in a row: claiming no jobs" in sick.output)
    assert {job.status().over for job in jobs} == {False}
    healthy = site.worker()
    wait_until(lambda: all(job.status().over for job in jobs))
    assert [job.result(timeout=1).text for job in jobs] == [text_of(job.request) for job in jobs]
    assert (sick.stop(), healthy.stop()) == (0, 0)
    site.assert_settled(jobs)
    assert {row["status"] for row in site.rows()} == {"ok"}


def test_a_job_that_no_machine_can_run_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.queue.circuit_breaker.BREAKER_PAUSE_SECONDS", (0.01, 0.02))
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 0.0)
    bad, good = site.submit(unforkable=1), site.submit("good")
    site.burst()
    assert good.status().value == "finished"
    with pytest.raises(JobError, match="Cannot allocate memory") as failure:
        bad.result(timeout=1)
    assert failure.value.code == "internal"
    assert site.hash(bad)["chatjobs_machine_errors"] == str(MAX_MACHINE_ERRORS)


def test_a_prompt_whose_process_cannot_start_is_the_machine_s_fault() -> None:
    class Engine:
        def require_open(self) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

    class Ends:
        outcome: Outcome | None = None

        def ended(self, outcome: Outcome) -> None:
            self.outcome = outcome

    sink = Ends()
    request = ChatRequest(model="fake", messages=[{"role": "user", "content": "hi"}])
    Preparation(Engine(), CHAT, request, sink).advance()  # type: ignore[arg-type]
    assert sink.outcome is not None
    assert isinstance(sink.outcome.error, MachineError)


def test_a_worker_whose_device_fails_every_job_leaves_the_queue_to_others(site: Site) -> None:
    sick = site.worker(broken=True, max_batch=4)
    wait_until(lambda: " serves fake" in sick.output)
    jobs = site.submit_many([f"q{i}" for i in range(300)], retries=20, run="r")
    reason = "jobs fail: the device failed, requested by the test"
    wait_until(
        lambda: (
            (reason, False) in [(one["paused"], one["healthy"]) for one in read_workers(site.redis)]
        )
    )
    site.burst()
    assert [job.result(timeout=1).text for job in jobs] == [text_of(job.request) for job in jobs]
    assert len(site.rows("r")) == len(jobs)
    failures = [failure for row in site.rows("r") for failure in row["failures"] or []]
    assert OPEN_FAILURES <= len(failures) < 40


def test_a_worker_whose_device_works_again_claims_as_before(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.queue.circuit_breaker.BREAKER_PAUSE_SECONDS", (0.01, 0.02))
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 0.01)
    caplog.set_level(logging.INFO)

    class Repaired(FakeBackend):
        def submit(self, operation: Operation, request: Any, sink: Sink) -> Any:
            self.broken = len(self.begun) < 12
            return super().submit(operation, request, sink)

    jobs = site.submit_many([f"q{i}" for i in range(40)], retries=12)
    backend = site.burst(Repaired(max_batch=8))
    assert [job.result(timeout=1).text for job in jobs] == [text_of(job.request) for job in jobs]
    assert "8 failures in a row" not in caplog.text  # those of one batch are one
    assert "claiming no jobs until a single one works: jobs fail: the device" in caplog.text
    assert "a job works: claiming jobs again" in caplog.text
    assert len(backend.begun) == 52


def test_one_bad_job_does_not_stop_a_worker(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 0.01)
    bad = site.submit(fail="internal", retries=2 * OPEN_FAILURES)
    site.burst()
    assert bad.status().value == "failed"
    assert site.hash(bad)["chatjobs_attempt"] == str(2 * OPEN_FAILURES + 1)
    assert "claiming no jobs" not in caplog.text


def test_bad_jobs_fail_after_their_retries_and_the_burst_ends(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.queue.circuit_breaker.BREAKER_PAUSE_SECONDS", (0.01, 0.02))
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 0.01)
    bad = site.submit_many(["a", "b", "c", "d"], fail="internal")
    good = site.submit("good")
    site.burst(FakeBackend(max_batch=4))
    assert {job.status().value for job in bad} == {"failed"}
    assert good.status().value == "finished"
    assert "claiming no jobs" in caplog.text


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), MemoryError(), JobError("internal", "no")]
)
def test_a_start_that_fails_for_another_reason_is_retried(
    site: Site,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    monkeypatch.setattr("worker.queue.circuit_breaker.BREAKER_PAUSE_SECONDS", (0.01, 0.02))
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 0.01)

    class Starting(FakeBackend):
        tried = 0

        def submit(self, operation: Operation, request: Any, sink: Sink) -> Any:
            self.tried += 1
            if self.tried <= 6:
                raise error
            return super().submit(operation, request, sink)

    jobs = site.submit_many([f"q{i}" for i in range(20)], retries=6)
    backend = Starting()
    site.burst(backend)
    assert [job.result(timeout=1).text for job in jobs] == [text_of(job.request) for job in jobs]
    assert backend.tried == 26
    assert "3 failures in a row: claiming no jobs" in caplog.text
    failures = [failure for job in jobs for failure in site.row(job)["failures"] or []]
    assert [failure["code"] for failure in failures] == ["internal"] * 6
    site.assert_settled(jobs)


def test_a_start_that_fails_uses_the_retries_of_the_job(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 0.01)
    jobs = [site.submit(panic=1, retries=0), site.submit(panic=1, retries=1)]
    site.burst()
    assert [site.hash(job)["chatjobs_attempt"] for job in jobs] == ["1", "2"]
    for job in jobs:
        with pytest.raises(JobError, match="PanicException"):
            job.result(timeout=1)


def state(breaker: CircuitBreaker) -> tuple[bool, bool, str]:
    return breaker.half_open, breaker.may_claim(), breaker.reason


def fail(breaker: CircuitBreaker, job: str = "a", error: JobError = ERROR) -> None:
    """A job that was started now fails before its first token."""
    breaker.ended(job, Outcome(error=error), breaker.epoch, generated=False)


def test_only_what_started_after_a_failure_shows_recovery() -> None:
    breaker = CircuitBreaker()
    before = breaker.epoch
    for _ in range(OPEN_FAILURES):
        fail(breaker)
    breaker.generates(before)  # it was running already
    breaker.ended("b", Outcome(), before, generated=True)
    assert state(breaker) == (True, False, "jobs cannot be started: OSError: no memory")
    breaker.generates(breaker.epoch)
    assert state(breaker) == (False, True, "")


@pytest.mark.parametrize("generated", [False, True])
def test_a_device_that_fails_after_the_first_token_works_when_a_job_succeeds(
    generated: bool,
) -> None:
    breaker = CircuitBreaker()
    internal = Outcome(error=JobError("internal", "NaN"))
    for job in ("a", "b", "c"):
        breaker.generates(breaker.epoch)
        breaker.ended(job, internal, breaker.epoch, generated=generated)
    assert breaker.reason == "jobs fail: NaN"
    breaker.generates(breaker.epoch)
    assert breaker.half_open is generated
    breaker.ended("d", Outcome(), breaker.epoch, generated=True)
    assert state(breaker) == (False, True, "")


def test_errors_of_requests_and_successes_between_do_not_stop_a_worker() -> None:
    breaker = CircuitBreaker()
    for job in "abcdef":
        for code in ("internal", "invalid_request", "cancelled", "out_of_memory"):
            fail(breaker, job, JobError(code, "x"))
        if job in "bd":
            breaker.ended("good", Outcome(), breaker.epoch, generated=True)
        assert not breaker.half_open


def test_one_probe_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.queue.circuit_breaker.BREAKER_PAUSE_SECONDS", (0.0, 0.0))
    breaker = CircuitBreaker()
    breaker.claimed()
    assert breaker.may_claim()
    fail(breaker)
    breaker.settled()
    assert breaker.may_claim()
    breaker.claimed()
    assert not breaker.may_claim()
    breaker.settled()  # cancelled, say: it shows nothing
    assert breaker.may_claim()
    assert breaker.half_open

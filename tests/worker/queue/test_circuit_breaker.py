"""A machine on which no process can be started does not fail the jobs of others."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from jobs import JobError, keys
from jobs.api.request import ChatRequest
from tests.worker.fake_backend import FakeBackend, text_of
from tests.worker.site import Site, wait_until
from worker.backend import MachineError, Outcome, Sink
from worker.engine.preparer import Preparation
from worker.queue.circuit_breaker import OPEN_FAILURES, CircuitBreaker
from worker.queue.rq_store import MAX_MACHINE_ERRORS

ERROR = MachineError("internal", "OSError: no memory")


class Recovering(FakeBackend):
    """Cannot fork for the first starts."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.tried: list[str] = []
        self.statuses: list[Any] = []
        self._failures = failures
        self.site: Site | None = None

    def submit(self, request: ChatRequest, sink: Sink) -> Any:
        self.tried.append(str(request.job.id))
        self.sick = len(self.tried) <= self._failures
        return super().submit(request, sink)

    def memory(self) -> Any:  # called at each check
        if self.site is not None:
            found = self.site.redis.zrange(keys.WORKERS, 0, -1)
            value = found and self.site.redis.get(keys.worker(found[0].decode()))
            self.statuses += [json.loads(value)["paused"]] if value else []
        return super().memory()


def test_jobs_of_a_sick_worker_wait_for_its_recovery(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    jobs = site.submit_many([f"q{i}" for i in range(40)])
    backend = Recovering(failures=4)
    backend.site = site
    site.burst(backend)
    assert [job.result(timeout=1).text for job in jobs] == [text_of(job.request) for job in jobs]
    assert len(backend.tried) == 44
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert "3 jobs in a row could not be started (OSError: [Errno 12]" in messages
    assert "a job works: claiming jobs again" in messages
    assert any("jobs cannot be started" in status for status in backend.statuses)
    assert {site.hash(job).get("chatjobs_retried") for job in jobs} == {None}
    site.assert_settled(jobs)


def test_a_sick_worker_leaves_the_jobs_to_a_healthy_one(site: Site) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(200)])
    sick = site.worker(sick=True)
    wait_until(lambda: "3 jobs in a row could not be started" in sick.output)
    assert {job.status().over for job in jobs} == {False}
    healthy = site.worker()
    wait_until(lambda: all(job.status().over for job in jobs))
    assert [job.result(timeout=1).text for job in jobs] == [text_of(job.request) for job in jobs]
    assert (sick.stop(), healthy.stop()) == (0, 0)
    site.assert_settled(jobs)
    assert {row["status"] for row in site.rows()} == {"ok"}


def test_a_job_that_no_machine_can_run_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.queue.circuit_breaker.PAUSE_SECONDS", (0.01, 0.02))
    monkeypatch.setattr("worker.queue.attempts.RETRY_SECONDS", 0.0)
    bad, good = site.submit(unforkable=1), site.submit("good")
    site.burst()
    assert good.status().value == "finished"
    with pytest.raises(JobError, match="Cannot allocate memory") as failure:
        bad.result(timeout=1)
    assert failure.value.code == "internal"
    assert site.hash(bad)["chatjobs_machine_errors"] == str(MAX_MACHINE_ERRORS)


def test_a_prompt_whose_process_cannot_start_is_the_machine_s_fault() -> None:
    class Engine:
        def submit(self, request: ChatRequest, sink: Sink) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

    class Ends:
        outcome: Outcome | None = None

        def ended(self, outcome: Outcome) -> None:
            self.outcome = outcome

    sink = Ends()
    request = ChatRequest(model="fake", messages=[{"role": "user", "content": "hi"}])
    Preparation(Engine(), request, sink).run()  # type: ignore[arg-type]
    assert sink.outcome is not None
    assert isinstance(sink.outcome.error, MachineError)


def state(breaker: CircuitBreaker) -> tuple[bool, bool, str]:
    return breaker.half_open, breaker.may_claim(), breaker.reason


def test_only_what_started_after_a_failure_shows_recovery() -> None:
    breaker = CircuitBreaker()
    before = breaker.generation
    for _ in range(OPEN_FAILURES):
        breaker.failed(ERROR)
    breaker.worked(before)  # it was running already
    assert state(breaker) == (True, False, "jobs cannot be started: OSError: no memory")
    breaker.worked(breaker.generation)
    assert state(breaker) == (False, True, "")


def test_one_probe_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.queue.circuit_breaker.PAUSE_SECONDS", (0.0, 0.0))
    breaker = CircuitBreaker()
    breaker.claimed()
    assert breaker.may_claim()
    breaker.failed(ERROR)
    breaker.settled()
    assert breaker.may_claim()
    breaker.claimed()
    assert not breaker.may_claim()
    breaker.settled()  # cancelled, say: it shows nothing
    assert breaker.may_claim()
    assert breaker.half_open

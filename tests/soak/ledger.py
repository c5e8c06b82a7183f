"""The ledger of a soak: the promises that producers got, and the outcomes that they saw."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jobs.api.request import ChatRequest
from tests.worker.fake_backend import text_of


@dataclass(slots=True)
class Submitted:
    """One job. Times are of time.monotonic."""

    request: ChatRequest
    durable: bool
    submitted_at: float = 0.0  # when the submit that succeeded was called
    confirmed_at: float | None = None  # and when it returned
    cancelled: bool = False  # was asked for
    stream: str | None = None  # "whole", an error code, or what is wrong with it
    stream_ended_at: float | None = None

    @property
    def id(self) -> str:
        return str(self.request.job.id)

    @property
    def texts(self) -> dict[int, str]:
        """The answer of the fake backend, by choice."""
        return {i: text_of(self.request, i) for i in range(self.request.n or 1)}

    @property
    def fails_with(self) -> str | None:
        control = self.request.metadata or {}
        return "worker_lost" if "kill" in control else control.get("fail")


@dataclass(slots=True)
class Ledger:
    """Shared by the threads of a soak."""

    jobs: dict[str, Submitted] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)  # of submits, by error code
    faults: Counter[str] = field(default_factory=Counter)
    peak_memory: int = 0  # of Redis, in bytes
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, content: dict[str, Any], durable: bool) -> Submitted:
        job = Submitted(ChatRequest.parse(content), durable)
        with self.lock:
            self.jobs[job.id] = job
        return job

    def confirm(self, jobs: list[Submitted], submitted_at: float) -> None:
        for job in jobs:
            job.submitted_at, job.confirmed_at = submitted_at, time.monotonic()

    def refused(self, code: str) -> None:
        with self.lock:
            self.refusals[code] += 1

    def confirmed(self) -> list[Submitted]:
        with self.lock:
            return [job for job in self.jobs.values() if job.confirmed_at is not None]

"""Detects a dead or hung engine, and collects its load figures."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from jobs.errors import JobError
from worker.backend import Backend


class Watchdog:
    """Checks a backend. An engine with work that makes no step for `hang_seconds` is hung.

    `report`: start time of the worker and, after a check, device, memory and load of the engine.
    """

    def __init__(self, backend: Backend, hang_seconds: float) -> None:
        self._backend, self._hang_seconds = backend, hang_seconds
        self._progress, self._progress_at = -1, time.monotonic()
        self._tokens, self._checked_at = 0, time.monotonic()
        self.report: dict[str, Any] = {"started_at": time.time()}

    def hangs(self, now: float) -> bool:
        """Check the engine at the monotonic time `now`; True if it hangs. Raises JobError if its
        thread has died."""
        health = self._backend.health()
        if not health.alive:
            raise JobError("internal", f"the engine thread died: {health.error}")
        idle = not health.running and not health.waiting
        if idle or health.progress != self._progress:
            self._progress, self._progress_at = health.progress, now
        memory = self._backend.memory()
        tokens, seconds = health.tokens_generated - self._tokens, now - self._checked_at
        self._tokens, self._checked_at = health.tokens_generated, now
        self.report |= {
            "device": memory.device,
            "memory": asdict(memory),
            "running": health.running,
            "waiting": health.waiting,
            "tokens": health.tokens_generated,
            "tokens_per_second": round(tokens / seconds, 1) if seconds > 0 else 0.0,
        }
        return now - self._progress_at > self._hang_seconds

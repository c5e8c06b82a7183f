"""Whether the engine lives and moves on, and what it says about itself."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from jobs.errors import JobError
from worker.backend import Backend


class Watchdog:
    """Takes the backend's pulse. An engine that is busy and makes no step for `hang_seconds` hangs.

    `said` is what the worker tells about it: device, memory, sequences, tokens per second.
    """

    def __init__(self, backend: Backend, hang_seconds: float) -> None:
        self._backend, self._hang_seconds = backend, hang_seconds
        self._progress, self._moved_at = -1, time.monotonic()
        self._tokens, self._taken_at = 0, time.monotonic()
        self.said: dict[str, Any] = {"started_at": time.time()}

    def take(self, now: float) -> bool:
        """Whether the engine hangs. Raises JobError if its thread has died."""
        health = self._backend.health()
        if not health.alive:
            raise JobError("internal", f"the engine thread died: {health.error}")
        idle = not health.running and not health.waiting
        if idle or health.progress != self._progress:
            self._progress, self._moved_at = health.progress, now
        memory = self._backend.memory()
        tokens, seconds = health.tokens_generated - self._tokens, now - self._taken_at
        self._tokens, self._taken_at = health.tokens_generated, now
        self.said |= {
            "device": memory.device,
            "memory": asdict(memory),
            "running": health.running,
            "waiting": health.waiting,
            "tokens": health.tokens_generated,
            "tokens_per_second": round(tokens / seconds, 1) if seconds > 0 else 0.0,
        }
        return now - self._moved_at > self._hang_seconds

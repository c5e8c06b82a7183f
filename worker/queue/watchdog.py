"""Detects a worker that hangs: its engine, or its loop."""

from __future__ import annotations

import time

from worker.backend import Backend


class Watchdog:
    """Checks a backend and the loop that serves it.

    An engine hangs if it has work and makes no step for `hang_seconds`; a model that loads is a
    step at any moment. A loop hangs if it does not call `touch` for that long.
    """

    def __init__(self, backend: Backend, hang_seconds: float) -> None:
        self._backend, self._hang_seconds = backend, hang_seconds
        self._progress, self._progress_at = -1, time.monotonic()
        self._touched_at = time.monotonic()

    def touch(self) -> None:
        """The loop runs."""
        self._touched_at = time.monotonic()

    def restart(self, now: float) -> None:
        """Count from the monotonic time `now`: before it, nothing in this process could run, as
        while it was suspended (SIGSTOP, `docker pause`)."""
        self._progress_at = self._touched_at = now

    def round_seconds(self, now: float) -> float:
        """Seconds since the loop has begun its round, at the monotonic time `now`."""
        return now - self._touched_at

    def hang(self, now: float) -> str | None:
        """Check at the monotonic time `now`. Returns a sentence that names what hangs, or None. An
        engine whose thread has ended does not hang."""
        health = self._backend.health()
        idle = not health.running and not health.waiting
        if idle or health.loading or not health.alive or health.progress != self._progress:
            self._progress, self._progress_at = health.progress, now
        if now - self._progress_at > self._hang_seconds:
            return f"the engine has work but made no progress for {self._hang_seconds:g} s"
        if now - self._touched_at > self._hang_seconds:
            return f"the worker's loop made no progress for {self._hang_seconds:g} s"
        return None

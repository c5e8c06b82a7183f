"""The readiness of a worker, which /readyz shows: it claims jobs, or the reason why it does not."""

from __future__ import annotations

import time
from collections.abc import Callable

from jobs.store.worker_status import ResultsStatus
from worker.queue.claimer import Claimer
from worker.queue.load_figures import LoadFigures
from worker.queue.loop import WorkerLoop
from worker.queue.watchdog import Watchdog

BLOCKED_SECONDS = 5.0  # a round of the loop that takes longer waits for Redis, or for a start


class Readiness:
    """Read by the HTTP server's thread; waits for nothing. `recording`: the state of the worker's
    recorder; None if it writes no rows."""

    def __init__(
        self,
        loop: WorkerLoop,
        claimer: Claimer,
        watchdog: Watchdog,
        recording: Callable[[], ResultsStatus | None],
        loads: Callable[[], LoadFigures],
    ) -> None:
        self._loop, self._claimer, self._watchdog = loop, claimer, watchdog
        self._recording, self._loads = recording, loads

    @property
    def obstacle(self) -> str:
        """Why the worker claims no jobs, or should get none; "" if it claims them."""
        if self._loop.stop_at is not None:
            return "stopping: claims no more jobs"
        if not self._loop.serves:
            return "starting, or ending: claims no jobs"
        if self._loop.redis_fails:
            return "Redis fails"
        if (seconds := self._watchdog.round_seconds(time.monotonic())) > BLOCKED_SECONDS:
            return f"the loop has been waiting for {seconds:.0f} s: for Redis, or for a slow start"
        if reason := self._claimer.sick or self._claimer.pause:
            return f"claims no jobs: {reason}"
        results = self._recording()
        if results is not None and results["error"]:
            return f"can't write rows: {results['error']}"
        return self._loads().overdue

"""Scores chunks of rows in several child processes at once, and yields them in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import LifoQueue
from typing import Self, TypeVar

from jobs.scores.outcome import Row
from jobs.scores.process import Limits, MetricProcess, Scoring
from jobs.scores.spec import Spec

Chunk = TypeVar("Chunk")


class ScoringPool:
    """Owns the child processes of one metric; a thread waits for each. A child starts when no other
    is idle."""

    def __init__(self, spec: Spec, limits: Limits, processes: int) -> None:
        self._count = processes
        self._all = [MetricProcess(spec, limits) for _ in range(processes)]
        self._idle: LifoQueue[MetricProcess] = LifoQueue()
        for one in self._all:
            self._idle.put(one)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="score")

    def __enter__(self) -> Self:
        """Start the first child. Raises InvalidRequest if the metric can't be made."""
        self._all[-1].start()
        return self

    def __exit__(self, *raised: object) -> None:
        for one in self._all:
            one.stop()
        self._threads.shutdown(cancel_futures=True)
        for one in self._all:
            one.close()

    def map(
        self, chunks: Iterable[tuple[Chunk, Sequence[Row]]]
    ) -> Iterator[tuple[Chunk, list[Scoring]]]:
        """Each chunk with the scorings of its rows. Twice as many chunks as processes are read
        ahead."""
        waiting: deque[tuple[Chunk, Future[list[Scoring]]]] = deque()
        for chunk, rows in chunks:
            waiting.append((chunk, self._threads.submit(self._score, rows)))
            if len(waiting) > 2 * self._count:
                first, scored = waiting.popleft()
                yield first, scored.result()
        for first, scored in waiting:
            yield first, scored.result()

    def _score(self, rows: Sequence[Row]) -> list[Scoring]:
        process = self._idle.get()
        try:
            return process.score(rows)
        finally:
            self._idle.put(process)

"""Counts what has become of the jobs of this worker, and how long they took, since its start.

The times are those of a job's row (docs/schema.md): they are added once, when the job has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence

from jobs.errors import JobError
from jobs.results.values import seconds_between
from jobs.store.settlement import Settlement
from worker.backend import Outcome


def _bounds(first: int, last: int) -> list[float]:
    """1, 2.5 and 5 times each power of ten, from 10**first to 10**last."""
    return [round(part * 10.0**power, 6) for power in range(first, last) for part in (1, 2.5, 5)]


# Upper bounds of the buckets, in seconds, by figure.
BOUNDS = {
    "queue_s": _bounds(-2, 6),  # bulk jobs may wait for days
    "ttft_s": _bounds(-3, 3),
    "tpot_s": _bounds(-4, 1),
    "duration_s": _bounds(-2, 5),
}


class Histogram:
    """Observed values, counted by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above all bounds
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class JobFigures:
    """The loop's thread adds; any thread reads. Models are named as in `ModelInfo.name`.

    finished: jobs by model and finish reason. errors: jobs that have ended with an error, or were
    cancelled, by model and code. retries: attempts that were followed by another one, by model and
    code. lost_leases: attempts that were dropped because another worker has taken the job.
    """

    def __init__(self) -> None:
        self.finished: Counter[tuple[str, str]] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self.retries: Counter[tuple[str, str]] = Counter()
        self.lost_leases = 0
        # By figure, then by model; all figures exist from the first job of a model on.
        self.seconds: dict[str, defaultdict[str, Histogram]] = {
            name: defaultdict(lambda bounds=bounds: Histogram(bounds))  # type: ignore[misc]
            for name, bounds in BOUNDS.items()
        }

    def ended(self, model: str, settlement: Settlement, outcome: Outcome | None) -> None:
        """A job has ended. `outcome`: None if it was not started."""
        if settlement.answer is not None:
            self.finished[model, settlement.answer.finish_reason] += 1
        elif settlement.error is not None:
            self.errors[model, settlement.error.code] += 1
        if outcome is None:
            return
        claimed, first, last = settlement.claimed, outcome.first_token_at, outcome.finished_at
        queued = claimed.enqueued_at - claimed.redis_ahead
        self._add("queue_s", model, seconds_between(queued, outcome.started_at))
        self._add("ttft_s", model, seconds_between(outcome.started_at, first))
        self._add("duration_s", model, seconds_between(outcome.started_at, last))
        longest = max(map(len, outcome.output_token_ids), default=0)
        whole = seconds_between(first, last)
        if whole is not None and longest > 1:
            self._add("tpot_s", model, whole / (longest - 1))

    def retried(self, model: str, error: JobError) -> None:
        """A job returns to its queue after an error."""
        self.retries[model, error.code] += 1

    def _add(self, figure: str, model: str, seconds: float | None) -> None:
        if seconds is not None:
            self.seconds[figure][model].add(seconds)

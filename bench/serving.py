"""Latency and throughput of requests that are served together, from the times at which they were
submitted and at which their tokens came."""

from __future__ import annotations

import math
from typing import NamedTuple


class Served(NamedTuple):
    """Seconds from the beginning of a run, per request. Tokens that end no character may be missing
    in `arrivals`: some engines stream text only."""

    submitted: list[float]
    arrivals: list[list[float]]

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self.arrivals)

    def first_token_seconds(self) -> list[float]:
        """From submit to the first token of each request."""
        return [
            times[0] - submitted
            for submitted, times in zip(self.submitted, self.arrivals, strict=True)
        ]

    def prefilled_at(self) -> float:
        """When the last request got its first token."""
        return max(times[0] for times in self.arrivals)

    def decode_rate(self) -> float | None:
        """Tokens per second while all requests decode: from the last first token to the first
        request's end. None if an answer ended before the last prompt was read."""
        begin, end = self.prefilled_at(), min(times[-1] for times in self.arrivals)
        tokens = sum(begin < one <= end for times in self.arrivals for one in times)
        return tokens / (end - begin) if end > begin else None


def percentile(figures: list[float], share: float) -> float:
    """The smallest figure that at least `share` of all do not exceed."""
    return sorted(figures)[max(0, math.ceil(len(figures) * share) - 1)]

"""Figures of a load from the times of its requests, defined and named as by vllm bench serve."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs import ChatChunk, ChatCompletion

SHARES = (50, 90, 99)  # percentiles
LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(slots=True)
class Timeline:
    """One request of a load. Times are seconds after the begin of the load.

    sent: when it was submitted. chunks: when a part of its answer came. ended: when its stream
    ended. error: the code of its error, if it failed.
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    def take(self, chunk: ChatChunk, now: float) -> None:
        """A chunk has come. One whose job has started again discards those before."""
        if chunk.reset:
            self.chunks.clear()
        deltas = [choice.delta for choice in chunk.choices]
        if any(one.content or one.reasoning_content or one.tool_calls for one in deltas):
            self.chunks.append(now)

    def complete(self, completion: ChatCompletion, now: float) -> None:
        """The stream has ended with a completion."""
        self.ended = now
        if completion.usage is not None:
            self.input_tokens = completion.usage.prompt_tokens
            self.output_tokens = completion.usage.completion_tokens

    def fail(self, code: str, now: float) -> None:
        """The request has failed."""
        self.ended, self.error = now, code

    @property
    def e2el(self) -> float:
        return self.ended - self.sent

    @property
    def ttft(self) -> float | None:
        """None for an answer without text."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in pairwise(self.chunks)]


def percentile(values: Sequence[float], share: float) -> float:
    """The percentile of values, interpolated between the two nearest as numpy does by default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def peak_concurrency(timelines: Iterable[Timeline]) -> int:
    """The most requests that were in flight at one time."""
    steps = [step for one in timelines for step in ((one.sent, 1), (one.ended, -1))]
    peak = running = 0
    for _, step in sorted(steps):  # at the same time ends come first
        running += step
        peak = max(peak, running)
    return peak


def figures_of(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The figures of a load that has ended. Tokens and latencies are those of the requests that did
    not fail; a latency that none of them has is None."""
    done = [one for one in timelines if one.error is None]
    errors = Counter(one.error for one in timelines if one.error is not None)
    duration = max(one.ended for one in timelines)
    tokens_in = sum(one.input_tokens for one in done)
    tokens_out = sum(one.output_tokens for one in done)
    chunks = sum(len(one.chunks) for one in done)
    found: dict[str, Any] = {
        "completed": len(done),
        "failed": len(timelines) - len(done),
        "errors": dict(errors.most_common()),
        "duration": duration,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / duration,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_concurrent_requests": peak_concurrency(timelines),
        "tokens_per_chunk": tokens_out / chunks if chunks else None,
    }
    for name in LATENCIES:
        values = _values(done, name)
        found[f"mean_{name}_ms"] = 1000 * fmean(values) if values else None
        found[f"median_{name}_ms"] = 1000 * percentile(values, 50) if values else None
        for share in SHARES:
            key = f"p{share}_{name}_ms"
            found[key] = 1000 * percentile(values, share) if values else None
    return found


def _values(done: Sequence[Timeline], name: str) -> list[float]:
    """One latency of each request, in seconds; `itl` has those between all chunks."""
    if name == "itl":
        return [seconds for one in done for seconds in one.itl]
    return [value for one in done if (value := getattr(one, name)) is not None]

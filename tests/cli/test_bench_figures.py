"""The figures of `chatjobs bench`, and the arrivals of its requests."""

from __future__ import annotations

import math
import random
from statistics import fmean

import numpy as np
import pytest

from jobs.api.chunk import ChatChunk, ChoiceDelta, ChunkChoice
from jobs.cli.benchmark.figures import Timeline, figures_of, peak_concurrency, percentile
from jobs.cli.benchmark.load import due_times


def chunk(content: str | None = None, reset: bool = False, role: bool = False) -> ChatChunk:
    delta = ChoiceDelta(content=content, role="assistant" if role else None)
    choices = [] if reset else [ChunkChoice(index=0, delta=delta)]
    return ChatChunk(id="x", created=0, model="m", choices=choices, reset=reset or None)


def timeline(sent: float, chunks: list[float], ended: float, tokens: int) -> Timeline:
    return Timeline(sent, chunks, ended, input_tokens=10, output_tokens=tokens)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("share", [0, 50, 90, 99, 100])
def test_percentiles_are_those_of_numpy(count: int, share: float) -> None:
    values = [random.Random(count).random() for _ in range(count)]
    assert percentile(values, share) == pytest.approx(np.percentile(values, share))


def test_figures_of_a_load() -> None:
    failed = Timeline(0.0, [1.0], 2.0, error="timeout")
    found = figures_of(
        [
            timeline(0.0, [1.0, 1.5, 3.0], 4.0, tokens=4),
            timeline(1.0, [1.5], 2.0, tokens=1),
            failed,
        ]
    )
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"timeout": 1})
    assert (found["duration"], found["request_throughput"]) == (4.0, 0.5)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 5)
    assert (found["output_throughput"], found["total_token_throughput"]) == (1.25, 6.25)
    assert found["max_concurrent_requests"] == 3
    assert found["tokens_per_chunk"] == 5 / 4
    ttft, e2el = [1.0, 0.5], [4.0, 1.0]
    assert found["mean_ttft_ms"] == pytest.approx(1000 * fmean(ttft))
    assert found["mean_e2el_ms"] == pytest.approx(1000 * fmean(e2el))
    assert found["p90_e2el_ms"] == pytest.approx(1000 * np.percentile(e2el, 90))
    assert found["median_e2el_ms"] == found["p50_e2el_ms"] == pytest.approx(2500)
    assert found["mean_tpot_ms"] == pytest.approx(1000)  # that of the one with several tokens
    assert found["mean_itl_ms"] == pytest.approx(1000)  # of 0.5 and 1.5 s
    assert found["p99_itl_ms"] == pytest.approx(1000 * np.percentile([0.5, 1.5], 99))


def test_a_load_without_an_answer_has_no_latency() -> None:
    found = figures_of([Timeline(0.0, [], 2.0, error="timeout")])
    assert found["mean_ttft_ms"] is found["p99_e2el_ms"] is found["tokens_per_chunk"] is None
    assert found["request_throughput"] == 0


def test_only_chunks_with_output_count_and_a_restart_discards_those_before() -> None:
    one = Timeline(0.0)
    given = [chunk(role=True), chunk("a"), chunk("b"), chunk(reset=True), chunk("c")]
    seen: list[list[float]] = []
    for number, each in enumerate(given):
        one.take(each, float(number))
        seen.append([*one.chunks])
    assert seen == [[], [1.0], [1.0, 2.0], [], [4.0]]


def test_a_request_that_begins_when_another_one_ends_does_not_run_beside_it() -> None:
    times = [(0.0, 1.0), (1.0, 3.0), (3.0, 4.0)]
    assert peak_concurrency(timeline(sent, [], end, 1) for sent, end in times) == 1
    times.append((2.0, 4.0))
    assert peak_concurrency(timeline(sent, [], end, 1) for sent, end in times) == 2


def test_arrivals_are_a_poisson_process_of_the_rate_and_the_seed() -> None:
    due = due_times(10_001, 4.0, seed=1)
    gaps = np.diff(due)
    assert due[0] == 0.0 and len(due) == 10_001
    assert fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert float(np.std(gaps)) == pytest.approx(0.25, rel=0.05)  # as exponential gaps have it
    assert due == due_times(10_001, 4.0, seed=1)
    assert due != due_times(10_001, 4.0, seed=2)
    assert due_times(3, math.inf, seed=1) == [0.0, 0.0, 0.0]

"""`chatjobs bench --local`: serves a load with an engine, on the thread of the command."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from jobs.cli.benchmark.figures import Timeline
from jobs.errors import JobError
from jobs.stream.chunks import ChunkBuilder

if TYPE_CHECKING:
    from jobs.cli.benchmark.load import Load
    from worker import Engine
    from worker.local.collect import CollectingSink


class _Running(NamedTuple):
    """A request that has not ended."""

    timeline: Timeline
    sink: CollectingSink
    chunks: ChunkBuilder


def serve(engine: Engine, load: Load, ended: Callable[[], None]) -> list[Timeline]:
    """Submit each request when it is due, step the engine until all have ended, and note when their
    chunks come. `ended` is called for each request."""
    from worker.local.collect import CollectingSink

    most = load.max_concurrency or len(load.requests)
    waiting = deque(zip(load.requests, load.due, strict=True))
    running: list[_Running] = []
    timelines: list[Timeline] = []
    begin = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - begin

    while waiting or running:
        while waiting and len(running) < most and waiting[0][1] <= now():
            request, _ = waiting.popleft()
            timeline, sink = Timeline(now()), CollectingSink()
            timelines.append(timeline)
            try:
                engine.submit(request, sink)
            except JobError as error:
                timeline.fail(error.code, now())
                ended()
                continue
            chunks = ChunkBuilder(None, request.model, 0)
            running.append(_Running(timeline, sink, chunks))
        if not running:
            time.sleep(max(0.0, waiting[0][1] - now()) if waiting else 0.0)
            continue
        engine.step()
        for one in list(running):
            if deltas := one.sink.take():
                one.timeline.take(one.chunks.chunk(deltas), now())
            if one.sink.over:
                running.remove(one)
                _end(one, now())
                ended()
    return timelines


def _end(one: _Running, now: float) -> None:
    try:
        one.timeline.complete(one.sink.completion(), now)
    except JobError as error:
        one.timeline.fail(error.code, now)

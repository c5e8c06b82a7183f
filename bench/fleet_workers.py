"""The workers of `bench.fleet`: `worker.service.serve` on threads, with a backend without cost."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jobs.api.answer import AssistantMessage, ChatCompletion, Choice, Usage
from jobs.api.sampling import Sampling
from jobs.operations import OPERATIONS, Operation, Request
from jobs.stream.delta import Delta
from worker import service
from worker.backend import (
    Backend,
    Handle,
    Health,
    MemoryUse,
    ModelInfo,
    Outcome,
    Progress,
    Sink,
)
from worker.model_spec import ModelSpec
from worker.queue import loop
from worker.queue.loop import WorkerLoop

STEP_SECONDS = 0.025  # between two chunks of an answer: each becomes an entry of its stream
# The loop waits this long for events while jobs run. The benchmark's jobs have none until they end,
# and 50 workers share an interpreter.
BUSY_SECONDS = 0.1


class Orders(NamedTuple):
    """Signals of the benchmark to its workers."""

    release: Event  # jobs may end
    stop: Event


class _Running:
    """One request, and its assembly. It ends after its chunks, once jobs may end."""

    def __init__(self, request: Request, sink: Sink) -> None:
        self.request, self._sink = request, sink
        self._made: deque[Progress] = deque()
        self._chunks = 20 if request.publishes else 1
        self._sent = 0
        self._began = time.time()

    def cancel(self) -> None:
        self._add(Progress((), self._outcome()))

    def take(self) -> Progress:
        deltas: list[Delta] = []
        outcome: Outcome | None = None
        while self._made:
            more, outcome = self._made.popleft()
            deltas += more
        return Progress(deltas, outcome)

    def step(self) -> bool:
        """Emit a chunk. True after the last one."""
        self._sent += 1
        last = self._sent == self._chunks
        content = f"word {self._sent}, "
        delta = Delta(0, content=content, finish_reason="stop" if last else None)
        self._add(Progress([delta], self._outcome() if last else None))
        return last

    def _add(self, progress: Progress) -> None:
        self._made.append(progress)
        self._sink.pending(self)

    def _outcome(self) -> Outcome:
        text = "".join(f"word {i}, " for i in range(1, self._sent + 1))
        message = AssistantMessage(content=text)
        completion = ChatCompletion(
            id=f"chatcmpl-{self.request.job.id}",
            created=int(self._began),
            model=self.request.model,
            choices=[Choice(index=0, message=message, finish_reason="stop")],
            usage=Usage(prompt_tokens=1, completion_tokens=20, total_tokens=21),
        )
        return Outcome(
            result=completion,
            prompt_token_ids=list(range(100)),
            output_token_ids=[list(range(20))],
            seed=1,
            started_at=self._began,
            first_token_at=self._began,
            finished_at=time.time(),
            sampling=Sampling(temperature=0),
        )


class NullBackend(Backend):
    """Holds requests until jobs may end. `step` is called by the process's one thread for it."""

    def __init__(self, batch: int) -> None:
        self._batch, self._steps = batch, 0
        self._running: list[_Running] = []
        self._lock = threading.Lock()

    @property
    def funcs(self) -> Collection[str]:
        return OPERATIONS.keys()

    def health(self) -> Health:
        return Health(True, self._steps, len(self._running), 0, self._steps, None)

    def memory(self) -> MemoryUse:
        return MemoryUse("cpu", weights=1, cache=0, cache_limit=0, free=1)

    def load(self, spec: ModelSpec) -> ModelInfo:
        info: dict[str, Any] = dict.fromkeys(ModelInfo.__dataclass_fields__, "none")
        info |= {"parameters": 1, "weight_bytes": 1, "context_length": 4096}
        return ModelInfo(**info | {"name": spec.reference, "reference": spec.reference})

    def room(self, model: str, *, bulk: bool = False) -> int:
        return max(0, self._batch - len(self._running))

    def submit(self, operation: Operation, request: Request, sink: Sink) -> Handle:
        running = _Running(request, sink)
        with self._lock:
            self._running.append(running)
        return running

    def close(self) -> None: ...

    def step(self, released: bool) -> None:
        self._steps += 1
        if released:
            with self._lock:
                running = list(self._running)
            ended = {id(one) for one in running if one.step()}
            with self._lock:
                self._running = [one for one in self._running if id(one) not in ended]


class _NoSignals:
    """Takes the place of `StopSignals`, which only the main thread may use."""

    loops: ClassVar[list[WorkerLoop]] = []

    def __init__(self, worker: WorkerLoop) -> None:
        self.loops.append(worker)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def _without_signals() -> Iterator[list[WorkerLoop]]:
    vars(service)["StopSignals"] = _NoSignals
    loop.BUSY_SECONDS = BUSY_SECONDS
    yield _NoSignals.loops


def serve_many(models: Sequence[str], batch: int, url: str, results: Path, orders: Orders) -> None:
    """Run one worker per model name given, until told to stop."""
    backends = [NullBackend(batch) for _ in models]
    with _without_signals() as loops:
        threads = [
            threading.Thread(
                target=service.serve,
                args=(backend, [ModelSpec(reference=model)]),
                kwargs={"redis_url": url, "results": results, "grace": 0.0, "part_seconds": 3600.0},
                daemon=True,
            )
            for backend, model in zip(backends, models, strict=True)
        ]
        for thread in threads:
            thread.start()
        while not orders.stop.wait(STEP_SECONDS):
            released = orders.release.is_set()
            for backend in backends:
                backend.step(released)
        for one in loops:
            one.request_stop()
        for thread in threads:
            thread.join(5.0)

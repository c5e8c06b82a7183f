"""A backend without a model: its own thread emits words derived from the request.

The request's `metadata` controls it; all values are strings:

    words   number of words to generate (default 5)
    fail    error code to fail with, after the first word
    refuse  "1": `submit` raises an error
    panic   "1": `submit` raises an exception that is not an Exception
    unforkable  "1": `submit` raises the OSError of a failed fork
    slow    seconds that `submit` takes
    block   seconds that `submit` holds the interpreter, as foreign code can
    block_cancel  the same of `cancel`
    kill    "1": `submit` kills this process, as a faulty driver would
    die     "1": the engine thread ends

A prompt whose last line begins with `say ` is answered by the rest of that line.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jobs import clock
from jobs.api.answer import AssistantMessage, ChatCompletion, Choice, Usage
from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from jobs.operations import OPERATIONS, Operation
from jobs.stream.delta import Delta
from tests.worker.panics import panic
from worker.backend import (
    Footprint,
    Health,
    MemoryUse,
    ModelInfo,
    Outcome,
    Progress,
    Reservation,
    Sink,
    TooLong,
)
from worker.model_spec import ModelSpec


def text_of(request: ChatRequest, choice: int = 0) -> str:
    """The text that the backend generates for a request."""
    return "".join(f"{word} " for word in words_of(request, choice, count_of(request)))


def count_of(request: ChatRequest) -> int:
    said = _said(request)
    return len(said) if said else int((request.metadata or {}).get("words", "5"))


def words_of(request: ChatRequest, choice: int, end: int, start: int = 0) -> list[str]:
    """The words from `start` to `end` of the text."""
    if said := _said(request):
        return said[start:end]
    seed = f"{request.messages[-1].text}/{choice}/"
    return [
        hashlib.sha256(f"{seed}{i}".encode("utf-8", "replace")).hexdigest()[:6]
        for i in range(start, end)
    ]


def _said(request: ChatRequest) -> list[str]:
    """The words that the prompt asks for; none if it does not."""
    last = request.messages[-1].text.rpartition("\n")[2]
    return last.removeprefix("say ").split() if last.startswith("say ") else []


def hold_interpreter(seconds: str | None) -> None:
    if seconds is not None:
        ctypes.PyDLL(None).sleep(int(seconds))


class FakeAssembly:
    """The progress that the backend's thread has made, until it is taken."""

    def __init__(self) -> None:
        self._made: deque[Progress] = deque()

    def add(self, progress: Progress) -> None:
        self._made.append(progress)

    def take(self) -> Progress:
        deltas: list[Delta] = []
        outcome: Outcome | None = None
        while self._made:
            more, outcome = self._made.popleft()
            deltas += more
        return Progress(deltas, outcome)


class FakeHandle:
    def __init__(self, request: ChatRequest, sink: Sink) -> None:
        self.request, self.sink, self.assembly = request, sink, FakeAssembly()
        self.control = request.metadata or {}
        self.n = request.n or 1
        self.count = count_of(request)
        self.words: list[list[str]] = [[] for _ in range(self.n)]  # sent
        self.sent = 0
        self.cancelled = False
        self.broken = False  # the device fails it before its first word
        self.started_at = clock.now()

    def cancel(self) -> None:
        hold_interpreter(self.control.get("block_cancel"))
        self.cancelled = True

    def step(self) -> bool:
        """Emit one word of each choice. Returns True when the request has ended."""
        if self.cancelled:
            self._fail(JobError("cancelled", "the request was cancelled"))
            return True
        if self.broken:
            self._fail(JobError("internal", "the device failed, requested by the test"))
            return True
        if self.sent == 1 and "fail" in self.control:
            self._fail(JobError(self.control["fail"], "requested by the test"))  # type: ignore[arg-type]
            return True
        last = self.sent == self.count - 1
        for i, words in enumerate(self.words):
            words += words_of(self.request, i, self.sent + 1, self.sent)
        deltas = [
            Delta(i, content=f"{words[self.sent]} ", finish_reason="stop" if last else None)
            for i, words in enumerate(self.words)
        ]
        self.sent += 1
        self._advance(deltas, self.outcome(None) if last else None)
        return last

    def _fail(self, error: JobError) -> None:
        self._advance((), self.outcome(error))

    def _advance(self, deltas: Sequence[Delta], outcome: Outcome | None) -> None:
        self.assembly.add(Progress(deltas, outcome))
        self.sink.pending(self.assembly)

    def outcome(self, error: JobError | None) -> Outcome:
        ids = [list(range(self.sent)) for _ in range(self.n)]
        completion = ChatCompletion(
            id=f"chatcmpl-{self.request.job.id}",
            created=int(self.started_at),
            model=self.request.model,
            choices=[
                Choice(
                    index=i,
                    message=AssistantMessage(
                        content="".join(f"{word} " for word in words[: self.sent])
                    ),
                    finish_reason="stop",
                )
                for i, words in enumerate(self.words)
            ],
            usage=Usage(
                prompt_tokens=1,
                completion_tokens=self.sent * self.n,
                total_tokens=1 + self.sent * self.n,
            ),
        )
        return Outcome(
            result=None if error else completion,
            error=error,
            partial=completion if error else None,
            prompt_token_ids=[7],
            output_token_ids=ids,
            seed=1,
            started_at=self.started_at,
            first_token_at=self.started_at,
            finished_at=clock.now(),
            sampling=Sampling(temperature=0),
        )


class FakeBackend:
    """Loads any model. `delay`: seconds per step; `hangs`: its thread blocks after the first word
    of any request; `sick`: `submit` cannot fork; `broken`: its device fails each request before
    the first word; `load_until`: loads end when this file exists; `budget`: bytes of its models,
    each of which takes 100, and 10 or 20 for its cache; `load_seconds`: of each load; `context`:
    of its models, whose tokens are words."""

    def __init__(
        self,
        max_batch: int = 8,
        delay: float = 0.001,
        hangs: bool = False,
        sick: bool = False,
        broken: bool = False,
        load_until: str = "",
        budget: int | None = None,
        load_seconds: float = 0.0,
        context: int = 4096,
    ) -> None:
        self._context = context
        self._budget, self._load_seconds = budget, load_seconds
        self.loaded: list[ModelSpec] = []  # all loads, in order
        self._reserved: dict[str, int] = {}  # bytes, by reference
        self.resident: dict[str, int] = {}  # bytes of the models in memory, by their names
        self.peak_bytes = 0  # of these
        self.missing: set[str] = set()  # references that can't be loaded now
        self.max_batch, self._delay, self._hangs = max_batch, delay, hangs
        self.sick, self.broken, self._load_until = sick, broken, load_until
        self.peak = 0  # maximum number of concurrent sequences
        self.begun: list[str] = []  # ids of submitted jobs, in order
        self.requests: list[ChatRequest] = []  # of these jobs
        self._handles: list[FakeHandle] = []
        self._lock = threading.Lock()
        self._steps = self._tokens = 0
        self._closing = threading.Event()
        self._begin = threading.Event()  # there are requests, or it closes
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    @property
    def funcs(self) -> Collection[str]:
        return OPERATIONS.keys()

    def health(self) -> Health:
        with self._lock:
            running = min(self.max_batch, self._sequences())
            waiting = self._sequences() - running
        alive = self._thread.is_alive()
        error = None if alive else "requested by the test"
        return Health(alive, self._steps, running, waiting, self._tokens, error)

    def memory(self) -> MemoryUse:
        return MemoryUse("cpu", weights=1, cache=0, cache_limit=0, free=1, budget=self._budget)

    def footprint(self, spec: ModelSpec) -> Footprint:
        name = spec.reference.rpartition("/")[2]
        return Footprint(name, spec.reference, 90, 10, least_cache=10, most_cache=20)

    def fetch(self, spec: ModelSpec) -> None:
        if spec.reference.startswith("gated"):
            raise JobError("model_not_found", f"{spec.reference} is gated")

    def reserve(self, spec: ModelSpec, reservation: Reservation) -> None:
        self._reserved[spec.reference] = reservation.fixed + reservation.cache

    def load(self, spec: ModelSpec) -> ModelInfo:
        self.loaded.append(spec)
        reference = spec.reference
        while self._load_until and not Path(self._load_until).exists():
            time.sleep(0.01)
        time.sleep(self._load_seconds)
        if reference.startswith("broken") or reference in self.missing:
            raise JobError("unsupported_model", f"{reference} can't be loaded")
        info: dict[str, Any] = dict.fromkeys(ModelInfo.__dataclass_fields__, "fake")
        info |= {"parameters": 1, "weight_bytes": 1, "context_length": self._context}
        info["takes_templates"] = spec.trust_request_chat_template
        info |= {"name": reference.rpartition("/")[2], "reference": reference}
        self.resident[info["name"]] = self._reserved.pop(reference, 100)
        self.peak_bytes = max(self.peak_bytes, sum(self.resident.values()))
        assert self._budget is None or self.peak_bytes <= self._budget
        return ModelInfo(**info)

    def unload(self, model: str, coming: ModelSpec | None = None) -> None:
        with self._lock:
            assert not [one for one in self._handles if one.request.model == model]
        del self.resident[model]

    def room(self, model: str, *, bulk: bool) -> int:
        with self._lock:
            return max(0, self.max_batch - self._sequences())

    def submit(self, operation: Operation, request: Any, sink: Sink) -> FakeHandle:
        control = request.metadata or {}
        if control.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if control.get("unforkable") or self.sick:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        if "slow" in control:
            print("a slow start", file=sys.stderr, flush=True)
            time.sleep(float(control["slow"]))
        hold_interpreter(control.get("block"))
        if control.get("refuse"):
            raise JobError("context_length_exceeded", "too long, requested by the test")
        words = len(request.messages[-1].text.split()) if isinstance(request, ChatRequest) else 0
        if words >= self._context:
            fact = f"{words} words exceed the context of {self._context}"
            raise TooLong(fact, "messages", words + 1)
        if control.get("panic"):
            panic()
        handle = FakeHandle(request, sink)
        handle.broken = self.broken
        with self._lock:
            self._handles.append(handle)
            self._begin.set()
            self.peak = max(self.peak, self._sequences())
        self.begun.append(str(request.job.id))
        self.requests.append(request)
        return handle

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            self._begin.set()
        self._thread.join(timeout=1)

    def _sequences(self) -> int:
        return sum(handle.n for handle in self._handles)

    def _loop(self) -> None:
        while self._begin.wait() and not self._closing.wait(self._delay):
            with self._lock:
                handles = list(self._handles)
                if not (handles or self._closing.is_set()):
                    self._begin.clear()
            if any(handle.control.get("die") for handle in handles):
                return
            for handle in handles:
                if self._hangs and handle.sent:
                    self._closing.wait()
                    return
                ended = handle.step()
                self._tokens += handle.n
                if ended:
                    with self._lock:
                        self._handles.remove(handle)
            self._steps += bool(handles)

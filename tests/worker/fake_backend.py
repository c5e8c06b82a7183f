"""A backend without a model: a real thread that emits words that the request decides.

What a request makes it do stands in the request's `metadata`, all values as text:

    words   how many words to say (default 5)
    fail    error code to fail with, after the first word
    refuse  "1": can't be run, as `submit` sees
    kill    "1": kill this process when the job is begun, as a bad driver would
    die     "1": kill the engine's thread when the job is begun
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from jobs.api.answer import AssistantMessage, ChatCompletion, Choice, Usage
from jobs.api.chunk import ChatChunk
from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from jobs.stream.delta import Delta
from worker.backend import Generation, Health, MemoryUse, ModelInfo, Outcome, Sink, Token


def text_of(request: ChatRequest, choice: int = 0) -> str:
    """What the backend says to a request."""
    prompt = request.messages[-1].text
    count = int((request.metadata or {}).get("words", "5"))
    seed = f"{prompt}/{choice}/"
    words = (
        hashlib.sha256(f"{seed}{i}".encode("utf-8", "replace")).hexdigest()[:6]
        for i in range(count)
    )
    return "".join(f"{word} " for word in words)


class FakeHandle:
    def __init__(self, request: ChatRequest, sink: Sink) -> None:
        self.request, self.sink = request, sink
        self.orders = request.metadata or {}
        self.n = request.n or 1
        self.words = [text_of(request, i).split(" ")[:-1] for i in range(self.n)]
        self.said = 0
        self.cancelled = False
        self.started_at = time.time()

    def cancel(self) -> None:
        self.cancelled = True

    def step(self) -> bool:
        """Say one word of each choice; True when the request has ended."""
        if self.cancelled:
            self._end(JobError("cancelled", "the request was cancelled"))
            return True
        if self.said == 1 and "fail" in self.orders:
            self._end(JobError(self.orders["fail"], "as it was told"))  # type: ignore[arg-type]
            return True
        last = self.said == len(self.words[0]) - 1
        self.sink.deltas(
            [
                Delta(i, content=f"{words[self.said]} ", finish_reason="stop" if last else None)
                for i, words in enumerate(self.words)
            ]
        )
        self.said += 1
        if last:
            self._end(None)
        return last

    def _end(self, error: JobError | None) -> None:
        ids = [list(range(self.said)) for _ in range(self.n)]
        answer = ChatCompletion(
            id=f"chatcmpl-{self.request.job.id}",
            created=int(self.started_at),
            model=self.request.model,
            choices=[
                Choice(
                    index=i,
                    message=AssistantMessage(
                        content="".join(f"{word} " for word in words[: self.said])
                    ),
                    finish_reason="stop",
                )
                for i, words in enumerate(self.words)
            ],
            usage=Usage(
                prompt_tokens=1,
                completion_tokens=self.said * self.n,
                total_tokens=1 + self.said * self.n,
            ),
        )
        self.sink.ended(
            Outcome(
                completion=None if error else answer,
                error=error,
                partial=answer if error else None,
                prompt_token_ids=[7],
                output_token_ids=ids,
                seed=1,
                started_at=self.started_at,
                first_token_at=self.started_at,
                finished_at=time.time(),
                sampling=Sampling(temperature=0),
            )
        )


class FakeBackend:
    """Serves any model it is told to load. `delay`: seconds of one step of the whole batch;
    `hangs`: its thread stands still when it has said the first word of anything."""

    name = "fake"

    def __init__(self, max_batch: int = 8, delay: float = 0.001, hangs: bool = False) -> None:
        self.max_batch, self._delay, self._hangs = max_batch, delay, hangs
        self.peak = 0  # most sequences at a time
        self.begun: list[str] = []  # job ids, in the order of their starts
        self._infos: dict[str, ModelInfo] = {}
        self._flights: list[FakeHandle] = []
        self._lock = threading.Lock()
        self._steps = self._tokens = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def health(self) -> Health:
        with self._lock:
            running = min(self.max_batch, self._sequences())
            waiting = self._sequences() - running
        alive = self._thread.is_alive()
        error = None if alive else "as it was told"
        return Health(alive, self._steps, running, waiting, self._tokens, error)

    def models(self) -> list[ModelInfo]:
        return list(self._infos.values())

    def memory(self) -> MemoryUse:
        return MemoryUse("cpu", weights=1, cache=0, cache_limit=0, free=1)

    def load(self, reference: str) -> ModelInfo:
        if reference.startswith("broken"):
            raise JobError("unsupported_model", f"{reference} can't be loaded")
        info: dict[str, Any] = dict.fromkeys(ModelInfo.__dataclass_fields__, "fake")
        info |= {"parameters": 1, "weight_bytes": 1, "context_length": 4096}
        info |= {"name": reference.rpartition("/")[2], "reference": reference}
        loaded = ModelInfo(**info)
        self._infos[loaded.name] = loaded
        return loaded

    def unload(self, name: str) -> None:
        del self._infos[name]

    def room(self, model: str) -> int:
        with self._lock:
            return max(0, self.max_batch - self._sequences())

    def submit(self, request: ChatRequest, sink: Sink) -> FakeHandle:
        orders = request.metadata or {}
        if orders.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if orders.get("refuse"):
            raise JobError("context_length_exceeded", "too long, as it was told")
        flight = FakeHandle(request, sink)
        with self._lock:
            self._flights.append(flight)
            self.peak = max(self.peak, self._sequences())
        self.begun.append(str(request.job.id))
        return flight

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=1)

    def chat(self, request: ChatRequest) -> NoReturn:
        raise AssertionError("the service only submits")

    def stream(self, request: ChatRequest) -> Iterator[ChatChunk]:
        raise AssertionError("the service only submits")

    def generate(
        self, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> list[Generation]:
        raise AssertionError("the service only submits")

    def generate_stream(
        self, model: str, prompt: Sequence[int], sampling: Sampling
    ) -> Iterator[Token]:
        raise AssertionError("the service only submits")

    def _sequences(self) -> int:
        return sum(flight.n for flight in self._flights)

    def _loop(self) -> None:
        while not self._closing.wait(self._delay):
            with self._lock:
                flights = list(self._flights)
            if any(flight.orders.get("die") for flight in flights):
                return
            for flight in flights:
                if self._hangs and flight.said:
                    self._closing.wait()
                    return
                ended = flight.step()
                self._tokens += flight.n
                if ended:
                    with self._lock:
                        self._flights.remove(flight)
            self._steps += bool(flights)

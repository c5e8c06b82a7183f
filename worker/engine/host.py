"""The backend that this project brings: engines of one device, stepped by one thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from worker.backend import Generation, Health, MemoryUse, ModelInfo, Sink, Token
from worker.engine.chat_generation import ChatGeneration
from worker.engine.engine import Engine
from worker.loading.pages import trim_heap
from worker.resident import device as devices
from worker.resident.process import tune

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # how long the thread sleeps at most when it wasn't told of work
REST = 4  # sleeps in a row after which free memory is given back


class EngineHost:
    """Implements `worker.backend.Backend`. Loading options hold for all models."""

    name = "chatjobs"

    def __init__(
        self,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_batch: int | None = None,
        context: int | None = None,
        cache_bytes: int | None = None,
        download_dir: Path | None = None,
    ) -> None:
        self.device = devices.choose_device(device)
        self._dtype, self._max_batch = dtype, max_batch
        self._context, self._cache_bytes = context, cache_bytes
        self._download_dir = download_dir
        self._engines: dict[str, Engine] = {}
        self._work = threading.Event()
        self._loads: deque[tuple[str, Future[Engine]]] = deque()
        self._closing = False
        tune()
        self._error: str | None = None
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def health(self) -> Health:
        engines = list(self._engines.values())
        return Health(
            alive=self._thread.is_alive(),
            progress=sum(engine.steps for engine in engines),
            running=sum(engine.running for engine in engines),
            waiting=sum(engine.waiting for engine in engines),
            tokens_generated=sum(engine.tokens_generated for engine in engines),
            error=self._error,
        )

    def models(self) -> list[ModelInfo]:
        return [engine.info for engine in self._engines.values()]

    def memory(self) -> MemoryUse:
        caches = [engine.cache_bytes for engine in self._engines.values()]
        return MemoryUse(
            device=str(self.device),
            weights=sum(engine.info.weight_bytes for engine in self._engines.values()),
            cache=sum(held for held, _ in caches),
            cache_limit=sum(limit for _, limit in caches),
            free=devices.free_bytes(self.device),
        )

    def load(self, reference: str) -> ModelInfo:
        # OpenMP makes a team of threads for each thread that computes; two teams would share the
        # cores and halve the speed. So the engine's thread loads, too.
        loaded: Future[Engine] = Future()
        self._loads.append((reference, loaded))
        self._work.set()
        engine = loaded.result()
        engine.on_work = self._work.set
        self._engines = {**self._engines, engine.info.name: engine}
        return engine.info

    def unload(self, name: str) -> None:
        engine = self._engine(name)
        self._engines = {key: one for key, one in self._engines.items() if key != name}
        engine.close()

    def chat(self, request: ChatRequest) -> ChatCompletion:
        return self._engine(request.model).chat(request)

    def stream(self, request: ChatRequest) -> Iterator[ChatChunk]:
        return self._engine(request.model).stream(request)

    def generate(
        self, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> list[Generation]:
        return self._engine(model).generate(prompts, sampling)

    def generate_stream(
        self, model: str, prompt: Sequence[int], sampling: Sampling
    ) -> Iterator[Token]:
        return self._engine(model).generate_stream(prompt, sampling)

    def room(self, model: str) -> int:
        return self._engine(model).room

    def submit(self, request: ChatRequest, sink: Sink) -> ChatGeneration:
        return self._engine(request.model).submit(request, sink)

    def close(self) -> None:
        self._closing = True
        self._work.set()
        self._thread.join()
        for name in list(self._engines):
            self.unload(name)

    def _engine(self, name: str) -> Engine:
        engine = self._engines.get(name)
        if engine is None:
            known = (one for one in self._engines.values() if one.info.reference == name)
            engine = next(known, None)
        if engine is None:
            served = ", ".join(sorted(self._engines)) or "none"
            raise JobError(
                "model_not_found", f"model '{name}' is not loaded; loaded: {served}", "model"
            )
        return engine

    def _load(self, reference: str, loaded: Future[Engine]) -> None:
        try:
            engine = Engine.load(
                reference,
                device=str(self.device),
                dtype=self._dtype,
                max_batch=self._max_batch,
                context=self._context,
                cache_bytes=self._cache_bytes,
                download_dir=self._download_dir,
            )
        except BaseException as error:  # the caller's to handle, whatever it is
            loaded.set_exception(error)
        else:
            loaded.set_result(engine)

    def _loop(self) -> None:
        """Step every engine in turn while there is work."""
        sleeps = 0
        try:
            while not self._closing:
                self._work.clear()
                while self._loads:
                    self._load(*self._loads.popleft())
                if any([engine.step() for engine in self._engines.values()]):
                    sleeps = 0
                elif not self._work.wait(IDLE_SECONDS):
                    sleeps += 1
                    if sleeps == REST:
                        trim_heap()
        except Exception as error:
            # A step handles what a sequence can do wrong; what comes here is a defect. The service
            # sees that the thread is dead and stops renewing its lease.
            self._error = f"{type(error).__name__}: {error}"
            logger.exception("the engine thread died")

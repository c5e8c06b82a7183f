"""The backend of this project: the engines of one device, all stepped by one thread. A second
thread prepares prompts for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from jobs.errors import JobError
from jobs.operations import Operation, Request
from jobs.sizes import counted, size_text
from worker.backend import (
    CacheUse,
    Footprint,
    Health,
    MemoryUse,
    ModelInfo,
    Reservation,
    Sink,
)
from worker.device import Device, choose_device, total_bytes
from worker.engine.engine import EngineCore
from worker.engine.footprint import footprint
from worker.engine.prompt_caches import keep_sessions, pin_prompt_cache, read_prompt_cache
from worker.engine.runner import Draw
from worker.host.operations import STARTS
from worker.host.preparer import Preparation, Preparer
from worker.host.soft_ceiling import SoftCeiling
from worker.loading.host_memory import HostMemory
from worker.loading.load import HostModels, fetch, keep
from worker.memory_amount import MemoryAmount
from worker.model_spec import ModelSpec
from worker.option_values import STATE_BYTES
from worker.processes.pages import trim_heap
from worker.processes.resident import resident_bytes
from worker.processes.tuning import freeze_gc_heap, tune, unfreeze_gc_heap
from worker.sampling.sampler import draw

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_SLEEP_SECONDS = 0.5  # maximum sleep of the engine thread between two looks for work
IDLE_SLEEPS = 4  # consecutive sleeps after which free memory is returned to the system

Command = tuple[Callable[[], Any], Future[Any]]


class _Wanted(NamedTuple):
    """Memory that is to be kept for a model."""

    reference: str
    reservation: Reservation
    since: float  # monotonic
    future: Future[None]


class Counters(NamedTuple):
    """What engines have counted, of those that are unloaded as well."""

    steps: int = 0
    tokens_generated: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_steps: int = 0

    @classmethod
    def of(cls, engine: EngineCore) -> Counters:
        return cls(
            engine.steps,
            engine.tokens_generated,
            engine.prefix.prompt_tokens,
            engine.prefix.cached_tokens,
            engine.speculation.drafted_tokens,
            engine.speculation.accepted_tokens,
            engine.speculation.steps,
        )

    def plus(self, other: Counters) -> Counters:
        return Counters(*map(add, self, other))


class EngineHost:
    """Implements `SwappingBackend` and `TokenizingBackend` of `worker.backend`. `memory`: that all
    models together may take; None: what is free when each is loaded. `host_memory`: in which models
    stay that are unloaded; on the CPU it comes in addition. `interactive_slots`, `preempt`: see
    `Slots`, of each
    model. `state_dir`: folder for the state of sessions, at most `state_bytes`. `draw`: see
    `ModelRunner`.

    The engine thread alone loads and steps; the preparer's thread renders and tokenizes.
    Other threads submit requests, send commands and read counters.
    """

    def __init__(
        self,
        *,
        device: str = "auto",
        memory: MemoryAmount | None = None,
        host_memory: MemoryAmount | None = None,
        interactive_slots: int | None = None,
        preempt: bool = True,
        state_dir: Path | None = None,
        state_bytes: int = STATE_BYTES,
        draw: Draw = draw,
    ) -> None:
        self.device = Device(choose_device(device), memory)
        # Models that were unloaded, in host memory.
        self._kept: HostModels | None = None
        if host_memory is not None:
            machine = torch.device("cpu")
            self._kept = HostMemory(host_memory.of(total_bytes(machine), "the machine"))
        # By their own names, and by all that requests may use. Both are replaced, never changed:
        # any thread may read them.
        self._engines: dict[str, EngineCore] = {}
        self._by_name: dict[str, EngineCore] = {}
        self._specs: dict[str, ModelSpec] = {}  # by their own names
        self._leaving: dict[str, EngineCore] = {}  # that have stopped, by their own names
        # The engines, and what those have counted that are unloaded: replaced together.
        self._counted: tuple[tuple[EngineCore, ...], Counters] = ((), Counters())
        self._work = threading.Event()
        self._load_engine = partial(
            EngineCore.load,
            device=self.device,
            host=self._kept,
            interactive_slots=interactive_slots,
            preempt=preempt,
            on_work=self._work.set,
            draw=draw,
        )
        self._footprint = partial(
            footprint, device=self.device, interactive_slots=interactive_slots, preempt=preempt
        )
        self._state_dir, self._state_bytes = state_dir, state_bytes
        self._ceiling = SoftCeiling(self.device)
        self._commands: deque[Command] = deque()
        self._wanted: deque[_Wanted] = deque()
        self._closing = self._loading = False
        self._error: str | None = None
        tune()
        self._preparer = Preparer()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    @property
    def funcs(self) -> Collection[str]:
        return STARTS.keys()

    def health(self) -> Health:
        engines, total = self._counted
        total = reduce(Counters.plus, map(Counters.of, engines), total)
        return Health(
            alive=self._thread.is_alive() and self._preparer.alive,
            progress=total.steps + self._preparer.prepared,
            running=sum(engine.running for engine in engines),
            waiting=sum(engine.waiting + sum(self._coming(engine).values()) for engine in engines),
            tokens_generated=total.tokens_generated,
            prompt_tokens=total.prompt_tokens,
            cached_tokens=total.cached_tokens,
            drafted_tokens=total.drafted_tokens,
            accepted_tokens=total.accepted_tokens,
            draft_steps=total.draft_steps,
            error=self._error,
            loading=self._loading,
        )

    def memory(self) -> MemoryUse:
        held = self.device.held
        return MemoryUse(
            device=str(self.device.torch),
            weights=sum(one.weights for one in held),
            cache=sum(one.cache for one in held),
            cache_limit=self.device.caches.total,
            free=self.device.free_bytes(),
            budget=self.device.budget,
            caches={
                one.owner: CacheUse(one.cache, one.cache_limit, one.cache_least) for one in held
            },
            host_limit=None if self._kept is None else self._kept.limit,
            kept={} if self._kept is None else self._kept.kept,
        )

    def footprint(self, spec: ModelSpec) -> Footprint:
        return self._footprint(spec)

    def fetch(self, spec: ModelSpec) -> None:
        fetch(spec)
        if spec.draft_spec is not None:
            fetch(spec.draft_spec)

    def reserve(self, spec: ModelSpec, reservation: Reservation) -> None:
        wanted = _Wanted(spec.reference, reservation, time.monotonic(), Future())
        self._wanted.append(wanted)
        self._wait_for(wanted.future)

    def load(self, spec: ModelSpec) -> ModelInfo:
        # OpenMP starts a team of threads for each thread that computes. Two teams would share the
        # cores and halve the speed, so the engine thread loads as well.
        return self._execute(partial(self._load, spec))

    def unload(self, model: str, coming: ModelSpec | None = None) -> None:
        self._execute(partial(self._stop, model))
        try:
            self._leaving[model].wait_for_disk()  # the other models are stepped meanwhile
        finally:
            self._execute(partial(self._free, model, coming))

    def room(self, model: str, *, bulk: bool) -> int:
        engine = self._engine(model)
        return engine.room(bulk=bulk, **self._coming(engine))

    def submit(self, operation: Operation, request: Request, sink: Sink) -> Preparation:
        return self._preparer.submit(self._engine(request.model), operation, request, sink)

    def prompt_document(self, model: str) -> bytes:
        return self._engine(model).loaded.prompt_document()

    def close(self) -> None:
        self._closing = True
        self._work.set()
        self._thread.join()
        self._preparer.close()
        unfreeze_gc_heap()
        engines, self._by_name = [*self._engines.values(), *self._leaving.values()], {}
        self._set(())
        for engine in engines:
            self.device.remove(engine)
            engine.close()
        if self._kept is not None:
            self._kept.clear()

    def _coming(self, engine: EngineCore) -> dict[str, int]:
        """Number of sequences whose prompts are not prepared yet."""
        return {
            "bulk_coming": self._preparer.sequences(engine, bulk=True),
            "interactive_coming": self._preparer.sequences(engine, bulk=False),
        }

    def _engine(self, name: str) -> EngineCore:
        engine = self._by_name.get(name)
        if engine is None:
            loaded = ", ".join(sorted(self._engines)) or "none"
            raise JobError(
                "model_not_found", f"model '{name}' is not loaded; loaded: {loaded}", "model"
            )
        return engine

    def _execute(self, command: Callable[[], T]) -> T:
        """Run a command on the engine thread and wait for its result."""
        future: Future[T] = Future()
        self._commands.append((command, future))
        return self._wait_for(future)

    def _wait_for(self, future: Future[T]) -> T:
        """The result of what the engine thread has been asked to do."""
        self._work.set()
        while not wait((future,), LONGEST_SLEEP_SECONDS).done:
            if not self._thread.is_alive():
                raise JobError("internal", f"the engine thread has ended: {self._error}")
        return future.result()

    # --- on the engine thread ---------------------------------------------------------------------

    def _load(self, spec: ModelSpec) -> ModelInfo:
        self._loading = True
        self._ceiling.before_load()
        if self._kept is not None and self._kept.drop_changed(spec):
            _collect()
        try:
            engine = self._load_engine(spec)
            if engine.chat_obstacle is not None:
                logger.warning("%s %s", engine.info.name, engine.chat_obstacle)
            try:
                self._load_states(engine, spec.prompt_caches)
            except BaseException:
                engine.close()
                raise
        finally:
            self._loading = False
            self.device.caches.abandon(spec.reference)
        self.device.add(engine)
        self._specs[engine.info.name] = spec
        self._set((*self._engines.values(), engine))
        names = (*spec.aliases, spec.reference, engine.info.name)
        self._by_name = {**self._by_name, **dict.fromkeys(names, engine)}
        freeze_gc_heap()
        return engine.info

    def _stop(self, name: str) -> None:
        """Step a model no more. Its memory stays taken while state of its sessions is written."""
        engine = self._engines[name]
        self._by_name = {one: kept for one, kept in self._by_name.items() if kept is not engine}
        past = self._counted[1].plus(Counters.of(engine))
        self._set([kept for kept in self._engines.values() if kept is not engine], past)
        self._leaving[name] = engine
        engine.stop()

    def _free(self, name: str, coming: ModelSpec | None) -> None:
        engine, before = self._leaving.pop(name), resident_bytes()
        self.device.remove(engine)
        weights, spec = engine.weight_bytes, self._specs.pop(name)
        loaded, draft = engine.loaded, engine.draft
        engine.close()
        if self._kept is not None:
            keep(spec, loaded, self._kept, coming)
            if spec.draft_spec is not None and draft is not None:
                keep(spec.draft_spec, draft, self._kept, coming)
        del loaded, draft
        del engine
        _collect()
        trim_heap()
        if self.device.torch.type == "cuda":
            torch.cuda.empty_cache()
        freed = size_text(max(0, before - resident_bytes()))
        logger.info("unloaded %s, with weights of %s: %s freed", name, size_text(weights), freed)

    def _set(self, engines: Iterable[EngineCore], past: Counters | None = None) -> None:
        kept = tuple(engines)
        self._engines = {engine.info.name: engine for engine in kept}
        self._counted = (kept, self._counted[1] if past is None else past)

    def _load_states(self, engine: EngineCore, prompt_caches: Iterable[Path]) -> None:
        for path in prompt_caches:
            state = read_prompt_cache(engine, path)
            pin_prompt_cache(engine, state, path)
            logger.info("loaded %s: a prompt of %s", path, counted(len(state.token_ids), "token"))
        if self._state_dir is not None:
            keep_sessions(engine, self._state_dir, self._state_bytes)

    def _loop(self) -> None:
        """Run commands and step every engine in turn while there is work."""
        sleeps = 0
        try:
            while not self._closing:
                self._work.clear()
                while self._commands:
                    _run(*self._commands.popleft())
                self._keep_room()
                if any([engine.step() for engine in self._engines.values()]):
                    sleeps = 0
                    self._ceiling.check(self._engines.values())
                elif not self._work.wait(LONGEST_SLEEP_SECONDS):
                    sleeps += 1
                    if sleeps == IDLE_SLEEPS:
                        self._trim()
        except BaseException as error:
            # A step handles the errors of its sequences, so this is a defect. The worker's watchdog
            # finds the thread dead; the worker then returns its jobs and ends.
            self._error = f"{type(error).__name__}: {error}"
            logger.exception("the engine thread died")

    def _keep_room(self) -> None:
        """Keep memory for the next model, as soon as the sequences that have it have ended."""
        while self._wanted:
            reference, reservation, since, future = self._wanted[0]
            try:
                if not self.device.keep_room(reference, reservation, since):
                    return
                future.set_result(None)
            except JobError as error:
                future.set_exception(error)
            self._wanted.popleft()

    def _trim(self) -> None:
        for engine in self._engines.values():
            engine.trim()
        trim_heap()


def _collect() -> None:
    """Free models that nothing uses: they are in cycles, and were spared from the collector."""
    unfreeze_gc_heap()
    freeze_gc_heap()


def _run(command: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(command())
    except BaseException as error:  # raised again in the thread that waits
        future.set_exception(error)

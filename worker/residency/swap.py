"""Unloads models, then loads one, on a thread of its own.

The thread shares a queue with its caller and nothing else: it gets its orders when it begins, and
reports each step as an event. It changes no state of a model; whoever takes the events does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from jobs.errors import JobError, failure_of
from worker.backend import ModelInfo, SwappingBackend
from worker.residency.model import Model


class Unloaded(NamedTuple):
    """The memory of a model is free. More events follow."""

    name: str


class Loaded(NamedTuple):
    """The swap has ended: a model is in memory."""

    name: str
    info: ModelInfo
    seconds: float  # of the load


class LoadFailed(NamedTuple):
    """The swap has ended: the model was not downloaded, or not loaded."""

    name: str
    error: JobError


class UnloadFailed(NamedTuple):
    """The swap has ended: what a model still takes of the memory is not known."""

    error: JobError


class Ended(NamedTuple):
    """The swap has ended, and no model was to be loaded."""


Event = Unloaded | Loaded | LoadFailed | UnloadFailed | Ended


class Swap:
    """Begins at once. `unload`: the own names of models; `load`: another one. wake: called by the
    thread after the last event."""

    def __init__(
        self,
        backend: SwappingBackend,
        unload: Sequence[str],
        load: Model | None,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.loads = None if load is None else load.name
        self.unloads, self.began_at = bool(unload), clock()
        self._events: SimpleQueue[Event] = SimpleQueue()
        arguments = (self._events, backend, tuple(unload), load, wake, clock)
        threading.Thread(target=_run, args=arguments, name="residency", daemon=True).start()

    def events(self) -> Iterator[Event]:
        """Those that have come and were not taken yet."""
        with suppress(Empty):
            while True:
                yield self._events.get_nowait()


def _run(
    events: SimpleQueue[Event],
    backend: SwappingBackend,
    unload: Sequence[str],
    load: Model | None,
    wake: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    events.put(_end(events, backend, unload, load, clock))
    wake()


def _end(
    events: SimpleQueue[Event],
    backend: SwappingBackend,
    unload: Sequence[str],
    load: Model | None,
    clock: Callable[[], float],
) -> Event:
    """Download, unload, then load: models stay if the one that they make room for can't be had.
    Before the load, the caches of the others give back what is kept for it.
    The thread that takes the events decides what follows from an error, whatever it is."""
    if load is not None:
        try:
            backend.fetch(load.spec)
        except BaseException as error:
            return LoadFailed(load.name, failure_of(error))
    try:
        for name in unload:
            backend.unload(name, None if load is None else load.spec)
            events.put(Unloaded(name))
    except BaseException as error:
        return UnloadFailed(failure_of(error))
    if load is None:
        return Ended()
    try:
        backend.reserve(load.spec, load.share.reservation)
        begin = clock()
        info = backend.load(load.spec)
    except BaseException as error:
        return LoadFailed(load.name, failure_of(error))
    return Loaded(load.name, info, clock() - begin)

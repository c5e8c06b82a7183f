"""Prepares prompts on a thread of its own. A long prompt or a slow template stalls neither the loop
of the worker nor the engine thread. A request with many items is prepared in parts, and others go
first between them.
"""

from __future__ import annotations

import logging
import math
import queue
import threading

from jobs.errors import JobError, failure_of
from jobs.operations import Operation, Request
from worker.backend import Handle, MachineError, Outcome, Sink
from worker.engine.engine import EngineCore
from worker.host.operations import STARTS

logger = logging.getLogger(__name__)

PREPARATIONS_PER_BULK = 16  # interactive preparations that a bulk one lets go first


class Preparation:
    """The handle of a submitted request, from before its prompt is built."""

    def __init__(
        self, engine: EngineCore, operation: Operation, request: Request, sink: Sink
    ) -> None:
        self.engine, self.sequences = engine, operation.cost(request)
        self.bulk = request.job.priority == "bulk"
        self._parts = STARTS[operation.func](engine, request, sink)
        self._sink = sink
        self._cancelled = threading.Event()
        self._started: Handle | None = None

    def cancel(self) -> None:
        """Stop as soon as possible. Thread-safe."""
        self._cancelled.set()  # first: `advance` looks at it after it has started the request
        started = self._started
        if started is not None:
            started.cancel()

    def advance(self) -> bool:
        """Prepare the next part; after the last one the sequences are queued. An error ends the
        request. Returns False if there are further parts."""
        try:
            if self._cancelled.is_set():
                raise JobError("cancelled", "the request was cancelled")
            next(self._parts)
            return False
        except StopIteration as end:
            self._started = end.value
            if self._cancelled.is_set():
                end.value.cancel()
        except OSError as error:  # no process could be started
            self._sink.ended(Outcome(error=MachineError.of(error)))
        except MachineError as error:  # a process did not start, or does not answer
            self._sink.ended(Outcome(error=error))
        except BaseException as error:
            reason = failure_of(error)
            if reason.code == "internal":
                logger.exception("a prompt could not be prepared")
            self._sink.ended(Outcome(error=reason))
        return True


Place = tuple[float, int, Preparation | None]  # in the queue: lowest first; None ends the thread


class Preparer:
    """Runs preparations in the order of their submission. Up to PREPARATIONS_PER_BULK interactive
    ones pass a bulk one that was submitted earlier, and one more request at each of its parts."""

    def __init__(self) -> None:
        self.prepared = 0  # parts of requests
        self._submitted = 0
        self._waiting: dict[Preparation, None] = {}  # an ordered set, with the one that runs
        self._lock = threading.Lock()  # held to change and to read it
        self._queue: queue.PriorityQueue[Place] = queue.PriorityQueue()
        self._thread = threading.Thread(target=self._loop, name="prompts", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def sequences(self, engine: EngineCore, *, bulk: bool) -> int:
        """Number of bulk or interactive sequences that are on their way to an engine."""
        with self._lock:
            return sum(
                one.sequences for one in self._waiting if one.engine is engine and one.bulk == bulk
            )

    def submit(
        self, engine: EngineCore, operation: Operation, request: Request, sink: Sink
    ) -> Preparation:
        preparation = Preparation(engine, operation, request, sink)
        with self._lock:
            self._waiting[preparation] = None
            self._submitted += 1
            number = self._submitted
        self._queue.put((number + PREPARATIONS_PER_BULK * preparation.bulk, number, preparation))
        return preparation

    def close(self) -> None:
        """Cancel what waits and end the thread."""
        with self._lock:
            waiting = list(self._waiting)
        for preparation in waiting:
            preparation.cancel()
            preparation.engine.prompts.close()  # a long prompt may take seconds
        self._queue.put((math.inf, 0, None))
        self._thread.join()

    def _loop(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next preparation, or some parts of it; False at the end. Nothing keeps it, or its
        engine, afterwards: that may be unloaded while the thread waits."""
        place, number, preparation = self._queue.get()
        if preparation is None:
            return False
        while not preparation.advance():
            self.prepared += 1
            if not self._queue.empty():
                self._queue.put((place + 1, number, preparation))
                return True
        with self._lock:
            del self._waiting[preparation]
        self.prepared += 1
        return True

"""The exchange of ranks that have a GPU each: torch.distributed's collectives over NCCL.

A call is queued on the stream of its GPU and returns at once. Kernels that wait for a rank which is
gone wait until `end` makes them return.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from worker.ranks.exchange import ExchangeBroken

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0
LOOK_SECONDS = 0.05

dist: Any = torch.distributed  # its groups have no types


class Collectives:
    """Implements `RankExchange`. `memory`: a descriptor of an empty file without a name, by which
    the ranks find each other."""

    @staticmethod
    def memory_bytes(ranks: int) -> int:
        return 0

    def __init__(self, memory: int, rank: int, ranks: int) -> None:
        # Kept open: the store opens it anew for each of its operations, also for the last one.
        self._file, self._rank, self._ranks = os.dup(memory), rank, ranks
        self._group: Any = None  # made on the thread that connects
        self._waits = False
        self._ended = threading.Event()

    def connect(self, device: torch.device) -> None:
        """Makes the communicator, on a thread that is given up if another rank does not come:
        nothing else ends its wait."""
        failed: list[Exception] = []

        def run() -> None:
            try:
                self._connect(device)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="connect", daemon=True)
        thread.start()
        deadline = time.monotonic() + CONNECT_SECONDS
        while thread.is_alive() and not self._ended.is_set() and time.monotonic() < deadline:
            thread.join(LOOK_SECONDS)
        self.require()
        if failed:
            raise failed[0]
        if thread.is_alive():
            raise ExchangeBroken(f"the ranks did not connect within {CONNECT_SECONDS:g} s")

    def sum(self, x: Tensor) -> Tensor:
        x, options = x.contiguous(), dist.AllreduceOptions()
        self._run(lambda group: group.allreduce([x], _in_order(options)))
        return x

    def first(self, x: Tensor) -> Tensor:
        x, options = x.contiguous(), dist.BroadcastOptions()
        options.rootRank = 0
        self._run(lambda group: group.broadcast([x], _in_order(options)))
        return x

    def gather(self, x: Tensor) -> Tensor:
        x, options = x.contiguous(), dist.GatherOptions()
        options.rootRank = 0
        parts = [] if self._rank else [[torch.empty_like(x) for _ in range(self._ranks)]]
        self._run(lambda group: group.gather(parts, [x], _in_order(options)))
        return torch.cat(parts[0], 1) if parts else x

    def awaited(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank != self._rank and self._waits]

    def end(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        if self._group is not None:
            # Nobody waits for it: it may wait for kernels. No thread starts while Python ends.
            with suppress(RuntimeError):
                threading.Thread(target=_abort, args=[self._group], daemon=True).start()

    def require(self) -> None:
        if self._ended.is_set():
            raise ExchangeBroken("the group of ranks has ended")

    def _connect(self, device: torch.device) -> None:
        with _broken():
            store = dist.FileStore(f"/proc/self/fd/{self._file}", self._ranks)
            store.set_timeout(timedelta(seconds=2 * CONNECT_SECONDS))
            self._group = new_group(store, self._rank, self._ranks)
            # The first exchanges make the communicator and its buffers.
            self.gather(self.sum(torch.zeros(1, 1, device=device))).tolist()

    def _run(self, start: Callable[[Any], object]) -> None:
        """Start a collective. The host may wait meanwhile."""
        self.require()
        self._waits = True
        try:
            with _broken():
                start(self._group)
        finally:
            self._waits = False


@contextmanager
def _broken() -> Iterator[None]:
    """Errors of the group as ExchangeBroken."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ExchangeBroken(str(error)) from error


def new_group(store: Any, rank: int, ranks: int) -> Any:
    """A group of its own, beside that of the caller's program, if it has one."""
    with _without_watchdog():
        return dist.ProcessGroupNCCL(store, rank, ranks, dist.ProcessGroupNCCL.Options())


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """torch's own watchdog ends the process if a collective fails or takes ten minutes, also if it
    was suspended meanwhile. Groups that are made with this variable have none; the variable is of
    the whole process, for a moment."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _in_order(options: Any) -> Any:
    """On the stream of the caller, in the order of its calls: there is nothing to wait for."""
    options.asyncOp = False
    return options


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        logger.warning("the exchange of ranks can't be ended: %s", error)

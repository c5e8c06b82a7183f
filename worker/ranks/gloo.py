"""The exchange of ranks that are processes of one machine: torch's gloo over the loopback address.

The ranks find each other over a file in a folder that only their user can read. Each listens at a
port that the system chooses.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

LOOPBACK = "127.0.0.1"
_DISTRIBUTED: Any = torch.distributed  # its stubs lack the stores and the methods of groups
# The leader watches the processes. This is for systems where it can't see whether they work.
TIMEOUT = timedelta(minutes=30)
MEETING_TIMEOUT = timedelta(minutes=2)


class ExchangeBroken(Exception):
    """Another rank is gone."""


class GlooExchange:
    """Implements `Exchange`, whose methods raise ExchangeBroken. `waits`: this rank waits for
    others; any thread may read."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.waits = False
        self._rank, self._ranks = rank, ranks
        self._group: Any = None

    def connect(self, meeting: Path) -> None:
        """Wait for all ranks at the file `meeting`. Raises RuntimeError."""
        store = _DISTRIBUTED.FileStore(str(meeting), self._ranks)
        store.set_timeout(MEETING_TIMEOUT)
        gloo = _DISTRIBUTED.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout, options._threads = TIMEOUT, 1
        self._group = gloo(store, self._rank, self._ranks, options)

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._wait(self._connected.allreduce([x]))
        return x

    def first(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._wait(self._connected.broadcast(x, 0))
        return x

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self._rank:
            self._wait(self._connected.gather([], [x], _to_first()))
            return x
        parts = [torch.empty_like(x) for _ in range(self._ranks)]
        self._wait(self._connected.gather([parts], [x], _to_first()))
        return torch.cat(parts, dim=1)

    def close(self) -> None:
        """Leave the others."""
        self._group = None

    @property
    def _connected(self) -> Any:
        if self._group is None:
            raise RuntimeError("the ranks are not connected")
        return self._group

    def _wait(self, work: Any) -> None:
        self.waits = True
        try:
            work.wait()
        except RuntimeError as error:
            raise ExchangeBroken((str(error).splitlines() or [""])[0]) from None
        finally:
            self.waits = False


def _to_first() -> Any:
    options = _DISTRIBUTED.GatherOptions()
    options.rootRank = 0
    return options

"""Ranks on the CPU that exchange as ranks on GPUs do, over gloo in place of NCCL. Run as a module,
this is such a follower."""

from __future__ import annotations

import ctypes
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from worker.engine import follower
from worker.kernels import library
from worker.ranks import collectives, watch
from worker.ranks.collectives import Collectives
from worker.ranks.exchanges import EXCHANGES

ROOT = Path(__file__).parents[3]
dist: Any = torch.distributed


def use_gloo(patch: pytest.MonkeyPatch) -> None:
    """Without the CPU kernels, whose recorded steps would leave out what gloo does."""
    patch.setattr(collectives, "new_group", new_group)
    patch.setitem(EXCHANGES, "cpu", Collectives)
    patch.setattr(library, "active", lambda: None)
    patch.setattr(watch, "FOLLOWER", __name__)
    patch.setenv("PYTHONPATH", str(ROOT))


class Group:
    """A group whose calls return nothing, as those of NCCL do. It is never freed: gloo's destructor
    waits, with the interpreter's lock, for threads that wait for this lock."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            getattr(self._gloo, name)(*arguments).wait()

        return self._gloo.abort if name == "abort" else call


def new_group(store: Any, rank: int, ranks: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=600)
    return Group(dist.ProcessGroupGloo(store, rank, ranks, options))


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as whole:
        use_gloo(whole)
        follower.main(sys.argv[1:])

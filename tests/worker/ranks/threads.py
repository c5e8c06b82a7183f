"""Ranks of a model as threads of the test's process, which exchange tensors through a list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tests.worker.slot_storage import SlotStorage
from worker.device import Device
from worker.layers.batch import Batch, Span
from worker.layers.shard import Shard
from worker.loading.load import LoadedModel, load
from worker.model_spec import ModelSpec

T = TypeVar("T")


class Meeting:
    """Where the ranks meet."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=600)
        self._given: list[Tensor] = [torch.empty(0)] * ranks

    def all(self, rank: int, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks."""
        self._given[rank] = x.clone()
        self._barrier.wait()
        found = [*self._given]
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadExchange:
    """Implements `Exchange` for one rank."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._meeting.all(self._rank, x)).sum(0).to(x.dtype)

    def first(self, x: Tensor) -> Tensor:
        return self._meeting.all(self._rank, x)[0]

    def gather(self, x: Tensor) -> Tensor:
        found = self._meeting.all(self._rank, x)
        return torch.cat(found, dim=1) if self._rank == 0 else x


def on_ranks(ranks: int, run: Callable[[Shard], T]) -> list[T]:
    """The results of `run`, called for each rank on a thread of its own."""
    meeting = Meeting(ranks)

    def one(rank: int) -> T:
        try:
            with torch.inference_mode():
                return run(Shard(rank, ranks, ThreadExchange(meeting, rank)))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def prompt_logits(folder: Path, ranks: int) -> Tensor:
    """The logits after each token of a prompt, of a model on so many ranks."""
    ids = list(range(5, 25))

    def run(shard: Shard) -> Tensor:
        model = load_part(folder, "fp32", shard).model
        caches = model.make_caches()
        SlotStorage(caches, 1, 64)
        spans = [Span(0, 0, ids, len(ids), logits=len(ids))]
        return model(Batch.prepare(spans, torch.device("cpu"))[0], caches).clone()

    return on_ranks(ranks, run)[0]


def load_part(folder: Path, dtype: str, shard: Shard) -> LoadedModel:
    spec = ModelSpec(reference=str(folder), dtype=dtype, tensor_parallel=shard.ranks)
    return load(spec, Device(torch.device("cpu")), split=lambda checked: shard)

"""Ranks of a model as threads of the test's process, which exchange tensors as processes do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.worker.slot_storage import SlotStorage
from worker.device import Device
from worker.kernels import library
from worker.layers.batch import Batch, Span
from worker.layers.shard import Shard
from worker.loading.load import LoadedModel, load
from worker.model_spec import ModelSpec
from worker.ranks.exchange import SharedExchange, new_memory

T = TypeVar("T")


def exchanges(ranks: int) -> list[SharedExchange]:
    """One for each rank of a group."""
    if library.active() is None:
        pytest.skip("needs the CPU kernels")
    with new_memory(SharedExchange.memory_bytes(ranks)) as memory:
        return [SharedExchange(memory, rank, ranks) for rank in range(ranks)]


def on_ranks(ranks: int, run: Callable[[Shard], T]) -> list[T]:
    """The results of `run`, called for each rank on a thread of its own."""
    group = exchanges(ranks)

    def one(rank: int) -> T:
        try:
            with torch.inference_mode():
                return run(Shard(rank, ranks, group[rank]))
        except BaseException:
            group[rank].end()
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

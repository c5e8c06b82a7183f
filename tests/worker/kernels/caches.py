"""Caches with random keys and values, for the tests of attention."""

from __future__ import annotations

import torch
from hypothesis import settings
from torch import Tensor

from tests.worker.slot_storage import SlotStorage
from worker.layers.kv_cache import FullKVCache, KVCache, WindowKVCache

CPU = torch.device("cpu")
examples = settings(max_examples=60)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled_cache(
    slots: int, columns: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype
) -> KVCache:
    cache: FullKVCache | WindowKVCache
    if window is None:
        cache = FullKVCache(kv_heads, dim, dtype, CPU)
    else:
        cache = WindowKVCache(kv_heads, dim, window, dtype, CPU)
    SlotStorage([cache], slots, columns)
    for seed, part in enumerate((cache.stored().keys, cache.stored().values)):
        part.copy_(random(*part.shape, seed=seed))
    return cache

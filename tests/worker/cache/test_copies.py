"""State that is copied out of one slot and into another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.worker.slot_storage import resize_pool, state_of
from worker.cache.copies import Copy, copy_blocks, copy_snapshot, write_pages, write_snapshot
from worker.cache.pool import CachePool
from worker.cache.sizes import CacheSizes
from worker.layers.cache import LayerCache, by_slot, paged
from worker.layers.kv_cache import FullKVCache, WindowKVCache
from worker.layers.recurrent_cache import RecurrentCache

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
SHAPE: dict[str, Any] = {"channels": 6, "kernel": 4, "heads": 2, "key_dim": 3, "value_dim": 5}
LAYERS: dict[str, Callable[[], LayerCache]] = {
    "full": lambda: FullKVCache(2, 8, DTYPE, CPU),
    "other full": lambda: FullKVCache(1, 4, DTYPE, CPU),
    "window": lambda: WindowKVCache(2, 8, 20, DTYPE, CPU),
    "recurrent": lambda: RecurrentCache(**SHAPE, dtype=DTYPE, device=CPU),
}


def make_pool(*names: str) -> CachePool:
    """A pool with three used slots of 64 columns, all filled with noise."""
    pool = CachePool(lambda: [LAYERS[name]() for name in names], slots=3)
    resize_pool(pool, 3, 64)
    fill(pool, 0, 64)
    fill(pool, 1, 64)
    fill(pool, 2, 64)
    return pool


def fill(pool: CachePool, slot: int, end: int) -> None:
    for layer in paged(pool.layers):
        for part in layer.storage():
            for page in pool.table.pages(slot, 0, end):
                part[page].normal_()
    for one in by_slot(pool.layers):
        for view in one.views(slot, end):
            view.normal_()


@pytest.mark.parametrize("end", [16, 40, 48])
@pytest.mark.parametrize(
    "names", [("full",), ("full", "window", "other full"), ("recurrent", "full"), ("window",)]
)
@torch.inference_mode()
def test_a_slot_gets_the_state_of_another_and_no_other_slot_changes(
    names: tuple[str, ...], end: int
) -> None:
    pool = make_pool(*names)
    sizes = CacheSizes(pool.layers)
    pages = pool.table.pages(0, 0, end)
    blocks = copy_blocks(pool.layers, pages, end)
    snapshot = copy_snapshot(pool.layers, 0, end) if sizes.needs_snapshots else None
    assert sizes.needs_snapshots == (names != ("full",))
    assert sum(one.nbytes for one in blocks) == sizes.blocks(end)
    assert snapshot is None or snapshot.nbytes == sizes.snapshot(end)
    expected, neighbour = state_of(pool, 0, end), state_of(pool, 2, 64)
    fill(pool, 0, 64)  # the copies have no storage of the slot
    write_pages(pool.layers, pool.table.pages(1, 0, end), blocks)
    if snapshot is not None:
        write_snapshot(pool.layers, 1, snapshot, end)
    for got, wanted in zip(state_of(pool, 1, end), expected, strict=True):
        assert torch.equal(got, wanted)
    for got, wanted in zip(state_of(pool, 2, 64), neighbour, strict=True):
        assert torch.equal(got, wanted)


def test_a_copy_keeps_the_order_of_views_of_different_shapes() -> None:
    views = [torch.full((size,), float(number)) for number, size in enumerate((2, 3, 2, 3))]
    copy = Copy.of(views)
    assert len(copy.tensors) == 2 and copy.nbytes == 4 * 10
    for got, wanted in zip(copy.views(), views, strict=True):
        assert torch.equal(got, wanted)

"""Tokens that are taken back leave a slot as if they had never been computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.worker.slot_storage import resize_pool, state_of
from worker.cache.changes import Protect, Rewind
from worker.cache.pool import CachePool
from worker.cache.sizes import Rewinding
from worker.layers.batch import Batch, Span
from worker.layers.cache import LayerCache
from worker.layers.kv_cache import FullKVCache, WindowKVCache
from worker.layers.recurrent_cache import RecurrentCache

CPU = torch.device("cpu")
HEADS, DIM, WINDOW, SLOT = 2, 3, 6, 1


def make(names: Sequence[str]) -> CachePool:
    makers: dict[str, Callable[[], LayerCache]] = {
        "full": lambda: FullKVCache(HEADS, DIM, torch.float32, CPU),
        "window": lambda: WindowKVCache(HEADS, DIM, WINDOW, torch.float32, CPU),
        "recurrent": lambda: RecurrentCache(
            channels=2, kernel=3, heads=1, key_dim=2, value_dim=2, dtype=torch.float32, device=CPU
        ),
    }
    pool = CachePool(lambda: [makers[name]() for name in names], slots=3)
    resize_pool(pool, 3, 40)
    return pool


def compute(layers: Sequence[LayerCache], start: int, end: int, seed: int = 0) -> None:
    """Append tokens whose keys depend on their position and `seed`."""
    batch, _ = Batch.prepare([Span(SLOT, start, [0] * (end - start), end)], CPU)
    positions = torch.arange(start, end)
    new = (positions + 100.0 * seed)[:, None, None].expand(-1, HEADS, DIM)
    for layer in layers:
        if isinstance(layer, RecurrentCache):
            for position in positions.tolist():
                layer.inputs[SLOT] = position + 100.0 * seed
                layer.state[SLOT] = 2 * layer.state[SLOT] + position + seed
        elif isinstance(layer, FullKVCache | WindowKVCache):
            if batch.chunks:
                layer.append_chunk(new, -new, batch.chunks[0])
            else:
                layer.append_decode(new, -new, batch)


@torch.inference_mode()
@pytest.mark.parametrize("start", [2, 5, 13])
@pytest.mark.parametrize("right", [0, 1, 3, 4])
@pytest.mark.parametrize(
    "names", [("full",), ("window", "full"), ("recurrent", "full"), ("recurrent", "window")]
)
def test_a_slot_holds_the_tokens_that_are_kept_and_no_others(
    names: tuple[str, ...], right: int, start: int
) -> None:
    pool, drafted = make(names), 4
    layers = pool.layers
    compute(layers, 0, start)
    pool.execute(Protect(SLOT, start, start + drafted))
    compute(layers, start, start + drafted, seed=1)
    held = Rewinding(layers).kept(start, start + right, start + drafted)
    pool.execute(Rewind(SLOT, held))
    all_kept = right == drafted
    assert held == (start if "recurrent" in names and not all_kept else start + right)
    other = make(names)
    compute(other.layers, 0, start)
    if held > start:
        compute(other.layers, start, held, seed=1)
    for found, wanted in zip(state_of(pool, SLOT, held), state_of(other, SLOT, held), strict=True):
        assert torch.equal(found, wanted)
    compute(layers, held, held + 5, seed=2)
    compute(other.layers, held, held + 5, seed=2)
    for found, wanted in zip(
        state_of(pool, SLOT, held + 5), state_of(other, SLOT, held + 5), strict=True
    ):
        assert torch.equal(found, wanted)

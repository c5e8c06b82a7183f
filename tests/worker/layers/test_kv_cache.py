"""Caches of keys and values, against a plain list of every position's key."""

from __future__ import annotations

import pytest
import torch

from tests.worker.slot_storage import SlotStorage
from worker.kernels.attention import PAGE
from worker.layers.attention import attend
from worker.layers.batch import Batch, Span
from worker.layers.cache import Size
from worker.layers.kv_cache import COLUMNS, FullKVCache, KVCache, WindowKVCache

CPU = torch.device("cpu")
HEADS, DIM, WINDOW, SLOTS = 2, 3, 5, 4
KINDS = ["full", "window"]


def make(kind: str, columns: int = 64) -> KVCache:
    cache: KVCache
    if kind == "full":
        cache = FullKVCache(HEADS, DIM, torch.float32, CPU)
    else:
        cache = WindowKVCache(HEADS, DIM, WINDOW, torch.float32, CPU)
    SlotStorage([cache], SLOTS, columns)
    return cache


def keys(slot: int, start: int, length: int) -> torch.Tensor:
    """The keys of some positions [length, HEADS, DIM]; every number occurs once."""
    positions = 1000 * (slot + 1) + torch.arange(start, start + length, dtype=torch.float32)
    return positions[:, None, None] + torch.arange(HEADS * DIM).view(HEADS, DIM) / 10


def chunk(cache: KVCache, slot: int, start: int, length: int) -> torch.Tensor:
    """Append keys and their negatives as values. Returns the visible keys [HEADS, n, DIM]."""
    span = Span(slot, start, list(range(length)), start + length)
    batch, _ = Batch.prepare([span], CPU)
    new = keys(slot, start, length)
    k, v = cache.append_chunk(new, -new, batch.chunks[0])
    assert torch.equal(v, -k)
    return k


def decode(cache: KVCache, at: dict[int, int]) -> tuple[torch.Tensor, Batch]:
    """One token for each {slot: position}. Returns the keys of the slot range."""
    batch, ordered = Batch.prepare([Span(s, p, [0], p + 1) for s, p in at.items()], CPU)
    new = torch.cat([keys(span.slot, span.start, 1) for span in ordered])
    k, v = cache.append_decode(new, -new, batch)
    assert torch.equal(v, -k)
    return k, batch


def visible(k: torch.Tensor, batch: Batch, row: int) -> set[float]:
    """The first numbers of the keys that a row of the slot range sees."""
    mask = batch.decode_mask(k.shape[2])[row, 0, 0]
    return set(k[row, 0, mask == 0, 0].tolist())


def expected(kind: str, slot: int, position: int) -> set[float]:
    first = 0 if kind == "full" else max(0, position - WINDOW + 1)
    return set(keys(slot, first, position + 1 - first)[:, 0, 0].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_decode_sees_its_positions_and_no_others(kind: str) -> None:
    """Past several turns of the ring, in slots at different positions."""
    cache = make(kind)
    for position in range(3 * WINDOW + 2):
        k, batch = decode(cache, {0: position, 1: position})
        assert visible(k, batch, 0) == expected(kind, 0, position)
        assert visible(k, batch, 1) == expected(kind, 1, position)
        if position >= 4:
            k, batch = decode(cache, {1: position, 3: position - 4})  # slot 2 has no row
            assert k.shape[0] == 3
            assert visible(k, batch, 0) == expected(kind, 1, position)
            assert visible(k, batch, 2) == expected(kind, 3, position - 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "lengths", [[3, 4], [WINDOW, 2], [2, WINDOW, 3], [WINDOW + 3, 2 * WINDOW, 2], [23]], ids=str
)
def test_a_chunk_sees_the_positions_before_it_in_order(kind: str, lengths: list[int]) -> None:
    cache = make(kind)
    start = 0
    for length in lengths:
        k = chunk(cache, 2, start, length)
        first = 0 if kind == "full" else max(0, start - (WINDOW - 1))
        assert torch.equal(k, keys(2, first, start + length - first).transpose(0, 1))
        start += length
    k, batch = decode(cache, {2: start})
    assert visible(k, batch, 0) == expected(kind, 2, start)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_after_decoded_tokens_sees_them(kind: str) -> None:
    cache = make(kind)
    for position in range(WINDOW + 3):
        decode(cache, {1: position})
    k = chunk(cache, 1, WINDOW + 3, 4)
    first = 0 if kind == "full" else 4
    assert torch.equal(k, keys(1, first, WINDOW + 7 - first).transpose(0, 1))


def test_decode_reads_a_rounded_number_of_columns() -> None:
    cache = make("full", columns=3 * COLUMNS)
    for position, columns in ((0, COLUMNS), (COLUMNS - 1, COLUMNS), (COLUMNS, 2 * COLUMNS)):
        assert decode(cache, {0: position})[0].shape[2] == columns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "columns"), [(4, 128), (6, 64), (8, 256)])
def test_resize_keeps_the_first_slots(kind: str, slots: int, columns: int) -> None:
    cache = make(kind)
    storage = SlotStorage([cache], SLOTS, 64)
    for slot in range(SLOTS):
        chunk(cache, slot, 0, 7)
    storage.resize(slots, columns)
    for slot in range(SLOTS):
        k, batch = decode(cache, {slot: 7})
        assert visible(k, batch, 0) == expected(kind, slot, 7)
    chunk(cache, slots - 1, 0, columns - 1)
    k, batch = decode(cache, {slots - 1: columns - 1})
    assert visible(k, batch, 0) == expected(kind, slots - 1, columns - 1)


def test_pages_move_where_others_are_free() -> None:
    cache = make("full")
    assert isinstance(cache, FullKVCache)
    for part in cache.storage():
        part.copy_(torch.arange(16)[:, None, None, None])
    cache.resize(Size(SLOTS, 64, 4), keep=SLOTS, moves=((15, 2), (9, 0)))
    for part in cache.storage():
        assert part[:, 0, 0, 0].tolist() == [9, 1, 15, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_sequence_does_not_see_may_be_nan(kind: str) -> None:
    """As after a sequence whose numbers were not finite."""
    cache = make(kind)
    for part in (cache.stored().keys, cache.stored().values):
        part.fill_(torch.nan)
    for slot in (0, 1):
        chunk(cache, slot, 0, 4)
    new = torch.randn(2, HEADS, DIM)
    batch, _ = Batch.prepare([Span(0, 4, [0], 5), Span(1, 4, [0], 5)], CPU)
    assert attend(new, new, new, cache, batch, 1.0).isfinite().all()


def test_bytes_for_counts_what_resize_allocates() -> None:
    full = FullKVCache(HEADS, DIM, torch.bfloat16, CPU)
    size = Size(3, 50, 7)
    full.resize(size, keep=0)
    nbytes = 7 * PAGE * full.token_bytes
    assert full.bytes_for(size) == full._keys.nbytes + full._values.nbytes == nbytes
    assert full.token_bytes == 2 * HEADS * DIM * 2
    ring = WindowKVCache(HEADS, DIM, WINDOW, torch.float32, CPU)
    for columns in (3, 50):
        size = Size(3, columns, 7)
        ring.resize(size, keep=0)
        assert ring.bytes_for(size) == ring._keys.nbytes + ring._values.nbytes
    assert ring.bytes_for(size) == ring.bytes_for(Size(3, WINDOW, 0))  # no more than the window

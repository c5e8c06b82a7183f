"""Slots, pages, growth, shrinking and the byte limit of the KV cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.worker.engine.fakes import (
    Applied,
    FakeLayer,
    FakeRing,
    FakeRows,
    FakeSlotLayer,
    layer_of,
    make_caches,
)
from worker.cache.book import CacheBook
from worker.cache.changes import Place, Resize
from worker.cache.copies import Copy
from worker.cache.growth import FIRST_COLUMNS
from worker.cache.pool import CachePool
from worker.cache.prefix_store import Block, StateRef
from worker.cache.sizes import BOOKKEEPING
from worker.kernels.attention import PAGE
from worker.layers.cache import LayerCache, Size, pages_for


@torch.inference_mode()
def write(pool: CachePool, slot: int, columns: int) -> None:
    """Give each token of a slot a byte of its own."""
    for column in range(columns):
        layer_of(pool).byte(slot, column).fill_(written(slot, column))


def written(slot: int, column: int) -> int:
    return (7 * column + 31 * slot) % 251


def check(pool: CachePool, slot: int, columns: int) -> None:
    found = [int(layer_of(pool).byte(slot, column)) for column in range(columns)]
    assert found == [written(slot, column) for column in range(columns)]


def acquired(book: CacheBook, *columns: int) -> list[int]:
    """Slots with so many tokens."""
    slots = []
    for number in columns:
        slot = book.acquire()
        assert slot is not None and book.reserve(slot, number)
        slots.append(slot)
    return slots


def test_the_lowest_free_slot_is_acquired_until_none_is_left() -> None:
    book, _ = make_caches(slots=3)
    assert [book.acquire() for _ in range(4)] == [0, 1, 2, None]
    book.release(1)
    book.release(0)
    assert [book.acquire() for _ in range(3)] == [0, 1, None]


def test_storage_covers_all_slots_and_its_pages_double() -> None:
    book, pool = make_caches(slots=4)
    slot = book.acquire()
    assert slot is not None and book.bytes_held == 0
    for columns, allocated in (
        (1, 4 * FIRST_COLUMNS),
        (FIRST_COLUMNS, 4 * FIRST_COLUMNS),
        (4 * FIRST_COLUMNS, 4 * FIRST_COLUMNS),
        (4 * FIRST_COLUMNS + 1, 8 * FIRST_COLUMNS),
    ):
        assert book.reserve(slot, columns)
        assert book.bytes_held == allocated
        assert pool.table.tensor.shape[1] >= pages_for(columns)


def test_pages_double_up_to_the_context_of_all_slots() -> None:
    book, _ = make_caches(slots=2, columns=300)
    acquired(book, 257, 257)
    assert book.bytes_held == 2 * 304


def test_a_slot_takes_as_many_pages_as_its_own_tokens_need() -> None:
    """One long sequence beside short ones: together they are below the limit, and as many slots of
    the longest would be above it."""
    book, pool = make_caches(limit=2400, slots=40)
    slots = acquired(book, 1600, *[16] * 39)
    for slot in slots:
        write(pool, slot, 16)
    for slot in slots:
        check(pool, slot, 16)
    rows = [pool.table.pages(slot, 0, 1600) for slot in slots]
    assert [len(row) for row in rows] == [100, *[1] * 39]
    assert len({page for row in rows for page in row}) == 139


def test_growth_keeps_what_the_slots_hold() -> None:
    book, pool = make_caches(limit=2000, slots=2)
    first, second = acquired(book, 100, 30)
    write(pool, first, 100)
    write(pool, second, 30)
    for columns in range(40, 1800, 100):
        assert book.reserve(second, columns)
        check(pool, first, 100)
        check(pool, second, 30)


def test_near_the_limit_storage_grows_by_an_eighth_or_to_the_limit() -> None:
    book, _ = make_caches(limit=1000, slots=4)
    (slot,) = acquired(book, 512)
    assert book.bytes_held == 36 * PAGE
    assert book.reserve(slot, 600)
    assert book.bytes_held == (38 + 38 // 8) * PAGE
    assert book.reserve(slot, 900)
    assert book.bytes_held == 62 * PAGE


def test_beyond_the_limit_nothing_changes() -> None:
    book, pool = make_caches(limit=1000)
    (slot,) = acquired(book, 900)
    held = book.bytes_held
    write(pool, slot, 900)
    assert not book.reserve(slot, 1001)
    assert book.bytes_held == held
    check(pool, slot, 900)


def test_pages_of_a_slot_that_is_released_are_used_again() -> None:
    book, pool = make_caches(limit=992)
    first, second = acquired(book, 480, 480)
    write(pool, second, 480)
    book.release(first)
    (again,) = acquired(book, 512)
    assert again == first
    write(pool, again, 512)
    check(pool, second, 480)
    assert not book.reserve(second, 481)


def test_fits_alone_compares_one_sequence_with_the_limit() -> None:
    book, _ = make_caches(limit=1000)
    assert book.bytes_for_one(900) == 57 * PAGE
    assert book.fits_alone(992)
    assert not book.fits_alone(993)


def test_storage_stays_for_the_next_sequences_until_it_is_trimmed() -> None:
    book, pool = make_caches()
    first, second = book.acquire(), book.acquire()
    assert first is not None and second is not None
    assert book.reserve(second, 10)
    held = book.bytes_held
    book.release(first)
    book.trim()  # a slot is in use
    book.release(second)
    assert book.bytes_held == held > 0
    book.trim()
    assert book.bytes_held == 0
    assert len(layer_of(pool).pages) == 0


def test_storage_of_more_than_half_of_the_limit_is_freed_with_the_last_slot() -> None:
    book, _ = make_caches(limit=1000)
    (slot,) = acquired(book, 501)
    book.release(slot)
    assert book.bytes_held == 0


def test_what_is_given_back_leaves_sequences_the_pages_that_they_have() -> None:
    """Those with high numbers move to lower ones."""
    book, pool = make_caches(slots=4)
    slots = acquired(book, 300, 500, 300, 20)
    for slot, columns in zip(slots, (300, 500, 300, 20), strict=True):
        write(pool, slot, columns)
    book.release(slots[0])
    book.release(slots[2])
    held = book.bytes_held
    book.give_back(100)
    assert book.bytes_held == 34 * PAGE < held
    assert len(layer_of(pool).pages) == 34
    for slot, columns in ((slots[1], 500), (slots[3], 20)):
        check(pool, slot, columns)
    assert book.reserve(slots[3], 600)
    write(pool, slots[3], 600)
    check(pool, slots[1], 500)


def test_what_is_given_back_leaves_room_for_tokens_of_steps_that_followed() -> None:
    """Sequences decode for long without a plan, and caches with windows need their columns."""
    book, _ = make_caches()
    slot, other = acquired(book, 300, 1000)
    book.release(other)
    assert book.extend([(slot, 700)])
    book.give_back(1)
    assert book._size.columns == 768 and book._size.pages == pages_for(700)


def test_a_step_that_follows_gives_pages_to_the_slots_that_lack_one() -> None:
    book, pool = make_caches(slots=3)
    slots = acquired(book, 16, 20, 32)
    assert book.extend([(slots[0], 17), (slots[1], 21), (slots[2], 33)])
    rows = [
        pool.table.pages(slot, 0, columns)
        for slot, columns in zip(slots, (32, 32, 48), strict=True)
    ]
    assert [len(row) for row in rows] == [2, 2, 3]
    assert len({page for row in rows for page in row}) == 7


def test_the_pages_of_sequences_that_begin_together_are_one_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, each change of the table takes as long as tens of decoded tokens."""
    book, pool = make_caches(slots=4)
    acquired(book, 16)  # allocates
    monkeypatch.setattr(Applied, "emit", CacheBook.emit)
    slot, other = acquired(book, 32, 16)
    book.release(other)
    assert book.acquire() == other and book.reserve(other, 48)
    changes = book.take_changes()
    assert [type(change) for change in changes] == [Place]
    for change in changes:
        pool.execute(change)
    assert pool.table.pages(slot, 0, 32) == [1, 2]
    assert pool.table.pages(other, 0, 48) == [3, 4, 5]
    assert pool.table.tensor[other, :3].tolist() == [3, 4, 5]
    (place,) = changes
    assert isinstance(place, Place)
    assert len({(slot, number) for slot, number, _ in place.rows}) == len(place.rows) == 5


def test_a_page_that_moves_leaves_the_later_ones_of_its_slot() -> None:
    book, pool = make_caches(slots=4)
    first, slot = acquired(book, 32, 48)
    book.release(first)
    assert book.reserve(slot, 64)
    write(pool, slot, 64)
    assert pool.table.pages(slot, 0, 64) == [2, 3, 4, 0]
    book.give_back(100)
    assert pool.table.pages(slot, 0, 64) == [2, 3, 1, 0]
    check(pool, slot, 64)


def test_what_is_evicted_is_told_before_pages_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions read it then, and the device has not made the changes yet."""
    book, pool = make_caches(slots=4, kinds=(FakeLayer, FakeSlotLayer))
    first, slot = acquired(book, 48, 16)
    write(pool, slot, 16)
    (block,) = kept(book, slot, PAGE)
    book.kept.attach(bytes([slot, 0]), book.new_copy(10))
    book.release(first)
    monkeypatch.setattr(Applied, "emit", CacheBook.emit)
    read = []

    def evicted(key: bytes) -> None:
        assert block.page is not None
        read.append(int(layer_of(pool).pages[block.page, 0, 1, 0]))

    book.kept.on_evict = evicted
    book.give_back(5000)
    assert read == [written(slot, 1)] and block.page == 0
    for change in book.take_changes():
        pool.execute(change)
    check(pool, slot, 16)


def with_rows(limit: int) -> CacheBook:
    """Caches of a paged layer and one with rows."""
    return make_caches(limit, kinds=(FakeLayer, FakeRows))[0]


def test_rows_are_freed_with_the_last_slot_also_where_pages_are_kept() -> None:
    """One long sequence needs the memory of the rows that several short ones had."""
    book = with_rows(12 * PAGE)
    slots = acquired(book, 4 * PAGE, PAGE, PAGE)
    kept(book, slots[0], PAGE)
    for slot in slots:
        book.release(slot)
    assert len(book.kept) == 1 and book.bytes_held < 12 * PAGE
    assert acquired(book, 11 * PAGE) == [0]


def test_rows_of_slots_that_are_free_give_way_to_pages() -> None:
    book = with_rows(12 * PAGE)
    first, *others = acquired(book, PAGE, PAGE, PAGE)
    for slot in others:
        book.release(slot)
    assert book.reserve(first, 11 * PAGE) and not book.reserve(first, 12 * PAGE)


def test_snapshots_get_their_half_again_once_sequences_need_less() -> None:
    book = with_rows(40 * PAGE)
    first, second = acquired(book, 30 * PAGE, PAGE)
    book.leave_room()
    assert book.bytes_held > 30 * PAGE
    kept(book, first, *[PAGE] * 30)
    book.release(first)
    assert book.bytes_held > 30 * PAGE
    book.leave_room()
    assert book.bytes_held <= 20 * PAGE < book.bytes_held + PAGE
    assert 0 < len(book.kept) < 30
    assert book.reserve(second, 2 * PAGE)


@pytest.mark.parametrize("kinds", [(FakeLayer, FakeRows), (FakeLayer, FakeRing), (FakeRing,)])
@pytest.mark.parametrize("seed", range(40))
def test_a_slot_that_is_alone_has_what_fits_alone_whatever_was_there_before(
    kinds: tuple[type[LayerCache], ...], seed: int
) -> None:
    """Pages, rows and columns that others had, or that are kept, take nothing from it."""
    rng, limit = random.Random(seed), 40 * (PAGE if FakeLayer in kinds else BOOKKEEPING)
    book, pool = make_caches(limit, kinds=kinds)
    slots: list[int] = []
    for _ in range(60):
        slot = book.acquire() if rng.random() < 0.4 else None
        if slot is not None:
            slots.append(slot)
        elif slots:
            slot = rng.choice(slots)
            if book.reserve(slot, rng.randint(1, 600)) and rng.random() < 0.5:
                keep_new(book, slot)
            if rng.random() < 0.3:
                slots.remove(slot)
                book.release(slot)
        assert book.bytes_held <= limit
    while 0 not in slots:
        slots.append(book.acquire() or 0)
    for slot in {*slots} - {0}:
        book.release(slot)
    columns = max(book._used[0], PAGE * len(book._pages.of(0)))
    step = rng.choice([1, 7, 100])
    while book.fits_alone(columns):
        assert book.reserve(0, columns) and book.bytes_held <= limit
        columns += step
    assert columns > 300
    pages = book._pages.of(0)
    assert pool.table.pages(0, 0, PAGE * len(pages)) == [*pages]


def keep_new(book: CacheBook, slot: int) -> None:
    """Keep the pages of a slot that nobody keeps, some with snapshots."""
    for page in book._pages.of(slot):
        if not book._pages.kept(page):
            copy = book.new_copy(book.sizes.snapshot(1))
            key = copy.number.to_bytes(8, "big")
            block: Block[StateRef] = Block(b"", PAGE)
            book.kept.extend({key: block})
            book._pages.keep(page, block)
            if copy.number % 8 == 0 and book.kept.shrink(book.bytes_beside - copy.nbytes):
                book.kept.attach(key, copy)


def test_a_slot_gets_less_than_an_eighth_more_if_the_device_has_no_more() -> None:
    book, _ = make_caches(limit=1000 * PAGE)
    book.resize_failed(Resize(Size(1, 101 * PAGE, 101), 1), "no room")
    slot = book.acquire()
    assert slot is not None and book.fits_alone(100 * PAGE)
    assert book.reserve(slot, 100 * PAGE) and not book.reserve(slot, 100 * PAGE + 1)


def test_kept_pages_give_way_to_the_next_pages_of_all_slots_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store is not searched for each of them."""
    book, _ = make_caches(limit=20 * PAGE)
    slots = acquired(book, PAGE, PAGE, PAGE, 17 * PAGE)
    kept(book, slots[3], *[PAGE] * 17)
    book.release(slots[3])
    searched, evict_pages = [], book.kept.evict_pages

    def watched(count: int, *args: Any, **options: Any) -> bool:
        searched.append(count)
        return evict_pages(count, *args, **options)

    monkeypatch.setattr(book.kept, "evict_pages", watched)
    for pages in range(2, 7):
        for slot in slots[:3]:
            assert book.reserve(slot, pages * PAGE)
        assert len(book.kept) == 17 - 3 * (pages - 1)
    assert searched == [1] * 5


@pytest.mark.parametrize("needs_clearing", [True, False])
def test_layers_whose_old_state_would_be_read_are_cleared(needs_clearing: bool) -> None:
    kinds = (FakeLayer, FakeSlotLayer) if needs_clearing else (FakeLayer,)
    book, pool = make_caches(kinds=kinds)
    keeper, slot = acquired(book, 10, 10)
    layers = [layer for layer in pool.layers if isinstance(layer, FakeSlotLayer)]
    with torch.inference_mode():
        for layer in layers:
            layer.values.fill_(1)
    book.release(slot)
    assert book.acquire() == slot
    book.begin(slot)
    assert len(layers) == needs_clearing
    for layer in layers:
        assert layer.values[[keeper, slot]].equal(torch.tensor([[1.0], [0.0]]))


def test_close_frees_the_storage() -> None:
    book, pool = make_caches()
    acquired(book, 10)
    book.close()
    pool.close()
    assert book.bytes_held == 0
    assert not pool.layers


def kept(book: CacheBook, slot: int, *lengths: int) -> list[Block[StateRef]]:
    """Keep the first pages of a slot, in blocks of these lengths."""
    keys = [bytes([slot, number]) for number in range(len(lengths))]
    blocks: list[Block[StateRef]] = [
        Block(parent, length) for parent, length in zip([b"", *keys], lengths, strict=False)
    ]
    book.kept.extend(dict(zip(keys, blocks, strict=True)))
    book.keep_pages(slot, 0, blocks)
    book.kept.touch(keys)
    return blocks


def test_kept_pages_are_shared_and_a_short_last_one_is_copied() -> None:
    book, pool = make_caches()
    (first,) = acquired(book, 40)
    write(pool, first, 40)
    blocks = kept(book, first, PAGE, PAGE, 5)
    second = book.acquire()
    assert second is not None and book.begin_with(second, blocks, 60)
    pages = [pool.table.pages(slot, 0, 37) for slot in (first, second)]
    assert pages[0][:2] == pages[1][:2] and pages[0][2] != pages[1][2]
    for column in range(37):
        assert int(layer_of(pool).byte(second, column)) == written(first, column)
    with torch.inference_mode():
        layer_of(pool).byte(second, 37).fill_(250)  # the next token
    check(pool, first, 40)
    book.release(first)
    (third,) = acquired(book, 600)
    write(pool, third, 600)
    for column in range(37):  # kept, and in the second slot
        assert int(layer_of(pool).byte(second, column)) == written(first, column)


def test_kept_pages_give_way_but_not_those_of_slots() -> None:
    """The least recently used ones first. Where even all of them are too few, none is evicted."""
    book, pool = make_caches(limit=20 * PAGE)
    first, second = acquired(book, 5 * PAGE, 5 * PAGE)
    kept(book, first, *[PAGE] * 5)
    kept(book, second, *[PAGE] * 5)
    write(pool, second, 5 * PAGE)
    book.release(first)
    third = book.acquire()
    assert third is not None and not book.reserve(third, 16 * PAGE)
    assert len(book.kept) == 10
    assert book.reserve(third, 13 * PAGE)
    assert len(book.kept) == 7
    write(pool, third, 13 * PAGE)
    check(pool, second, 5 * PAGE)
    assert book.reserve(third, 15 * PAGE) and not book.reserve(third, 16 * PAGE)
    assert len(book.kept) == 5
    assert book.bytes_held == 20 * PAGE


def test_a_sequence_gets_all_pages_also_where_its_own_blocks_continue_kept_ones() -> None:
    """It has computed the first ones anew, so these are in memory twice."""
    book, pool = make_caches(limit=10 * PAGE)
    (first,) = acquired(book, 4 * PAGE)
    keys = [block.parent for block in kept(book, first, *[PAGE] * 5)[1:]]
    book.release(first)
    (second,) = acquired(book, 6 * PAGE)
    block: Block[StateRef] = Block(keys[-1], PAGE)
    book.kept.extend({b"last": block})
    book.keep_pages(second, 4, [block])
    book.kept.touch([*keys, b"last"])
    write(pool, second, 6 * PAGE)
    assert book.reserve(second, 10 * PAGE) and not book.reserve(second, 11 * PAGE)
    check(pool, second, 6 * PAGE)


def test_storage_grows_to_what_pinned_copies_leave() -> None:
    book, _ = make_caches(limit=10 * PAGE)
    book.kept.pin({b"a": Block(b"", PAGE, book.new_copy(PAGE))})
    book.kept.extend({b"b": Block(b"", PAGE)})
    book.kept.attach(b"b", book.new_copy(PAGE))  # which gives way
    assert acquired(book, 9 * PAGE) == [0]
    assert not book.reserve(0, 9 * PAGE + 1)


def test_a_kept_copy_comes_into_a_page_that_others_share_then() -> None:
    book, pool = make_caches()
    copy = book.new_copy(PAGE)
    pool.kept[copy.number] = Copy((torch.full((1, 1, PAGE, 1), 9, dtype=torch.uint8),), ((0, 0),))
    block: Block[StateRef] = Block(b"", PAGE, copy)
    book.kept.pin({b"a": block})
    first, second = book.acquire(), book.acquire()
    for slot in (first, second):
        assert slot is not None and book.begin_with(slot, [block], 20)
        assert int(layer_of(pool).byte(slot, 15)) == 9
    assert pool.table.pages(0, 0, 16) == pool.table.pages(1, 0, 16) == [block.page]
    for slot in (first, second):
        assert slot is not None
        book.release(slot)
    book.free_all()
    assert block.page is None and book.begin_with(0, [block], 20)
    assert int(layer_of(pool).byte(0, 15)) == 9


def test_idle_storage_is_trimmed_to_the_kept_pages_if_these_are_few() -> None:
    book, _ = make_caches()
    for pages, left in ((8, 8), (20, 64)):  # of 64
        slot = book.acquire()
        assert slot is not None and book.reserve(slot, pages * PAGE)
        kept(book, slot, *[PAGE] * pages)
        book.release(slot)
        book.trim()
        assert book.bytes_held == left * PAGE
        book.free_all()
        book.kept.clear()

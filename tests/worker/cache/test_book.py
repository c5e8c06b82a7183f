"""Slots, growth, shrinking and the byte limit of the KV cache."""

from __future__ import annotations

import pytest

from tests.worker.engine.fakes import layer_of, make_caches
from worker.cache.book import FIRST_COLUMNS


def test_the_lowest_free_slot_is_acquired_until_none_is_left() -> None:
    book, _ = make_caches(slots=3)
    assert [book.acquire() for _ in range(4)] == [0, 1, 2, None]
    book.release(1)
    book.release(0)
    assert [book.acquire() for _ in range(3)] == [0, 1, None]


def test_storage_covers_all_slots_and_its_columns_double() -> None:
    book, pool = make_caches(slots=4)
    slot = book.acquire()
    assert slot is not None and book.bytes_held == 0
    for columns, allocated in (
        (1, FIRST_COLUMNS),
        (FIRST_COLUMNS, FIRST_COLUMNS),
        (FIRST_COLUMNS + 1, 2 * FIRST_COLUMNS),
        (5 * FIRST_COLUMNS, 8 * FIRST_COLUMNS),
    ):
        assert book.reserve(slot, columns)
        assert book.bytes_held == 4 * allocated
        assert [len(row) for row in layer_of(pool).rows] == [allocated] * 4


def test_columns_double_up_to_the_context() -> None:
    book, _ = make_caches(slots=2, columns=300)
    slot = book.acquire()
    assert slot is not None and book.reserve(slot, 257)
    assert book.bytes_held == 2 * 300


def test_growth_keeps_what_the_slots_hold() -> None:
    book, pool = make_caches(slots=2)
    first, second = book.acquire(), book.acquire()
    assert first is not None and second is not None
    assert book.reserve(first, 10)
    layer_of(pool).rows[first][9] = 1
    layer_of(pool).rows[second][9] = 2
    assert book.reserve(second, 1000)
    assert [row[9] for row in layer_of(pool).rows] == [1, 2]


def test_near_the_limit_only_used_slots_get_storage() -> None:
    book, _ = make_caches(limit=3 * FIRST_COLUMNS, slots=4)
    slot = book.acquire()
    assert slot is not None and book.reserve(slot, 10)
    assert book.bytes_held == FIRST_COLUMNS
    other = book.acquire()
    assert other is not None and book.reserve(other, FIRST_COLUMNS + 10)
    assert book.bytes_held == 2 * (FIRST_COLUMNS + 10)


def test_beyond_the_limit_nothing_changes() -> None:
    book, pool = make_caches(limit=1000)
    slot = book.acquire()
    assert slot is not None and book.reserve(slot, 900)
    assert book.bytes_held == 900
    layer_of(pool).rows[slot][0] = 1
    assert not book.reserve(slot, 1001)
    assert book.bytes_held == 900
    assert layer_of(pool).rows[slot][0] == 1


def test_fits_alone_compares_one_sequence_with_the_limit() -> None:
    book, _ = make_caches(limit=1000)
    assert book.bytes_for_one(900) == 900
    assert book.fits_alone(1000)
    assert not book.fits_alone(1001)


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
    assert layer_of(pool).rows == []


def test_storage_of_more_than_half_of_the_limit_is_freed_with_the_last_slot() -> None:
    book, _ = make_caches(limit=1000)
    slot = book.acquire()
    assert slot is not None and book.reserve(slot, 501)
    book.release(slot)
    assert book.bytes_held == 0


@pytest.mark.parametrize(("poisoned", "left"), [(True, 0), (False, 1)])
def test_a_poisoned_slot_is_cleared_on_release(poisoned: bool, left: int) -> None:
    book, pool = make_caches()
    first, second = book.acquire(), book.acquire()
    assert first is not None and second is not None
    assert book.reserve(second, 10)
    for slot in (first, second):
        layer_of(pool).rows[slot][3] = 1
    book.release(second, poisoned=poisoned)
    assert [layer_of(pool).rows[slot][3] for slot in (first, second)] == [1, left]


def test_a_slot_without_storage_can_be_released_as_poisoned() -> None:
    book, _ = make_caches()
    slot = book.acquire()
    assert slot is not None
    book.release(slot, poisoned=True)
    assert book.acquire() == slot


@pytest.mark.parametrize("needs_clearing", [True, False])
def test_reset_clears_layers_whose_old_state_would_be_read(needs_clearing: bool) -> None:
    book, pool = make_caches(needs_clearing=needs_clearing)
    keeper, slot = book.acquire(), book.acquire()
    assert keeper is not None and slot is not None
    assert book.reserve(slot, 10)
    layer_of(pool).rows[keeper][0] = layer_of(pool).rows[slot][0] = 1
    book.release(slot)
    assert book.acquire() == slot
    book.begin(slot)
    assert layer_of(pool).rows[keeper][0] == 1
    assert layer_of(pool).rows[slot][0] == (0 if needs_clearing else 1)


def test_close_frees_the_storage() -> None:
    book, pool = make_caches()
    slot = book.acquire()
    assert slot is not None and book.reserve(slot, 10)
    book.close()
    pool.close()
    assert book.bytes_held == 0
    assert not pool.layers

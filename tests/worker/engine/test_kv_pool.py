"""Slots, growth, shrinking and the byte limit of the KV cache."""

from __future__ import annotations

import pytest

from tests.worker.engine.fakes import layer_of, make_pool
from worker.engine.kv_pool import FIRST_COLUMNS


def test_the_lowest_free_slot_is_acquired_until_none_is_left() -> None:
    pool = make_pool(slots=3)
    assert [pool.acquire() for _ in range(4)] == [0, 1, 2, None]
    pool.release(1)
    pool.release(0)
    assert [pool.acquire() for _ in range(3)] == [0, 1, None]


def test_storage_covers_all_slots_and_its_columns_double() -> None:
    pool = make_pool(slots=4)
    slot = pool.acquire()
    assert slot is not None and pool.bytes_held == 0
    for columns, allocated in (
        (1, FIRST_COLUMNS),
        (FIRST_COLUMNS, FIRST_COLUMNS),
        (FIRST_COLUMNS + 1, 2 * FIRST_COLUMNS),
        (5 * FIRST_COLUMNS, 8 * FIRST_COLUMNS),
    ):
        assert pool.reserve(slot, columns)
        assert pool.bytes_held == 4 * allocated
        assert [len(row) for row in layer_of(pool).rows] == [allocated] * 4


def test_columns_double_up_to_the_context() -> None:
    pool = make_pool(slots=2, columns=300)
    slot = pool.acquire()
    assert slot is not None and pool.reserve(slot, 257)
    assert pool.bytes_held == 2 * 300


def test_growth_keeps_what_the_slots_hold() -> None:
    pool = make_pool(slots=2)
    first, second = pool.acquire(), pool.acquire()
    assert first is not None and second is not None
    assert pool.reserve(first, 10)
    layer_of(pool).rows[first][9] = 1
    layer_of(pool).rows[second][9] = 2
    assert pool.reserve(second, 1000)
    assert [row[9] for row in layer_of(pool).rows] == [1, 2]


def test_near_the_limit_only_used_slots_get_storage() -> None:
    pool = make_pool(limit=3 * FIRST_COLUMNS, slots=4)
    slot = pool.acquire()
    assert slot is not None and pool.reserve(slot, 10)
    assert pool.bytes_held == FIRST_COLUMNS
    other = pool.acquire()
    assert other is not None and pool.reserve(other, FIRST_COLUMNS + 10)
    assert pool.bytes_held == 2 * (FIRST_COLUMNS + 10)


def test_beyond_the_limit_nothing_changes() -> None:
    pool = make_pool(limit=1000)
    slot = pool.acquire()
    assert slot is not None and pool.reserve(slot, 900)
    assert pool.bytes_held == 900
    layer_of(pool).rows[slot][0] = 1
    assert not pool.reserve(slot, 1001)
    assert pool.bytes_held == 900
    assert layer_of(pool).rows[slot][0] == 1


def test_fits_alone_compares_one_sequence_with_the_limit() -> None:
    pool = make_pool(limit=1000)
    assert pool.bytes_for_one(900) == 900
    assert pool.fits_alone(1000)
    assert not pool.fits_alone(1001)


def test_storage_stays_for_the_next_sequences_until_it_is_trimmed() -> None:
    pool = make_pool()
    first, second = pool.acquire(), pool.acquire()
    assert first is not None and second is not None
    assert pool.reserve(second, 10)
    held = pool.bytes_held
    pool.release(first)
    pool.trim()  # a slot is in use
    pool.release(second)
    assert pool.bytes_held == held > 0
    pool.trim()
    assert pool.bytes_held == 0
    assert layer_of(pool).rows == []


def test_storage_of_more_than_half_of_the_limit_is_freed_with_the_last_slot() -> None:
    pool = make_pool(limit=1000)
    slot = pool.acquire()
    assert slot is not None and pool.reserve(slot, 501)
    pool.release(slot)
    assert pool.bytes_held == 0


@pytest.mark.parametrize(("poisoned", "left"), [(True, 0), (False, 1)])
def test_a_poisoned_slot_is_cleared_on_release(poisoned: bool, left: int) -> None:
    pool = make_pool()
    first, second = pool.acquire(), pool.acquire()
    assert first is not None and second is not None
    assert pool.reserve(second, 10)
    for slot in (first, second):
        layer_of(pool).rows[slot][3] = 1
    pool.release(second, poisoned=poisoned)
    assert [layer_of(pool).rows[slot][3] for slot in (first, second)] == [1, left]


def test_a_slot_without_storage_can_be_released_as_poisoned() -> None:
    pool = make_pool()
    slot = pool.acquire()
    assert slot is not None
    pool.release(slot, poisoned=True)
    assert pool.acquire() == slot


@pytest.mark.parametrize("needs_clearing", [True, False])
def test_reset_clears_layers_whose_old_state_would_be_read(needs_clearing: bool) -> None:
    pool = make_pool(needs_clearing=needs_clearing)
    keeper, slot = pool.acquire(), pool.acquire()
    assert keeper is not None and slot is not None
    assert pool.reserve(slot, 10)
    layer_of(pool).rows[keeper][0] = layer_of(pool).rows[slot][0] = 1
    pool.release(slot)
    assert pool.acquire() == slot
    pool.reset(slot)
    assert layer_of(pool).rows[keeper][0] == 1
    assert layer_of(pool).rows[slot][0] == (0 if needs_clearing else 1)


def test_close_frees_the_storage() -> None:
    pool = make_pool()
    slot = pool.acquire()
    assert slot is not None and pool.reserve(slot, 10)
    pool.close()
    assert pool.bytes_held == 0
    assert not pool.layers

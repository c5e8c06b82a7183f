"""The sizes to which storage grows, and their order."""

from __future__ import annotations

from typing import Any

from tests.worker.engine.fakes import FakeLayer, FakeRing, FakeRows
from worker.cache.growth import Growth, Room
from worker.cache.sizes import BOOKKEEPING, CacheSizes
from worker.kernels.attention import PAGE
from worker.layers.cache import Size, pages_for

NOTHING = Size(0, 0, 0)


def growth(*layers: Any, slots: int = 4, columns: int = 4096) -> Growth:
    sizes = CacheSizes(layers or [FakeLayer()])
    return Growth(sizes, max_slots=slots, max_columns=columns)


def room(
    limit: int, *, fair: int = 1 << 30, storage: int = 1 << 30, kept: int = 0, pinned: int = 0
) -> Room:
    """Pages of memory."""
    return Room(limit * PAGE, fair * PAGE, storage * PAGE, kept * PAGE, pinned * PAGE)


def test_columns_and_pages_double_for_all_slots() -> None:
    size = Size(4, 256, 64)
    first, *_ = growth().attempts(NOTHING, Size(1, 20, 2), room(1000))
    assert first == size
    first, *_ = growth().attempts(size, Size(4, 300, 65), room(1000))
    assert first == Size(4, 512, 128)
    first, *_ = growth(columns=300).attempts(size, Size(4, 260, 65), room(1000))
    assert first == Size(4, 300, 4 * pages_for(300))  # what all slots may have


def test_kept_pages_beside_those_of_all_slots_grow_by_an_eighth() -> None:
    """One page at a time, each of thousands of kept prompts would copy all that is kept."""
    most = 4 * pages_for(300)
    size, needed = Size(4, 300, most), Size(4, 300, most + 1)
    first, *_ = growth(columns=300).attempts(size, needed, room(1000))
    assert first == Size(4, 300, most + 1 + most // 8)


def test_where_twice_as_much_is_too_much_storage_grows_by_an_eighth_and_then_pages_give_way() -> (
    None
):
    size = Size(4, 256, 64)
    needed = Size(4, 20, 65)
    assert [*growth().attempts(size, needed, room(127))] == [
        Size(4, 256, 65 + 8),  # no page gives way
        size,  # or one, and nothing is allocated
        *[Size(4, 256, 65 + 8)] * 2,
    ]
    assert [*growth().attempts(size, needed, room(64))] == [size] * 3
    assert next(growth().attempts(size, needed, room(127, fair=70))) == Size(4, 256, 73)


def test_where_columns_are_lacking_too_pages_give_way_to_a_larger_size() -> None:
    ring = growth(FakeLayer(), FakeRing())
    size, needed = Size(1, 100, 30), Size(1, 130, 31)
    nbytes = 30 * PAGE + 130
    assert [*ring.attempts(size, needed, Room(nbytes, nbytes, nbytes, 0, 0))] == [Size(1, 130, 30)]
    assert [*ring.attempts(size, needed, Room(nbytes - 1, nbytes, nbytes, 0, 0))] == []


def test_snapshots_have_half_of_the_limit_while_nothing_is_lacking() -> None:
    rows = growth(FakeLayer(), FakeRows())
    sizes = [*rows.attempts(NOTHING, Size(1, 20, 2), room(100))]
    assert sizes[0] == Size(1, 256, 2)  # not 64 pages and 4 rows
    assert [*rows.attempts(Size(1, 256, 49), Size(1, 20, 51), room(100, kept=50))] == [
        Size(1, 256, 49),
        *[Size(1, 256, 51 + 6)] * 2,
    ]


def test_what_is_pinned_or_the_device_lacks_is_not_asked_for() -> None:
    size, needed = Size(4, 256, 64), Size(4, 20, 80)
    assert [*growth().attempts(size, needed, room(100, fair=1, kept=15, pinned=15))] == [
        Size(4, 256, 85),
        size,
        *[Size(4, 256, 85)] * 2,
    ]
    assert [*growth().attempts(size, needed, room(1000, fair=1, storage=89))] == [size]
    assert [*growth().exact(needed, room(1000, fair=1, storage=80))] == [Size(4, 256, 80), needed]
    assert [*growth().exact(needed, room(1000, fair=1, storage=79))] == []


def test_exactly_what_is_needed_has_columns_in_steps_if_they_cost_nothing_that_is_lacking() -> None:
    needed = Size(2, 300, 19)
    assert [*growth().exact(needed, room(19))] == [Size(2, 512, 19), needed]
    assert [*growth(columns=310).exact(needed, room(19))] == [Size(2, 310, 19), needed]
    assert [*growth().exact(needed, room(18))] == []
    ring = growth(FakeLayer(), FakeRing())
    nbytes = 10 * PAGE + 160
    assert [*ring.exact(Size(1, 160, 10), Room(nbytes, 0, nbytes, 0, 0))] == [Size(1, 160, 10)]


def test_pages_that_no_layer_has_are_no_more_than_slots_may_have() -> None:
    """They are blocks in the memory of the host, of which a large limit would allow millions."""
    most = 4 * pages_for(600)
    ring = growth(FakeRing(), columns=600)
    size = Size(4, 600, most)
    limit = 10**6 * BOOKKEEPING // PAGE
    sizes = [*ring.attempts(size, size._replace(pages=most + 1), room(limit))]
    assert sizes and {*sizes} == {size}
    assert all(
        one.pages <= most
        for one in ring.attempts(Size(4, 600, most - 9), Size(4, 600, most - 1), room(limit))
    )

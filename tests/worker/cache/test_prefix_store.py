"""The store of kept blocks, with states that are numbers of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from worker.cache.block_keys import block_key, root_key
from worker.cache.prefix_store import (
    BLOCK,
    MAX_PROVISIONAL,
    MAX_SNAPSHOTS,
    Block,
    PrefixStore,
)

ROOT = root_key("model", "bf16", (0,), "")


@dataclass(frozen=True)
class Bytes:
    nbytes: int


class Store(PrefixStore[Bytes]):
    """Each block has a page, whose number is that of its key."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: set[int] = set()  # that blocks have
        self.on_drop_page = self.pages.remove

    def add(self, *numbers: int) -> list[bytes]:
        """Keep a path."""
        path = path_of(*numbers)
        known = self.known(path)
        parents = [ROOT, *path]
        new = {key: Block[Bytes](parents[at], BLOCK) for at, key in enumerate(path) if at >= known}
        for key, block in new.items():
            block.page = page_of(key)
            self.pages.add(block.page)
        self.extend(new)
        self.touch(path)
        return path

    def has(self, path: list[bytes]) -> list[bool]:
        held = [self.get(key) is not None for key in path]
        assert held == [page_of(key) in self.pages for key in path]
        return held


def page_of(key: bytes) -> int:
    return int.from_bytes(key[:6], "big")


def path_of(*numbers: int) -> list[bytes]:
    """The keys of blocks, each of which repeats one token."""
    keys: list[bytes] = []
    for number in numbers:
        keys.append(block_key(keys[-1] if keys else ROOT, [number] * BLOCK))
    return keys


def in_no_slot(page: int) -> bool:
    return False


def test_a_key_stands_for_the_whole_text_before_it() -> None:
    assert path_of(1, 2)[0] == path_of(1, 3)[0]
    assert path_of(1, 2)[1] != path_of(3, 2)[1]
    assert block_key(ROOT, [1] * BLOCK) == path_of(1)[0]
    other = root_key("model", "bf16", (0,), "salt")
    assert block_key(other, [1] * BLOCK) != path_of(1)[0]


def test_known_counts_the_leading_keys_that_are_kept() -> None:
    store = Store()
    store.add(1, 2, 3)
    assert store.known(path_of(1, 2, 3, 4)) == 3
    assert store.known(path_of(1, 9, 3)) == 1
    assert store.known(path_of(2)) == store.known([]) == 0


def test_the_least_recently_used_page_is_evicted_first_and_ends_before_beginnings() -> None:
    store = Store()
    first, second = store.add(1, 2, 3), store.add(4, 5)
    store.touch(first[:2])
    assert store.evict_pages(1, in_no_slot)
    assert store.has(first) == [True, True, False]
    assert store.evict_pages(2, in_no_slot)
    assert store.has(second) == [False, False]
    assert store.evict_pages(1, in_no_slot)
    assert store.has(first) == [True, False, False]
    assert not store.evict_pages(2, in_no_slot)
    assert store.has(first) == [True, False, False]  # nothing changed
    store.evict_some(2, in_no_slot)
    assert len(store) == 0 and not store.pages


def test_more_pages_are_evicted_at_once_as_far_as_there_are_any() -> None:
    store = Store()
    first, second = store.add(1, 2, 3), store.add(4, 5)
    store.touch(first[:2])
    assert store.evict_pages(1, in_no_slot, most=2)
    assert store.has(first + second) == [True, True, False, True, False]
    assert not store.evict_pages(4, in_no_slot, most=9)
    assert store.evict_pages(3, in_no_slot, most=2)
    assert store.has(first + second) == [False] * 5
    path = store.add(1, 2, 7)
    assert store.evict_pages(1, {page_of(path[1])}.__contains__, most=2)
    assert store.has(path) == [True, True, False]  # for one, no block of a slot has to go


def test_what_is_referenced_or_in_a_slot_stays_with_all_that_it_continues() -> None:
    store = Store()
    first, second = store.add(1, 2), store.add(3)
    with store.referenced(first):
        assert not store.evict_pages(2, in_no_slot)
        assert store.has(first + second) == [True] * 3
        assert store.evict_pages(1, in_no_slot)
    assert store.has(first + second) == [True, True, False]
    third = store.add(1, 2, 7, 8)
    assert store.evict_pages(1, lambda page: page == page_of(third[2]))
    assert store.has(third) == [True, True, True, False]


def test_blocks_in_slots_give_way_where_they_continue_what_no_slot_has() -> None:
    """Their slots keep the pages. A sequence that computes anew what is kept has such ones."""
    store = Store()
    path, other = store.add(1, 2, 7), store.add(4)
    in_slots = {page_of(path[2]), page_of(other[0])}
    assert not store.evict_pages(3, in_slots.__contains__)
    assert store.has(path + other) == [True] * 4
    with store.referenced(path):
        assert not store.evict_pages(1, in_slots.__contains__)
    assert store.evict_pages(1, in_slots.__contains__)
    assert store.has(path + other) == [True, False, False, True]


def test_of_pinned_blocks_only_the_pages_are_evicted() -> None:
    """They have copies, and come back into pages."""
    store = Store()
    path = path_of(1, 2)
    blocks = {
        key: Block(parent, BLOCK, Bytes(9))
        for key, parent in zip(path, [ROOT, *path], strict=False)
    }
    store.pin(blocks)
    for key, block in blocks.items():
        block.page = page_of(key)
        store.pages.add(block.page)
    longer = store.add(1, 2, 3)
    assert store.evict_pages(3, in_no_slot)
    assert store.known(longer) == 2 and not store.pages
    assert store.nbytes == store.pinned_bytes == 18


def test_drop_removes_all_that_continues_a_block() -> None:
    store = Store()
    first, branch, other = store.add(1, 2, 3), store.add(1, 4), store.add(5)
    store.drop(first[1:2])
    assert store.has(first) == [True, False, False]
    assert store.has(branch) == [True, True]
    store.drop(first[:1])
    assert store.has(branch + other) == [False, False, True]


def test_bytes_are_those_of_snapshots_and_the_least_recently_used_are_evicted() -> None:
    store = Store()
    paths = [store.add(1, number) for number in range(3)]
    for path in paths:
        store.attach(path[-1], Bytes(7))
    store.touch(paths[0])
    assert store.nbytes == 21
    with store.referenced(paths[1]):
        assert not store.shrink(6)
        assert store.shrink(14)
    assert snapshots(store, [path[-1] for path in paths]) == [True, True, False]
    assert [store.has(path) for path in paths] == [[True, True]] * 3
    assert store.evict(1) == 7 and store.nbytes == 7


def test_the_number_of_snapshots_is_bounded() -> None:
    store = Store()
    paths = [store.add(1, number) for number in range(MAX_SNAPSHOTS + 2)]
    for path in paths:
        store.attach(path[-1], Bytes(7))
        store.touch(paths[0])
    blocks = [store.get(path[-1]) for path in paths]
    without = [at for at, block in enumerate(blocks) if block is not None and not block.snapshot]
    assert without == [1, 2]  # the first was used again and again
    assert store.nbytes == MAX_SNAPSHOTS * 7


def with_snapshots(store: Store, numbers: range, *, provisional: bool) -> list[bytes]:
    """Keep blocks with snapshots of 7 bytes, each the first one of its text."""
    keys = [store.add(number)[0] for number in numbers]
    for key in keys:
        store.attach(key, Bytes(7), provisional=provisional)
    return keys


def snapshots(store: Store, keys: list[bytes]) -> list[bool]:
    blocks = [store.get(key) for key in keys]
    return [block is not None and block.snapshot is not None for block in blocks]


def test_provisional_snapshots_displace_only_each_other() -> None:
    store = Store()
    evicted: list[bytes] = []
    store.on_evict = evicted.append
    regular = with_snapshots(store, range(MAX_SNAPSHOTS), provisional=False)
    some = with_snapshots(store, range(100, 100 + MAX_PROVISIONAL), provisional=True)
    store.touch(some[:1])
    more = with_snapshots(store, range(200, 202), provisional=True)
    assert all(snapshots(store, regular + more))
    assert evicted == some[1:3]
    assert snapshots(store, some) == [at not in (1, 2) for at in range(MAX_PROVISIONAL)]
    count = MAX_SNAPSHOTS + MAX_PROVISIONAL
    assert store.nbytes == count * 7


def test_a_confirmed_snapshot_is_kept_like_the_others() -> None:
    store = Store()
    some = with_snapshots(store, range(MAX_PROVISIONAL), provisional=True)
    store.confirm(some[0])
    regular = with_snapshots(store, range(200, 200 + MAX_SNAPSHOTS - 1), provisional=False)
    with_snapshots(store, range(100, 100 + MAX_PROVISIONAL), provisional=True)
    assert snapshots(store, some) == [True] + [False] * (MAX_PROVISIONAL - 1)
    with_snapshots(store, range(300, 301), provisional=False)
    assert snapshots(store, some[:1] + regular) == [False] + [True] * (MAX_SNAPSHOTS - 1)


def test_provisional_snapshots_make_room_for_each_other_within_their_bytes() -> None:
    store = Store()
    some = with_snapshots(store, range(4), provisional=True)
    regular = with_snapshots(store, range(10, 14), provisional=False)
    assert store.room_for_provisional(7, 5 * 7) and all(snapshots(store, some))
    assert not store.room_for_provisional(7, 6) and all(snapshots(store, some))
    with store.referenced(some[1:2]):
        assert not store.room_for_provisional(7, 7)
    assert snapshots(store, some) == [False, True, False, False]
    assert store.room_for_provisional(7, 7) and not any(snapshots(store, some))
    assert all(snapshots(store, regular))
    assert store.nbytes == 4 * 7


def test_a_short_block_does_not_outlive_its_snapshot() -> None:
    store = Store()
    path = store.add(1)
    tail = block_key(path[0], [5, 6])
    short = Block[Bytes](path[0], 2, page=5)
    store.pages.add(5)
    store.extend({tail: short})
    store.attach(tail, Bytes(7))
    store.touch([*path, tail])
    parent = store.get(path[0])
    assert parent is not None and parent.tails == {2}
    for number in range(2, MAX_SNAPSHOTS + 2):
        store.attach(store.add(number)[0], Bytes(7))
    assert store.get(tail) is None and 5 not in store.pages
    assert store.nbytes == MAX_SNAPSHOTS * 7


@pytest.mark.parametrize("other", [("m", "fp32"), ("n", "bf16"), ("m", "bf16", "a")])
def test_roots_differ_where_a_fact_differs(other: tuple[str, ...]) -> None:
    assert root_key(*other) != root_key("m", "bf16")

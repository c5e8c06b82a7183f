"""The store of kept blocks, with states that are numbers of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from worker.cache.block_keys import block_key, root_key
from worker.cache.prefix_store import (
    BLOCK,
    MAX_PROVISIONAL,
    MAX_SNAPSHOTS,
    OVERHEAD,
    Block,
    PrefixStore,
)

ROOT = root_key("model", "bf16", (0,), "")
SIZE = 1000
ONE = SIZE + OVERHEAD  # bytes of a block


@dataclass(frozen=True)
class Bytes:
    nbytes: int = SIZE


def path_of(*numbers: int) -> list[bytes]:
    """The keys of blocks, each of which repeats one token."""
    keys: list[bytes] = []
    for number in numbers:
        keys.append(block_key(keys[-1] if keys else ROOT, [number] * BLOCK))
    return keys


def add(store: PrefixStore[Bytes], *numbers: int) -> list[bytes]:
    """Keep a path."""
    path = path_of(*numbers)
    known = store.known(path)
    parents = [ROOT, *path]
    store.extend(
        {key: Block(parents[at], BLOCK, Bytes()) for at, key in enumerate(path) if at >= known}
    )
    store.touch(path)
    return path


def kept(store: PrefixStore[Bytes], path: list[bytes]) -> list[bool]:
    return [store.get(key) is not None for key in path]


def test_a_key_stands_for_the_whole_text_before_it() -> None:
    assert path_of(1, 2)[0] == path_of(1, 3)[0]
    assert path_of(1, 2)[1] != path_of(3, 2)[1]
    assert block_key(ROOT, [1] * BLOCK) == path_of(1)[0]
    other = root_key("model", "bf16", (0,), "salt")
    assert block_key(other, [1] * BLOCK) != path_of(1)[0]


def test_known_counts_the_leading_keys_that_are_kept() -> None:
    store: PrefixStore[Bytes] = PrefixStore()
    add(store, 1, 2, 3)
    assert store.known(path_of(1, 2, 3, 4)) == 3
    assert store.known(path_of(1, 9, 3)) == 1
    assert store.known(path_of(2)) == store.known([]) == 0
    assert store.nbytes == 3 * ONE


def test_the_least_recently_used_is_evicted_first_and_ends_before_beginnings() -> None:
    store: PrefixStore[Bytes] = PrefixStore()
    first, second = add(store, 1, 2, 3), add(store, 4, 5)
    store.touch(first[:2])
    assert store.shrink(4 * ONE)
    assert kept(store, first) == [True, True, False]
    assert store.shrink(2 * ONE)
    assert kept(store, second) == [False, False]
    assert store.shrink(ONE)
    assert kept(store, first) == [True, False, False]
    assert store.shrink(0) and len(store) == store.nbytes == 0


def test_referenced_blocks_are_not_evicted() -> None:
    store: PrefixStore[Bytes] = PrefixStore()
    first, second = add(store, 1, 2), add(store, 3)
    with store.referenced(first):
        assert not store.shrink(ONE)
        assert kept(store, first + second) == [True] * 3  # nothing changed
        assert store.fit(2, ONE, 5 * ONE) == 2
        assert kept(store, first + second) == [True] * 3  # there was room
        assert store.fit(4, ONE, 5 * ONE) == 3
        assert kept(store, first + second) == [True, True, False]
    assert store.shrink(0)


def test_drop_removes_all_that_continues_a_block() -> None:
    store: PrefixStore[Bytes] = PrefixStore()
    first, branch, other = add(store, 1, 2, 3), add(store, 1, 4), add(store, 5)
    store.drop(first[1:2])
    assert kept(store, first) == [True, False, False]
    assert kept(store, branch) == [True, True]
    store.drop(first[:1])
    assert kept(store, branch + other) == [False, False, True]
    assert store.nbytes == ONE


def test_the_number_of_snapshots_is_bounded() -> None:
    store: PrefixStore[Bytes] = PrefixStore()
    paths = [add(store, 1, number) for number in range(MAX_SNAPSHOTS + 2)]
    for path in paths:
        store.attach(path[-1], Bytes(7))
        store.touch(paths[0])
    blocks = [store.get(path[-1]) for path in paths]
    without = [at for at, block in enumerate(blocks) if block is not None and not block.snapshot]
    assert without == [1, 2]  # the first was used again and again
    assert store.nbytes == (len(paths) + 1) * ONE + MAX_SNAPSHOTS * 7


def with_snapshots(store: PrefixStore[Bytes], numbers: range, *, provisional: bool) -> list[bytes]:
    """Keep blocks with snapshots of 7 bytes, each the first one of its text."""
    keys = [add(store, number)[0] for number in numbers]
    for key in keys:
        store.attach(key, Bytes(7), provisional=provisional)
    return keys


def snapshots(store: PrefixStore[Bytes], keys: list[bytes]) -> list[bool]:
    blocks = [store.get(key) for key in keys]
    return [block is not None and block.snapshot is not None for block in blocks]


def test_provisional_snapshots_displace_only_each_other() -> None:
    store: PrefixStore[Bytes] = PrefixStore()
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
    assert store.nbytes == (count + 2) * ONE + count * 7


def test_a_confirmed_snapshot_is_kept_like_the_others() -> None:
    store: PrefixStore[Bytes] = PrefixStore()
    some = with_snapshots(store, range(MAX_PROVISIONAL), provisional=True)
    store.confirm(some[0])
    regular = with_snapshots(store, range(200, 200 + MAX_SNAPSHOTS - 1), provisional=False)
    with_snapshots(store, range(100, 100 + MAX_PROVISIONAL), provisional=True)
    assert snapshots(store, some) == [True] + [False] * (MAX_PROVISIONAL - 1)
    with_snapshots(store, range(300, 301), provisional=False)
    assert snapshots(store, some[:1] + regular) == [False] + [True] * (MAX_SNAPSHOTS - 1)


def test_provisional_snapshots_make_room_for_each_other_within_their_bytes() -> None:
    store: PrefixStore[Bytes] = PrefixStore()
    some = with_snapshots(store, range(4), provisional=True)
    regular = with_snapshots(store, range(10, 14), provisional=False)
    assert store.room_for_provisional(7, 5 * 7) and all(snapshots(store, some))
    assert not store.room_for_provisional(7, 6) and all(snapshots(store, some))
    with store.referenced(some[1:2]):
        assert not store.room_for_provisional(7, 7)
    assert snapshots(store, some) == [False, True, False, False]
    assert store.room_for_provisional(7, 7) and not any(snapshots(store, some))
    assert all(snapshots(store, regular))
    assert store.nbytes == 8 * ONE + 4 * 7


def test_a_short_block_does_not_outlive_its_snapshot() -> None:
    store: PrefixStore[Bytes] = PrefixStore()
    path = add(store, 1)
    tail = block_key(path[0], [5, 6])
    store.extend({tail: Block(path[0], 2, Bytes())})
    store.attach(tail, Bytes(7))
    store.touch([*path, tail])
    parent = store.get(path[0])
    assert parent is not None and parent.tails == {2}
    for number in range(2, MAX_SNAPSHOTS + 2):
        store.attach(add(store, number)[0], Bytes(7))
    assert store.get(tail) is None
    assert store.nbytes == (MAX_SNAPSHOTS + 1) * ONE + MAX_SNAPSHOTS * 7


@pytest.mark.parametrize("other", [("m", "fp32"), ("n", "bf16"), ("m", "bf16", "a")])
def test_roots_differ_where_a_fact_differs(other: tuple[str, ...]) -> None:
    assert root_key(*other) != root_key("m", "bf16")

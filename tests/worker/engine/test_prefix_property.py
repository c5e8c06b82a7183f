"""Random requests whose prompts begin alike, in any order and under memory pressure: every sequence
has the tokens that it has alone without reuse, and no kept state is lost, leaked or over the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import KINDS, make_shallow_checkpoint
from worker import Engine
from worker.cache.block_keys import root_key
from worker.cache.prefix_cache import PROVISIONAL_SHARE
from worker.cache.prefix_store import BLOCK, MAX_PROVISIONAL, MAX_SNAPSHOTS
from worker.engine.engine import EngineCore
from worker.engine.prompt_caches import pin_prompt_cache
from worker.engine.sequence import Sequence, TokenEvent
from worker.layers.cache import Size
from worker.text.detokenizer import Detokenizer

WORDS = ([7] * 9, [8, 9] * 8, [10 + i for i in range(23)], [40])  # prompts are made of these
PINNED = [*WORDS[1], *WORDS[2]]  # a prompt cache, of two blocks and a shorter one
LONGEST = 200  # tokens of a prompt and its answer
EXAMPLES = 12

Prompt = tuple[int, ...]


class Ask(NamedTuple):
    """`n` sequences with one prompt."""

    prompt: Prompt
    tokens: int
    n: int
    salt: str


class Cancel(NamedTuple):
    which: int


class Steps(NamedTuple):
    number: int


PROMPTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=7).map(
    lambda words: tuple(token for word in words for token in word)
)
ASKS = st.builds(
    Ask, PROMPTS, st.sampled_from([1, 3, 20]), st.sampled_from([1, 1, 3]), st.sampled_from("aab")
)
ACTIONS = st.lists(
    st.one_of(
        ASKS,
        ASKS,
        st.builds(Steps, st.integers(1, 12)),
        st.builds(Cancel, st.integers(0, 30)),
    ),
    min_size=8,
    max_size=40,
)
# Of the first ones two or three outgrow the cache together; the others compute their prompt once.
# They alone evict, share and reuse as much as the fixture asks for.
PRESSURE: list[Ask | Cancel | Steps] = [
    *(Ask((*WORDS[i % 2], *WORDS[2] * 10), 150, 1, "ab"[i % 2]) for i in range(12)),
    Steps(2000),
    *(Ask(tuple(PINNED * 3), 3, 3, "a") for _ in range(9)),
]


class Pair:
    """One model with reuse and a small cache, perhaps with a draft, and alone without either."""

    def __init__(self, path: Path, draft: str | None = None) -> None:
        options: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "context": 512}
        self.plain = Engine.load(str(path), max_batch=1, prefix_cache=False, **options)
        one = self.plain._core.book.bytes_for_one(LONGEST)
        options |= {"max_batch": 4, "cache_bytes": 7 * one // 2, "draft": draft}
        self.shared = Engine.load(str(path), **options)
        self.alone = cache(self._alone)
        self.core = self.shared._core
        self.core.prefix.spacing = 2 * BLOCK  # prompts are short here
        with self.shared._state_of(PINNED) as state:
            self.pinned = state
        self.preempted = self.evicted = self.shared_pages = 0
        self._count()

    def _count(self) -> None:
        """Count preempted sequences and evicted blocks."""
        scheduler: Any = self.core._scheduler
        store, preempt = self.core.book.kept, scheduler._preempt

        def preempted(sequence: Sequence, **options: Any) -> None:
            self.preempted += 1
            preempt(sequence, **options)

        def evicted(key: bytes) -> None:
            self.evicted += 1

        scheduler._preempt, store.on_evict = preempted, evicted

    def _alone(self, prompt: Prompt, tokens: int, choice: int) -> list[int]:
        sequence, events = sequence_of(self.plain._core, Ask(prompt, tokens, 1, ""), choice)
        self.plain._core.add([sequence])
        while not sequence.ended:
            self.plain.step()
        return ids_of(events)


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    pair = Pair(make_shallow_checkpoint(tmp_path_factory.mktemp("model"), KINDS[request.param]))
    yield pair
    reused = (pair.core.prefix.cached_tokens, pair.shared_pages)
    counts = (pair.core.steps, *reused, pair.preempted, pair.evicted)
    least = (500, 1000, 1000, 0, 100)
    enough = all(count > few for count, few in zip(counts, least, strict=True))
    assert enough or request.session.testsfailed, counts


def sequence_of(core: EngineCore, ask: Ask, choice: int) -> tuple[Sequence, list[TokenEvent]]:
    """Even choices are greedy, odd ones are drawn."""
    sampling = Sampling(
        temperature=choice % 2, seed=len(ask.prompt), max_tokens=ask.tokens, ignore_eos=True
    )
    events: list[TokenEvent] = []
    sequence = Sequence(
        ask.prompt,
        core.sampling_params(sampling, ask.prompt),
        choice,
        Detokenizer(core.tokenizer),
        events.append,
        salt=ask.salt,
    )
    return sequence, events


def ids_of(events: list[TokenEvent]) -> list[int]:
    return [event.sampled.token_id for event in events if event.sampled is not None]


def check_store(core: EngineCore, roots: set[bytes]) -> None:
    """The invariants between two steps."""
    store = core.book.kept
    assert core.book.bytes_held <= core.book.limit_bytes
    assert store.nbytes == sum(block.nbytes for block in store._blocks.values())
    assert len(store._snapshots) <= MAX_SNAPSHOTS
    assert len(store._provisional) <= MAX_PROVISIONAL
    provisional = sum(map(store._snapshot_bytes, store._provisional))
    assert provisional <= core.book.limit_bytes // PROVISIONAL_SHARE
    sizes = {copy.number: copy.nbytes for one in store._blocks.values() for copy in one.copies}
    assert {number: copy.nbytes for number, copy in core.runner.pool.kept.items()} == sizes
    check_pages(core)
    pinned = {key for key in store._blocks if store.pinned(key)}
    assert store.pinned_bytes == sum(store._blocks[key].nbytes for key in pinned)
    with_snapshot = {key for key, block in store._blocks.items() if block.snapshot}
    assert with_snapshot - pinned == {*store._snapshots, *store._provisional}
    assert store._snapshots.keys().isdisjoint(store._provisional)
    newer: set[bytes] = set()
    for key, block in reversed(store._blocks.items()):
        newer.add(key)
        assert block.references == (key in pinned)
        assert 0 < block.length <= BLOCK
        if block.parent in store._blocks:
            assert block.parent in newer  # it is evicted after this block
        else:
            assert block.parent in roots
    for sequence in core._scheduler.running:
        assert sequence.computed <= sequence.length


def check_pages(core: EngineCore) -> None:
    """Each page is free, or has the slots and the block that say so."""
    pages = core.book._pages
    kept = [one.page for one in core.book.kept._blocks.values() if one.page is not None]
    held = Counter(page for slot in pages._held.values() for page in slot)
    assert pages._holders == held
    assert sorted(pages._kept) == sorted(kept)
    assert sorted([*pages._free, *{*held, *kept}]) == [*range(pages._total)]
    assert all(keeper.page == page for page, keeper in pages._kept.items())
    for slot, row in pages._held.items():
        assert core.runner.pool.table.pages(slot, 0, BLOCK * len(row)) == row


def shared_pages(core: EngineCore) -> int:
    """Pages that several slots have."""
    return sum(count > 1 for count in core.book._pages._holders.values())


@settings(max_examples=EXAMPLES)
@given(actions=ACTIONS, pin=st.booleans())
@example(actions=PRESSURE, pin=False)
def test_tokens_are_those_of_each_sequence_alone_and_no_state_leaks(
    pair: Pair, actions: list[Ask | Cancel | Steps], pin: bool
) -> None:
    run(pair, actions, pin)


def run(pair: Pair, actions: list[Ask | Cancel | Steps], pin: bool = False) -> None:
    """Run the actions and check everything that must hold."""
    core = pair.core
    core.book.kept.clear()
    if pin:
        pin_prompt_cache(core, pair.pinned, Path("pinned"))
    roots = {root_key(*core.loaded.state_of(1))}
    asked: list[tuple[Ask, int, Sequence, list[TokenEvent]]] = []

    def step() -> bool:
        ran = pair.shared.step()
        check_store(core, roots)
        pair.shared_pages += shared_pages(core)
        return ran

    for action in actions:
        match action:
            case Ask():
                for choice in range(action.n):
                    sequence, events = sequence_of(core, action, choice)
                    asked.append((action, choice, sequence, events))
                    core.add([sequence])
            case Cancel() if asked:
                asked[action.which % len(asked)][2].cancel()
            case Steps():
                for _ in range(action.number):
                    if not step():
                        break
    while step():
        pass
    for ask, choice, sequence, events in asked:
        assert sequence.ended and sequence.slot is None
        expected = pair.alone(ask.prompt, ask.tokens, choice)
        if sequence.cancelled:
            expected = expected[: len(ids_of(events))]
        else:
            assert events[-1].error is None
        assert ids_of(events) == expected
    assert not core.prefix._progress
    core.trim()
    book = core.book
    pages = book._size.pages  # no slot is in use
    assert book.bytes_held == book.kept.nbytes + book.sizes.storage(Size(0, 0, pages))
    book.give_back(book.bytes_held)
    assert book.bytes_held == book.kept.pinned_bytes
    core.runner.apply(book.take_changes())
    assert len(core.book.kept) == (len(pair.pinned.blocks) if pin else 0)

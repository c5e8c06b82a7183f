"""Random sequences in caches that are too small for them, with layers of all kinds, and prompts
whose state is saved: each ends with all its tokens, or with an error if it is too large even alone,
after a bounded number of steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine.fakes import (
    FakeLayer,
    FakeRing,
    FakeRows,
    FakeSequence,
    commit,
    make_caches,
)
from worker.cache.prefix_cache import PrefixCache
from worker.cache.prefix_store import BLOCK
from worker.cache.state_saver import StateSaver
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence, TokenEvent
from worker.engine.slots import Slots
from worker.engine.speculation import Speculation
from worker.layers.cache import LayerCache
from worker.speculative.proposer import Draft, DraftedSequence

KINDS: dict[str, tuple[type[LayerCache], ...]] = {
    "full": (FakeLayer,),
    "recurrent": (FakeLayer, FakeRows),
    "window": (FakeLayer, FakeRing),
    "both": (FakeLayer, FakeRows, FakeRing, FakeRows),
    "windows": (FakeRing,),
}
WORDS = ([7] * 9, [8, 9] * 8, [*range(10, 33)], [40])  # prompts are made of these
STEPS = 50  # per token of an answer: those of prompts that are computed again


class Guess:
    """Proposes what is drawn, and other tokens."""

    start = 0.8

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def propose(self, wanted: SequenceOf[tuple[DraftedSequence, int]]) -> list[Draft]:
        return [Draft(self._rng.choices([5, 6], [2, 1], k=number)) for _, number in wanted]


class Run:
    """A scheduler with a cache of some kind, whose size and options are drawn."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        kinds = KINDS[kind]
        one = make_caches(kinds=kinds)[0].bytes_for_one(rng.choice([60, 150, 300]))
        self.limit = int(one * rng.choice([1, 1.05, 1.2, 1.5, 2, 3.5]))
        slots = Slots.share(rng.randint(1, 5), None, rng.random() < 0.5)
        step_tokens = rng.choice([24, 100, 1000])
        self.book, _ = make_caches(self.limit, slots=slots.batch + slots.paused + 1, kinds=kinds)
        proposer = rng.choice([None, Guess(rng)])
        self.scheduler = Scheduler(
            self.book,
            slots,
            step_tokens,
            prefix_cache=PrefixCache(
                self.book, rng.choice([None, lambda length: ("model",)]), spacing=2 * BLOCK
            ),
            speculation=Speculation(
                proposer, self.book, most=rng.choice([1, 4]), step_tokens=step_tokens
            ),
        )
        self.asked: list[FakeSequence] = []
        self.saved: list[tuple[Sequence, list[TokenEvent], StateSaver]] = []
        self.steps = 0

    def ask(self, rng: random.Random) -> None:
        prompt = [token for _ in range(rng.randint(1, 12)) for token in rng.choice(WORDS)]
        tokens = rng.choice([1, 3, 30, 100])
        one = FakeSequence(len(prompt), bulk=rng.random() < 0.5, max_tokens=tokens, ignore_eos=True)
        one.prompt_ids = prompt
        self.asked.append(one)
        self.scheduler.add(one)

    def save(self, rng: random.Random) -> None:
        """A prompt whose state is saved."""
        prompt = [7] * rng.randint(16, 200)
        saver = StateSaver(self.book, prompt, 64)
        events: list[TokenEvent] = []
        one = Sequence(prompt, listener=events.append, saver=saver)
        self.saved.append((one, events, saver))
        self.scheduler.add(one)

    def step(self) -> bool:
        """Take a step whose every token is 5. Returns False if nothing is left to run."""
        self.scheduler.remove_cancelled()
        before = len(self.scheduler.live)
        self.scheduler.schedule()
        assert self.book.bytes_held <= self.limit
        if not self.scheduler.scheduled:  # perhaps since one has failed; then the next is admitted
            assert not self.scheduler.live or len(self.scheduler.live) < before
            return bool(self.scheduler.live)
        commit(self.scheduler)
        self.book.leave_room()
        self.steps += 1
        assert self.book.bytes_held <= self.limit
        return True

    def check(self) -> None:
        """What must hold at the end."""
        for one in self.asked:
            assert one.ended and one.slot is None
            error = one.events[-1].error
            if error is None:
                assert one.sampling is not None
                assert len(one.output_ids) == one.sampling.params.max_tokens
            elif not one.cancelled:
                assert error.code == "out_of_memory"
                assert not self.book.fits_alone(one.length)
        for saved, events, saver in self.saved:
            assert saved.ended and saved.slot is None and len(events) == 1
            assert (events[0].error is None) == self.book.fits_alone(saved.length)
            saver.drop()
        assert self.steps <= len(self.saved) * STEPS + STEPS * sum(
            len(one.output_ids) + 1 for one in self.asked
        )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_each_sequence_ends_in_a_full_cache(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    run = Run(kind, rng)
    for _ in range(rng.randint(2, 12)):
        for _ in range(rng.randint(1, 3)):
            run.ask(rng)
        if rng.random() < 0.2:
            run.save(rng)
        if rng.random() < 0.2:
            rng.choice(run.asked).cancel()
        for _ in range(rng.randint(0, 20)):
            run.step()
    while run.step():
        assert run.steps < 200_000
    run.check()

"""The memory that the caches of a device share, with random demands."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import JobError
from worker.cache_memory import CacheMemory, CacheShare

TOTAL, LEAST = 100, 10


@dataclass(eq=False)
class Job:
    """A sequence, which grows by one byte in each step until it has `size` bytes."""

    model: int
    size: int
    arrived: int
    held: int = 0


@dataclass(eq=False)
class Model:
    """A model as the engine runs it: the oldest jobs first; it keeps what ended jobs have held."""

    share: CacheShare
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    kept: int = 0

    @property
    def bytes_held(self) -> int:
        return self.bytes_needed + self.kept

    @property
    def bytes_needed(self) -> int:
        return sum(one.held for one in self.running)

    def give_back(self, nbytes: int) -> None:
        self.kept -= min(self.kept, nbytes)

    def step(self) -> list[Job]:
        """The jobs that end."""
        self.share.forget()
        for one in list(self.running):
            if one not in self.running:
                continue
            while one in self.running and not self._may_hold(self.bytes_needed + 1):
                newest = self.running[-1]
                if newest is one and len(self.running) == 1:
                    waits = self.share.want(self.bytes_needed + 1, one.arrived, blocked=True)
                    if waits and self.share.oldest(one.arrived):
                        break
                self._preempt(newest)
            else:
                one.held += one in self.running
        while self.waiting:
            one = self.waiting[0]
            need = self.bytes_needed + one.held + 1
            if self.share.yields(self.bytes_needed + one.size, one.arrived):
                break
            if not self._may_hold(need):
                blocked = not self.running
                any(
                    self.share.want(size, one.arrived, blocked=blocked)
                    for size in (self.bytes_needed + one.size, one.size)
                )
                break
            self.running.append(self.waiting.pop(0))
            self.running[-1].held = 1
        ended = [one for one in self.running if one.held >= one.size]
        for one in ended:
            self.running.remove(one)
            room = self.share.limit - self.bytes_needed
            self.kept = min(self.kept + one.held, max(0, room))
        return ended

    def _may_hold(self, needed: int) -> bool:
        """Its own prefixes go before a job waits; those of others if that is not enough."""
        if needed > self.share.limit and not self.share.take(needed):
            return False
        self.kept = min(self.kept, self.share.limit - needed)
        return True

    def _preempt(self, job: Job) -> None:
        self.running.remove(job)
        job.held = 0
        self.waiting.insert(0, job)


def enter(memory: CacheMemory, name: str, **numbers: int) -> CacheShare:
    share = CacheShare(memory, name, numbers.get("fixed", 0), numbers.get("least", LEAST))
    share.most = numbers.get("most")
    assert memory.enter(share, 0.0)
    return share


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**32), st.integers(1, 40), st.booleans())
def test_whatever_is_wanted_the_memory_is_kept_to_and_each_job_ends(
    models: int, seed: int, jobs: int, bursts: bool
) -> None:
    choose, memory, running = random.Random(seed), CacheMemory(TOTAL), []
    for number in range(models):
        share = enter(memory, f"m{number}")
        running.append(Model(share))
        share.holder = running[-1]
    largest = TOTAL - (models - 1) * LEAST
    sizes = (1, largest) if choose.random() < 0.5 else (largest // 2, largest)
    todo = [Job(choose.randrange(models), choose.randint(*sizes), number) for number in range(jobs)]
    left, steps = set(todo), 0
    while left:
        for _ in range(len(todo) if bursts else choose.randint(0, 2)):
            if todo:
                job = todo.pop(0)
                running[job.model].waiting.append(job)
        before = {one: one.held for model in running for one in model.running}
        for model in choose.sample(running, models):
            held = [(other, other.bytes_needed) for other in running if other is not model]
            left -= set(model.step())
            # Nobody takes what the sequences of another model hold.
            assert held == [(other, other.bytes_needed) for other, _ in held]
            taken = sum(max(one.least, one.held) for one in memory.shares)
            assert taken <= TOTAL
            assert all(one.limit >= LEAST for one in memory.shares)
        steps += 1
        assert steps < 100 + 2 * jobs * TOTAL, (before, memory.wants)


def test_a_model_grows_into_what_the_others_do_not_use_and_gives_it_back() -> None:
    memory = CacheMemory(TOTAL)
    first, second = Model(enter(memory, "a")), Model(enter(memory, "b"))
    first.share.holder, second.share.holder = first, second
    assert first.share.limit == first.share.ceiling == TOTAL - LEAST
    first.kept = 80
    assert second.share.limit == 20
    assert second.share.take(50)
    assert (first.kept, second.share.limit) == (50, 50)
    assert not second.share.take(TOTAL)  # nothing is dropped in vain
    assert first.kept == 50


def test_a_limit_of_its_own_is_a_hard_one() -> None:
    memory = CacheMemory(TOTAL)
    share = enter(memory, "a", most=30)
    assert (share.limit, share.ceiling) == (30, 30)
    assert share.take(30) and not share.take(31)


def test_room_for_a_further_model_comes_from_what_no_sequence_needs() -> None:
    memory = CacheMemory(TOTAL)
    first = Model(enter(memory, "a"))
    first.share.holder = first
    first.kept = 40
    first.running = [Job(0, 60, 0, held=50)]
    new = CacheShare(memory, "b", 50, LEAST)
    assert not memory.enter(new, 1.0)
    assert first.kept == 0 and first.bytes_needed == 50
    assert first.share.yields(60, 2.0) and not first.share.yields(60, 0.5)
    assert not first.share.yields(LEAST, 2.0)  # these bytes are always its own
    first.running = []
    assert memory.enter(new, 1.0)
    assert memory.total == 50 and first.share.limit == 40
    with pytest.raises(JobError, match=r"needs .* beside the models in memory"):
        memory.enter(CacheShare(memory, "c", 40, LEAST), 2.0)
    memory.abandon("b")
    assert memory.total == TOTAL

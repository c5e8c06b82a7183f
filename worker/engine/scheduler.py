"""Which sequences advance in the next step, and by how many tokens.

There is one rule: every sequence has tokens that its cache has not caught up with (a whole prompt,
or the one token that was just drawn), and each step hands out a budget of them, oldest first. What
does not fit into the cache is preempted, newest first, and computed again later.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from jobs.errors import JobError
from worker.engine.kv_pool import CachePool
from worker.engine.sequence import Sequence


@dataclass
class Scheduler:
    """Owns the waiting line and the running batch. Used by the engine's thread alone."""

    pool: CachePool
    max_batch: int  # sequences that run together
    step_tokens: int  # tokens that one step computes at most
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)  # oldest first
    careful: list[Sequence] = field(default_factory=list)  # run alone until these have ended

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, spoiled: bool = False) -> None:
        """Take an ended sequence out; `spoiled` if its cache may hold NaN."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._free(sequence, spoiled=spoiled)

    def schedule(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next step with their number of tokens; fails what can't ever fit."""
        self.careful = [sequence for sequence in self.careful if not sequence.ended]
        plan: list[tuple[Sequence, int]] = []
        budget = self.step_tokens
        for sequence in list(self.running):
            count = min(sequence.pending, budget)
            if sequence not in self.running or count == 0:
                continue  # preempted for an older one, or the budget is spent
            if self._make_room(sequence, count):
                plan.append((sequence, count))
                budget -= count
        limit = 1 if self.careful else self.max_batch
        while self.waiting and budget and len(self.running) < limit:
            sequence = self.waiting[0]
            count = min(sequence.pending, budget)
            if not self._admit(sequence, count):
                break
            if not sequence.ended:
                plan.append((sequence, count))
                budget -= count
        return [(sequence, count) for sequence, count in plan if sequence in self.running]

    def retreat(self) -> None:
        """After a step that failed as a whole: all go back to the line and run one at a time."""
        self.careful = list(self.running)
        for sequence in reversed(self.careful):
            self._preempt(sequence)

    def _admit(self, sequence: Sequence, count: int) -> bool:
        slot = self.pool.acquire()
        if slot is None:
            return False
        if not self.pool.reserve(slot, count):
            self.pool.release(slot)
            if not self.running:
                self.waiting.popleft()
                sequence.fail(self._too_large(sequence))
                return True
            return False
        self.pool.start(slot)
        sequence.slot = slot
        sequence.started_at = sequence.started_at or time.time()
        self.waiting.popleft()
        self.running.append(sequence)
        return True

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Grow the cache for `count` more tokens, preempting newer sequences if need be. False if
        the sequence itself was preempted or failed."""
        assert sequence.slot is not None
        while not self.pool.reserve(sequence.slot, sequence.computed + count):
            newest = self.running[-1]
            if newest is not sequence:
                self._preempt(newest)
            elif len(self.running) > 1 or self.pool.fits_alone(sequence.computed + count):
                self._preempt(sequence)  # comes back when there is room, alone at the latest
                return False
            else:
                sequence.fail(self._too_large(sequence))
                self.remove(sequence)
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence, *, spoiled: bool = False) -> None:
        sequence.computed = 0
        if sequence.slot is not None:
            self.pool.release(sequence.slot, spoiled=spoiled)
            sequence.slot = None

    def _too_large(self, sequence: Sequence) -> JobError:
        need = self.pool.bytes_for_one(sequence.length + 1)
        return JobError(
            "out_of_memory",
            f"a sequence of {sequence.length} tokens needs {need / 2**20:.0f} MiB of KV cache, the "
            f"limit is {self.pool.limit_bytes / 2**20:.0f} MiB: shorten the prompt or max_tokens",
        )

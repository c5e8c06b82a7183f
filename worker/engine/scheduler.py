"""Selects the sequences of the next step and the number of tokens that each one computes.

Prefill and decode are not distinguished: a sequence has pending tokens that are not in the KV cache
yet (the whole prompt, or the one token sampled last), and each step spends a token budget on them,
oldest sequence first. When the KV cache is full, the newest sequences are preempted and recomputed
later. A sequence whose beginning an older one computes waits for it; others may pass it, but not
take its place in the batch.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from jobs.errors import JobError
from worker.engine.kv_pool import CachePool
from worker.engine.prefix_cache import PrefixCache
from worker.engine.sequence import Sequence

Scheduled = tuple[Sequence, int]  # a sequence and the number of tokens that it computes


@dataclass
class Scheduler:
    """Owns the waiting queue and the running batch. Used by the thread that steps the engine."""

    pool: CachePool
    max_batch: int  # maximum number of running sequences
    step_tokens: int  # maximum number of tokens per step
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)  # oldest first
    isolated: list[Sequence] = field(default_factory=list)  # run one at a time until these end
    reuse: PrefixCache | None = None  # None: every sequence computes all its tokens

    def __post_init__(self) -> None:
        self._prefix = self.reuse or PrefixCache(self.pool)

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to the waiting queue."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Remove an ended sequence; `poisoned` if its KV slot may hold NaN."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._prefix.end(sequence, usable=not poisoned)
        self._release(sequence, poisoned=poisoned)

    def schedule(self) -> list[Scheduled]:
        """Returns the next step. Fails sequences that exceed the KV cache limit on their own."""
        self.isolated = [sequence for sequence in self.isolated if not sequence.ended]
        scheduled: list[Scheduled] = []
        budget = self.step_tokens
        for sequence in list(self.running):
            count = self._prefix.count(sequence, budget)
            if sequence not in self.running or count == 0:
                continue  # preempted for an older sequence, or the budget is spent
            if self._reserve(sequence, count):
                scheduled.append((sequence, count))
                budget -= count
        limit = 1 if self.isolated else self.max_batch
        held = 0  # sequences that wait for a prefix; each has a place in the batch
        while held < len(self.waiting) and budget and len(self.running) + held < limit:
            sequence = self.waiting[held]
            if self._prefix.waits(sequence, self.running):
                held += 1
                continue
            if not self._admit(sequence, budget, scheduled):
                break
            budget -= 0 if sequence.ended else scheduled[-1][1]
        return [(sequence, count) for sequence, count in scheduled if sequence in self.running]

    def isolate_all(self) -> None:
        """After a failed step: preempt every running sequence, then run them one at a time."""
        self.isolated = list(self.running)
        for sequence in reversed(self.isolated):
            self._preempt(sequence)

    def remove_cancelled(self) -> None:
        """Fail and remove the sequences whose cancellation was requested."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.cancelled:
                self._fail(sequence, JobError("cancelled", "the request was cancelled"))

    def fail_all(self, error: JobError) -> None:
        """Fail and remove every sequence."""
        for sequence in [*self.running, *self.waiting]:
            self._fail(sequence, error)

    def _admit(self, sequence: Sequence, budget: int, scheduled: list[Scheduled]) -> bool:
        """Move a waiting sequence into the batch, or fail it if it can never fit. Returns False if
        it has to wait."""
        slot = self.pool.acquire()
        if slot is None:
            return False
        count = self._prefix.begin(sequence, slot, budget, self.waiting)
        if not count:
            self.pool.release(slot)
            if self.running:
                return False
            self._fail(sequence, self._too_large(sequence))
            return True
        sequence.slot = slot
        sequence.started_at = sequence.started_at or time.time()
        self.waiting.remove(sequence)
        self.running.append(sequence)
        scheduled.append((sequence, count))
        return True

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Reserve KV cache for `count` more tokens, preempting newer sequences if necessary.
        Returns False if the sequence itself was preempted or failed."""
        assert sequence.slot is not None
        while not self.pool.reserve(sequence.slot, sequence.computed + count):
            newest = self.running[-1]
            if newest is not sequence:
                self._preempt(newest)
            elif len(self.running) > 1 or self.pool.fits_alone(sequence.computed + count):
                self._preempt(sequence)  # fits once older sequences have ended
                return False
            else:
                self._fail(sequence, self._too_large(sequence))
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _fail(self, sequence: Sequence, error: JobError) -> None:
        sequence.fail(error)
        self.remove(sequence)

    def _release(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        sequence.computed = 0
        if sequence.slot is not None:
            self.pool.release(sequence.slot, poisoned=poisoned)
            sequence.slot = None

    def _too_large(self, sequence: Sequence) -> JobError:
        need = self.pool.bytes_for_one(sequence.length + 1)
        return JobError(
            "out_of_memory",
            f"a sequence of {sequence.length} tokens needs {need / 2**20:.0f} MiB of KV cache, the "
            f"limit is {self.pool.limit_bytes / 2**20:.0f} MiB: shorten the prompt or max_tokens",
        )

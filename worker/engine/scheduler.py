"""Plans steps: the sequences of the next one, and the number of tokens that each one computes.

Prefill and decode are not distinguished: a sequence has pending tokens that are not in the KV cache
yet (the whole prompt, or the one token sampled last), and each step spends a token budget on them,
interactive sequences before bulk ones, oldest first. Interactive ones without a slot pause bulk
ones. When the KV cache is full, the newest sequences are preempted and recomputed later. A sequence
waits while an older one computes their common prefix. Later sequences may be admitted before it,
but not into its reserved slot.

A sequence whose state is saved for a file runs alone, so that its bits do not depend on others: in
every second step, if there are others. While there is no room for it, no others are admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from jobs import clock
from jobs.errors import JobError
from worker.cache.book import CacheBook
from worker.cache.prefix_cache import PrefixCache
from worker.engine.plan import StepPlan
from worker.engine.recovery import fail_unsure
from worker.engine.scheduled import (
    ScheduledSequence,
    Selected,
    Verified,
    sampling_batch,
    verify,
)
from worker.engine.sequence import Sequence
from worker.engine.slots import FinishRate, Slots
from worker.engine.speculation import Speculation
from worker.engine.wait_queue import WaitQueue
from worker.layers.batch import Following, row_order
from worker.sampling.inputs import SamplingBatch
from worker.sampling.prompt_logits import STEP_TOKENS
from worker.sampling.sampler import StepResult

BULK_TOKENS = 8  # one of this many tokens of a step is kept for bulk sequences that run


def _not_finite(tokens: int) -> JobError:
    """The error of a sequence of so many tokens."""
    return JobError("internal", f"the logits are not finite after {tokens} tokens")


@dataclass
class Scheduler:
    """Owns the wait queue and the running batch. Used by the thread that steps the engine.

    It knows numbers only. `schedule` returns what the device has to do, `commit` takes what came of
    it. `follow` returns what it has to do after a step that is not committed yet. A step that fails
    is not committed, and `isolate` follows. `not_finite(tokens)`: the error of a sequence whose
    logits are not finite.
    """

    book: CacheBook
    slots: Slots
    step_tokens: int  # maximum number of tokens per step
    waiting: WaitQueue = field(default_factory=WaitQueue)
    running: list[Sequence] = field(default_factory=list)  # bulk ones are last; else oldest first
    isolated: list[Sequence] = field(default_factory=list)  # run one at a time until these end
    saving: deque[Sequence] = field(default_factory=deque)  # run alone, one after another
    live: dict[Sequence, None] = field(default_factory=dict)  # all, in their order of arrival
    admitting: Sequence | None = None  # while `schedule` runs
    prefix_cache: PrefixCache | None = None  # None: every sequence computes all its tokens
    speculation: Speculation | None = None  # None: no sequence has a draft
    not_finite: Callable[[int], JobError] = _not_finite
    scheduled: SequenceOf[ScheduledSequence] = ()  # of the last plan, in the order of its spans
    tokens_generated: int = 0
    _promoted: Sequence | None = None  # a bulk one that has waited long; not preemptible
    _alone: Sequence | None = None  # one of `saving`, in the step that is not committed yet
    _others: bool = False  # the last step was one of `saving`, and the next one is not
    _held_up: bool = False  # one of `saving` waits for memory, before all others
    _left: bool = False  # a sequence has left `running` since the selection began
    _moved: bool = False  # since then one was added or removed, so that others may be admitted
    _read: int = 0  # rows of logits that are read of the prompts of the step that is selected

    def __post_init__(self) -> None:
        self._prefix = self.prefix_cache or PrefixCache(self.book)
        self._speculation = self.speculation or Speculation(None, self.book)
        self.finish_rate = FinishRate(self.slots.batch)

    @property
    def bulk_running(self) -> int:
        return sum(sequence.bulk for sequence in self.running)

    @property
    def bulk(self) -> int:
        """Number of bulk sequences, running and waiting. May be read by any thread."""
        return self.bulk_running + len(self.waiting.bulk)

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to those that wait, unless it is there."""
        if sequence not in self.live:
            self.live[sequence], self._moved = None, True
            (self.waiting if sequence.saver is None else self.saving).append(sequence)

    def remove(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Remove an ended sequence; `poisoned` if its KV slot may hold NaN."""
        self._moved = True
        if sequence in self.running:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.saving:
            self.saving.remove(sequence)
        self._prefix.end(sequence, usable=not poisoned)
        self._release(sequence)
        self.live.pop(sequence, None)
        if not self.live:
            self.book.forget_failure()

    def schedule(self) -> StepPlan:
        """Returns the next step, without spans if there is nothing to run. Fails sequences that
        exceed the KV cache limit on their own."""
        self.book.begin_plan()
        selected = self._select_alone() or self._select() or self._select_alone()
        scheduled = self._speculation.extend(selected) if selected else []
        spans = row_order([one.span() for one in scheduled])
        by_slot = {one.sequence.slot: one for one in scheduled}
        self.scheduled = [by_slot[span.slot] for span in spans]
        return StepPlan(self.book.take_changes(), tuple(spans))

    def follow(self, scheduled: SequenceOf[ScheduledSequence]) -> Following | None:
        """Returns the step after that of `scheduled`, whatever tokens it draws, in which sequences
        that go on decode. None if there is none, or if it depends on the result."""
        if self.isolated or self.saving or self._speculation.drafts:
            return None
        if self.waiting and self._moved:
            return None  # perhaps one can be admitted
        rows, needed, decoding = [], [], 0
        for row, one in enumerate(scheduled):
            sequence = one.sequence
            if sequence.ended:
                continue
            if not one.decodes:
                return None
            decoding += 1
            assert sequence.sampling is not None
            if len(sequence.output_ids) + 1 < sequence.sampling.params.max_tokens:
                rows.append(row)
                # The token that is computed now, and the next one.
                needed.append((one.slot, sequence.computed + 2))
            elif self.waiting:
                return None  # it leaves its place to another one
        if not rows or decoding < len(self.running):
            return None
        if self._speculation.forces([scheduled[row].sequence for row in rows]):
            return None  # the next step computes more than one token of some
        if not self.book.extend(needed):
            return None
        self.scheduled = [scheduled[row] for row in rows]
        low, high = self.scheduled[0].slot, self.scheduled[-1].slot + 1
        longest = max(columns for _, columns in needed)
        return Following(tuple(rows), low, high, longest)

    def sampling(self, *, ahead: int = 0) -> SamplingBatch:
        """The sampling inputs of the last plan. `ahead`: tokens of each sequence that are drawn,
        and not committed yet."""
        return sampling_batch(self.scheduled, ahead)

    def saw_memory(self, scheduled: SequenceOf[ScheduledSequence], nbytes: int) -> None:
        """Note how much memory the step of these sequences had in use."""
        for one in scheduled:
            if one.sequence.peak_bytes < nbytes:
                one.sequence.peak_bytes = nbytes

    def commit(self, scheduled: SequenceOf[ScheduledSequence], result: StepResult) -> None:
        """Append the tokens that the step of these sequences has drawn, count those that it has
        computed, and remove the sequences that ended. The tokens of those that had ended before
        are void."""
        if self.scheduled is scheduled:
            self.scheduled = ()
        verified = verify(scheduled, result)
        self._speculation.count(scheduled, verified)
        for one, drawn in zip(scheduled, verified, strict=True):
            if not one.sequence.ended:
                self._commit(one, drawn)
        self._speculation.end()
        self._others, self._alone = self._alone is not None, None

    def _commit(self, one: ScheduledSequence, drawn: Verified) -> None:
        sequence, taken, finite = one.sequence, 0, True
        for token in drawn.tokens:
            if not token.finite:
                finite = False
            elif not sequence.ended:
                sequence.accept(token)
                taken += 1
        self.tokens_generated += taken
        if one.draft.token_ids:
            self._speculation.settle(one, drawn, taken)
        else:
            sequence.computed += one.tokens
        if sequence.computed <= len(sequence.prompt_ids) and finite:
            if sequence.saver is None:
                self._prefix.keep(sequence)
            else:
                assert sequence.slot is not None
                sequence.saver.keep(sequence.slot, sequence.computed)
            if sequence.sampling is None and sequence.pending == 0:
                sequence.complete()
        if not finite and not sequence.ended:
            sequence.fail(sequence.no_token_left or self.not_finite(sequence.length))
            self.remove(sequence, poisoned=True)
        elif sequence.ended:
            self.finish_rate.count()
            self.remove(sequence)

    def _select_alone(self) -> list[Selected]:
        """The sequence whose state is saved, if the last step was not its own."""
        self._held_up = False
        if self._others or not self.saving:
            self._others = False
            return []
        sequence = self.saving[0]
        assert sequence.saver is not None
        if sequence.slot is None and not self._begin_alone(sequence):
            return []
        self._alone, stride = sequence, sequence.saver.stride
        return [(sequence, min(sequence.pending, stride - sequence.computed % stride))]

    def _begin_alone(self, sequence: Sequence) -> bool:
        """Reserve a slot for a sequence whose state is saved, or fail it if it can never fit.
        Returns False if it has failed, or has to wait: then no further ones are admitted."""
        if not self.book.fits_alone(sequence.length):
            self._fail(sequence, self.book.too_large(sequence.length))
            return False
        while True:
            sequence.slot = self.book.acquire()
            assert sequence.slot is not None  # there is one more than running and paused ones have
            if self._yields(sequence):
                self._held_up = True
                return False
            if self.book.reserve(sequence.slot, sequence.length):
                break
            alone = not self.running
            waits = self.book.wait_for_others(sequence.length, sequence.arrived_at, blocked=alone)
            self._release(sequence)
            if (paused := self.waiting.newest_paused(sequence)) is not None:
                self._release(paused)
            elif waits or not alone:
                self._held_up = True
                return False
            else:
                self._fail(sequence, self.book.too_large(sequence.length))
                return False
        self.book.begin(sequence.slot)
        sequence.started_at = sequence.started_at or clock.now()
        return True

    def _select(self) -> list[Selected]:
        """The sequences of the next step, of those that run together."""
        self.isolated = [sequence for sequence in self.isolated if not sequence.ended]
        scheduled: list[Selected] = []
        self._read, self._left, self._moved = 0, False, False
        bulk = [sequence for sequence in self.running if self._preemptible(sequence)]
        kept = min(sum(one.pending for one in bulk), -(-self.step_tokens // BULK_TOKENS))
        others = [sequence for sequence in self.running if not self._preemptible(sequence)]
        budget, held = self._advance(others, self.step_tokens - kept, scheduled), 0
        if not self._held_up:
            budget, held = self._admit_first(budget, scheduled)
        budget = self._advance(bulk, budget + kept, scheduled)
        if not self._held_up:
            self._admit_bulk(budget, held, scheduled)
        self.admitting = None
        if not self._left:
            return scheduled
        return [(sequence, count) for sequence, count in scheduled if sequence in self.running]

    @property
    def concerned(self) -> list[Sequence]:
        """The sequences that a failed step ran, or was about to run."""
        if self._alone is not None:
            return [self._alone]
        return [one for one in dict.fromkeys((*self.running, self.admitting)) if one is not None]

    def isolate(self, sequences: SequenceOf[Sequence], failure: JobError) -> None:
        """Compute all sequences anew after a failed step, and these one at a time."""
        self.reset(failure)
        self.isolated = [*sequences]

    def reset(self, failure: JobError | None = None) -> None:
        """Begin anew, after a step that ended anywhere: all wait, and only pinned state is kept."""
        fail_unsure(self.live, failure)
        order = dict.fromkeys([*self.running, *self.waiting, *self.live])
        self.live = {sequence: None for sequence in self.live if not sequence.ended}
        self.running, self.isolated, self.scheduled = [], [], ()
        self.admitting = self._promoted = None
        for sequence in order:
            sequence.restart()
        left = [sequence for sequence in order if sequence in self.live]
        self.waiting.refill(sequence for sequence in left if sequence.saver is None)
        self.saving = deque(sequence for sequence in left if sequence.saver is not None)
        self._alone, self._others = None, False
        self.book.free_all()
        self._prefix.reset()

    def remove_cancelled(self) -> None:
        """Fail and remove the sequences whose cancellation was requested."""
        for sequence in [*self.live]:
            if sequence.cancelled:
                self._fail(sequence, JobError("cancelled", "the request was cancelled"))

    def fail_all(self, error: JobError) -> None:
        """Fail and remove every sequence."""
        for sequence in [*self.live]:
            self._fail(sequence, error)

    def _preemptible(self, sequence: Sequence) -> bool:
        """True if a sequence may be paused or preempted for an interactive one."""
        return sequence.bulk and sequence is not self._promoted

    def _advance(
        self, sequences: SequenceOf[Sequence], budget: int, scheduled: list[Selected]
    ) -> int:
        """Schedule running sequences; returns the rest of the budget."""
        for sequence in sequences:
            count = self._prefix.count(sequence, budget)
            if count == 0 or (self._left and sequence not in self.running):
                continue  # the budget is spent, or it was paused or preempted for another one
            if sequence.reader is not None and self._reads_later(sequence):
                continue
            if self._reserve(sequence, count):
                scheduled.append((sequence, count))
                budget -= count
                if sequence.reader is not None:
                    self._read += sequence.reads(count)
        return budget

    def _admit_first(self, budget: int, scheduled: list[Selected]) -> tuple[int, int]:
        """Admit interactive sequences and the bulk sequence that has waited long. Returns the rest
        of the budget, and how many sequences wait for a prefix; each has a place in the batch."""
        held = 0
        while budget:
            if self._promote_bulk():
                held = 0  # it is the first in the queue now
            if held == len(self.waiting.first):
                break
            sequence = self.waiting.first[held]
            if self._waits(sequence):
                held += 1
                continue
            if self._reads_later(sequence):
                break
            if not self._find_slot(sequence, held) or not self._admit(sequence, budget, scheduled):
                break
            budget -= 0 if sequence.ended else scheduled[-1][1]
        return budget, held

    def _admit_bulk(self, budget: int, held: int, scheduled: list[Selected]) -> None:
        """Admit bulk sequences to the slots that are neither reserved nor `held` by others."""
        own = 0  # bulk sequences that wait for a prefix
        while (
            budget
            and own < len(self.waiting.bulk)
            and len(self.running) + held + own < self._limit
            and self.bulk_running + own < max(1, self._limit - self.slots.reserved)
        ):
            sequence = self.waiting.bulk[own]
            if self._waits(sequence):
                own += 1
                continue
            if self._reads_later(sequence):
                break
            if not self._admit(sequence, budget, scheduled):
                break
            budget -= 0 if sequence.ended else scheduled[-1][1]

    def _waits(self, sequence: Sequence) -> bool:
        """True if a sequence waits for a prefix that an earlier one computes."""
        if sequence.slot is not None:
            return False  # it was paused and has its state
        last = self._preemptible(sequence)
        before = [one for one in self.running if last or not self._preemptible(one)]
        return self._prefix.waits(sequence, before)

    @property
    def _limit(self) -> int:
        return 1 if self.isolated else self.slots.batch

    def _promote_bulk(self) -> bool:
        """Let the first bulk sequence be next if it has waited long."""
        promoted = self.waiting.promote_bulk()
        if promoted is not None:
            self._promoted = promoted
        return promoted is not None

    def _find_slot(self, sequence: Sequence, held: int) -> bool:
        """True if there is a slot for the next sequence, perhaps by pausing the newest bulk one."""
        if len(self.running) + held < self._limit:
            return True
        if held:
            return False
        newest = self.running[-1]
        if (
            not self.slots.preempt
            or self.isolated
            or sequence.bulk
            or not self._preemptible(newest)
        ):
            return False
        self._leave(newest)
        if sum(one.slot is not None for one in self.waiting) >= self.slots.paused:
            self._release(newest)  # it is computed again
        self.waiting.put_back(newest, first=False)
        return True

    def _admit(self, sequence: Sequence, budget: int, scheduled: list[Selected]) -> bool:
        """Move a waiting sequence into the batch, or fail it if it can never fit. Returns False if
        it has to wait."""
        self.admitting = sequence
        if not self.book.fits_alone(sequence.length):
            self._fail(sequence, self.book.too_large(sequence.length))
            return True
        while True:
            if sequence.slot is None:
                sequence.slot = self.book.acquire()
            if sequence.slot is None:
                return False
            resumed = sequence.computed > 0
            if not resumed and self._yields(sequence):
                return False
            if resumed:
                count = self._prefix.count(sequence, budget)
                if self.book.reserve(sequence.slot, sequence.computed + count):
                    break
            elif count := self._prefix.begin(sequence, sequence.slot, budget, self.waiting):
                break
            # The cache is full. A slot with a lower number may need less.
            alone = not self.running and all(one.slot is None for one in self.saving)
            waits = self.book.wait_for_others(
                sequence.length + 1, sequence.arrived_at, blocked=alone
            )
            self._release(sequence)
            if not self._make_room(sequence) and not resumed:
                if waits or not alone:
                    return False
                self._fail(sequence, self.book.too_large(sequence.length))
                return True
        sequence.started_at = sequence.started_at or clock.now()
        end = len(self.running)
        if not self._preemptible(sequence):
            end -= sum(map(self._preemptible, self.running))
        self.running.insert(end, sequence)
        self.waiting.taken(sequence, bulk_runs=self.bulk_running > 0)
        scheduled.append((sequence, count))
        self._read += sequence.reads(count)
        return True

    def _reads_later(self, sequence: Sequence) -> bool:
        """True if logits of a sequence are to be read, and the step reads enough of others."""
        return self._read >= STEP_TOKENS and sequence.reads(sequence.pending) > 0

    def _make_room(self, sequence: Sequence) -> bool:
        """Free the cache of a paused sequence, or of a bulk one that runs if `sequence` goes before
        it. Returns False if there is none."""
        paused = self.waiting.newest_paused(sequence)
        if paused is not None:
            self._release(paused)
        elif (
            self.slots.preempt
            and not self._preemptible(sequence)
            and self.running
            and self._preemptible(self.running[-1])
        ):
            self._preempt(self.running[-1])
        else:
            return False
        return True

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Reserve KV cache for `count` more tokens, preempting newer sequences if necessary.
        Returns False if the sequence itself was preempted or failed."""
        assert sequence.slot is not None
        columns = sequence.computed + count
        while not self.book.reserve(sequence.slot, columns):
            newest = self.running[-1]
            paused = self.waiting.newest_paused(sequence)
            if not self.book.fits_alone(columns):
                self._fail(sequence, self.book.too_large(sequence.length))
                return False
            if paused is not None:
                self._release(paused)
            elif newest is not sequence:
                self._preempt(newest)
            elif len(self.running) == 1 and self._keeps_its_place(sequence, columns):
                return False
            else:  # it fits in the lowest slot once older sequences have ended
                self._preempt(sequence)
                return False
        return True

    def _yields(self, sequence: Sequence) -> bool:
        """True if a sequence leaves the memory to an older one of another model. So do those that
        are paused, which keep theirs otherwise."""
        if not self.book.yields(sequence.length + 1, sequence.arrived_at):
            return False
        self._release(sequence)
        for one in self.waiting:
            self._release(one)
        return True

    def _keeps_its_place(self, sequence: Sequence, columns: int) -> bool:
        """True if the only sequence that runs waits for memory of other models in its slot. A
        younger one gives its memory up, so that they never wait for each other."""
        since = sequence.arrived_at
        waits = self.book.wait_for_others(columns, since, blocked=True)
        return waits and self.book.is_oldest(since)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._release(sequence)
        self.waiting.put_back(sequence, first=not self._preemptible(sequence))

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._left = True

    def _fail(self, sequence: Sequence, error: JobError) -> None:
        sequence.fail(error)
        self.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        sequence.computed = sequence.draft_computed = 0
        if sequence.slot is not None:
            self.book.release(sequence.slot)
            sequence.slot = None

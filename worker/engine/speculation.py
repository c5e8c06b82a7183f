"""Adds drafts to the sequences of a step, and takes back the tokens of drafts that are wrong.

The model computes the tokens of a draft like known ones and draws what follows each of them. One is
accepted if it is the token that was drawn before it, with the same random number as without a
draft: so the tokens are the same, and only their number per step differs. `worker.speculative`
makes the drafts and measures whether they are worth it; it knows no step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from worker.cache.book import CacheBook
from worker.cache.changes import Protect, Rewind
from worker.engine.scheduled import ScheduledSequence, Selected, Verified
from worker.engine.sequence import Sequence
from worker.speculative.acceptance import WORTH, updated
from worker.speculative.draft_costs import DraftCosts
from worker.speculative.drafting import Drafting
from worker.speculative.model_proposer import Run
from worker.speculative.proposer import NO_DRAFT, Draft, Proposer

START_WEIGHT = 0.01  # of one token in the rate that new sequences begin with
LEAST_START = WORTH + 0.1  # each sequence tries


class Speculation:
    """Adds drafts to steps and counts how many of their tokens were right. `most`: tokens of a
    draft. `step_tokens`: tokens of a step.

    `costs`: tells when drafts cost more time than they save; None: what is drafted for a sequence
    depends neither on time nor on other sequences.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        book: CacheBook,
        *,
        most: int = 0,
        step_tokens: int = 0,
        costs: DraftCosts | None = None,
    ) -> None:
        self.steps = 0  # in which sequences had drafts, counted for each sequence
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.drafts = proposer is not None
        self._proposer, self._book, self._costs = proposer, book, costs
        self._most, self._step_tokens = most, step_tokens
        self._window = book.sizes.smallest_window or 2 * most + 1
        self._start = proposer.start if proposer is not None else 0.0  # rate of new sequences
        self._drafted, self._accepted = 0, 0  # tokens of this step

    def extend(self, selected: SequenceOf[Selected]) -> list[ScheduledSequence]:
        """The sequences of a step, with drafts where they are worth it and there is room."""
        self._drafted = self._accepted = 0
        if self._proposer is None or self._pauses(selected):
            return [ScheduledSequence.of(sequence, count) for sequence, count in selected]
        left = self._step_tokens - sum(count for _, count in selected)
        wanted = []
        for sequence, count in selected:
            number = min(self._number(sequence, count), left)
            if number > 0 and self._fits(sequence, count + number):
                wanted.append((sequence, number))
                left -= number
        proposed = self._proposer.propose(wanted) if wanted else []
        drafts = {one: _legal(one, draft) for (one, _), draft in zip(wanted, proposed, strict=True)}
        scheduled = []
        for sequence, count in selected:
            draft = drafts.get(sequence, NO_DRAFT)
            if draft.token_ids and self._book.sizes.rewinding.protects:
                assert sequence.slot is not None
                end = sequence.computed + count + len(draft.token_ids)
                self._book.emit(Protect(sequence.slot, sequence.computed, end))
            scheduled.append(ScheduledSequence.of(sequence, count, draft))
        if self._costs is not None:
            self._costs.proposed()
        return scheduled

    def count(
        self, scheduled: SequenceOf[ScheduledSequence], verified: SequenceOf[Verified]
    ) -> None:
        """Count the drafts of a step, before its tokens end sequences that report the figures."""
        if self._proposer is None:
            return
        for one, drawn in zip(scheduled, verified, strict=True):
            drafted, accepted = len(one.draft.token_ids), drawn.accepted
            if not drafted:
                continue
            self.steps += 1
            self.drafted_tokens += drafted
            self.accepted_tokens += accepted
            self._drafted += drafted
            self._accepted += accepted
            one.sequence.acceptance.add(drafted, accepted)
            if self._costs is not None:
                rate = updated(self._start, drafted, accepted, START_WEIGHT)
                self._start = max(rate, LEAST_START)

    def settle(self, one: ScheduledSequence, drawn: Verified, taken: int) -> None:
        """Bring the caches to a sequence that had a draft and got `taken` of the drawn tokens."""
        sequence, draft, slot = one.sequence, one.draft, one.slot
        end = sequence.computed + one.tokens
        sizes, number = self._book.sizes, len(draft.token_ids)
        start, wanted = sequence.computed, end + max(0, taken - 1)
        sequence.computed = sizes.rewinding.kept(start, wanted, end + number)
        if sizes.rewinding.protects:
            self._book.emit(Rewind(slot, sequence.computed))
        if draft.known is not None:  # the draft model has caches
            wanted = draft.known + min(drawn.accepted, number - 1)
            kept = sizes.draft_rewinding.kept(draft.known, wanted, draft.end)
            sequence.draft_computed = kept
            if sizes.draft_rewinding.protects:
                self._book.emit(Rewind(slot, kept, draft=True))

    def end(self) -> None:
        """Note what a step cost."""
        if self._costs is not None:
            self._costs.end(self._drafted, self._accepted)

    def close(self) -> None:
        """Free the proposer."""
        self._proposer = None

    def _pauses(self, selected: SequenceOf[Selected]) -> bool:
        """True if a step has no drafts because they would make it slower."""
        if self._costs is None:
            return False
        if self._costs.pauses(len(selected)):
            return True
        drawing = sum(bool(one.output_ids) and count == one.pending for one, count in selected)
        return not self._costs.begin(drawing, whole=drawing == len(selected))

    def _number(self, sequence: Sequence, count: int) -> int:
        """Number of tokens to draft after `count` pending ones."""
        if not sequence.output_ids or count != sequence.pending or count > self._most + 1:
            return 0  # it computes its prompt, perhaps again
        assert sequence.sampling is not None  # it has drawn tokens
        last = sequence.sampling.params.max_tokens - len(sequence.output_ids) - 1
        room = sequence.sampling.room  # a forced token is none of a draft
        last = last if room is None else min(last, room)
        last = min(last, self._window - count)  # a window can take back as many as it has columns
        number = sequence.acceptance.length(self._most, self._start)
        if number and self._costs is not None and self._costs.probes:
            number = self._most  # what short drafts cost tells little about long ones
        return min(number, last)

    def _fits(self, sequence: Sequence, count: int) -> bool:
        assert sequence.slot is not None
        return self._book.reserve(sequence.slot, sequence.computed + count)


def _legal(sequence: Sequence, draft: Draft) -> Draft:
    """A draft up to the first token that the sequence's grammar refuses. One of a draft model,
    which draws by the grammar itself, has no such token."""
    matcher = sequence.sampling.matcher if sequence.sampling is not None else None
    if matcher is None or not draft.token_ids:
        return draft
    return replace(draft, token_ids=draft.token_ids[: matcher.legal(draft.token_ids)])


def make_speculation(
    drafting: Drafting | None, book: CacheBook, run: Run, step_tokens: int, max_batch: int
) -> Speculation:
    """Of an engine that drafts, or that does not; `run` executes the plans of a draft model. With a
    batch of one, the length of a draft does not depend on time: the same request takes the same
    steps."""
    if drafting is None:
        return Speculation(None, book)
    proposer = drafting.make_proposer(book, run, step_tokens)
    costs = DraftCosts() if max_batch > 1 else None
    return Speculation(proposer, book, most=drafting.tokens, step_tokens=step_tokens, costs=costs)

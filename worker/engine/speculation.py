"""Adds drafts to the sequences of a step, and takes back the tokens of drafts that are wrong.

The model computes the tokens of a draft like known ones and draws what follows each of them. One is
accepted if it is the token that was drawn before it, with the same random number as without a
draft: so the tokens are the same, and only their number per step differs. The tokens of a draft are
those that the grammar of an answer forces, else those of a proposer. `worker.speculative` proposes
and measures whether that is worth it; it knows no step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from worker.cache.book import CacheBook
from worker.cache.changes import Protect, Rewind
from worker.engine.scheduled import ScheduledSequence, Selected, Verified
from worker.engine.sequence import Sequence
from worker.layers.batch import SHORT
from worker.speculative.acceptance import WORTH, updated
from worker.speculative.draft_costs import DraftCosts
from worker.speculative.drafting import DRAFT_TOKENS, Drafting
from worker.speculative.model_proposer import Run
from worker.speculative.proposer import NO_DRAFT, Draft, Proposer

START_WEIGHT = 0.01  # of one token in the rate that new sequences begin with
LEAST_START = WORTH + 0.1  # each sequence tries
# Forced tokens of a step, for each sequence that the batch has room for. With a batch of one, more
# rows might be added up in another order.
FORCED_TOKENS = DRAFT_TOKENS
# That a decode step must save for each of its sequences. With drafts it is rarely a recorded one on
# CPUs. On accelerators its kernels are started one by one, and not early: as long as five others.
GAIN, OVERLAPPED_GAIN = 0.5, 4.0


class Speculation:
    """Adds drafts to steps and counts how many of the proposed tokens were right. `most`: tokens of
    a proposed draft. `step_tokens`: tokens of a step.

    `costs`: tells when drafts cost more time than they save; None: what is drafted for a sequence
    depends neither on time nor on other sequences.

    `forced`: forced tokens of a step, at most. `gain`: a decode step has some only if they save so
    many tokens for each of its sequences.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        book: CacheBook,
        *,
        most: int = 0,
        step_tokens: int = 0,
        costs: DraftCosts | None = None,
        forced: int = 0,
        gain: float = 0.0,
    ) -> None:
        self.steps = 0  # in which sequences had proposals, counted for each sequence
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.drafts = proposer is not None
        self._proposer, self._book, self._costs = proposer, book, costs
        self._most, self._step_tokens = most, step_tokens
        self._forced, self._gain = forced, gain
        self._window = book.sizes.smallest_window
        self._start = proposer.start if proposer is not None else 0.0  # rate of new sequences
        self._drafted, self._accepted = 0, 0  # tokens of this step

    def extend(self, selected: SequenceOf[Selected]) -> list[ScheduledSequence]:
        """The sequences of a step, with drafts where there is room: of forced tokens, else of
        proposals where they are worth it. What proposals gain beside forced tokens could not be
        measured, so a step has one kind."""
        self._drafted = self._accepted = 0
        left = self._step_tokens - sum(count for _, count in selected)
        drafts = self._force(selected, left)
        if self._proposer is not None and not self._pauses(selected, forced=bool(drafts)):
            drafts = self._propose(selected, left, self._proposer)
        scheduled = []
        for sequence, count in selected:
            draft = drafts.get(sequence, NO_DRAFT)
            if draft.token_ids and self._book.sizes.rewinding.protects:
                assert sequence.slot is not None
                end = sequence.computed + count + len(draft.token_ids)
                self._book.emit(Protect(sequence.slot, sequence.computed, end))
            scheduled.append(ScheduledSequence.of(sequence, count, draft))
        return scheduled

    def forces(self, sequences: SequenceOf[Sequence]) -> bool:
        """True if the step after the next tokens of these sequences, which decode, is worth its
        forced tokens."""
        after = [len(self._forced_after(sequence, 1)) - 1 for sequence in sequences]
        return self._saves(sum(number for number in after if number > 0), len(sequences))

    def count(
        self, scheduled: SequenceOf[ScheduledSequence], verified: SequenceOf[Verified]
    ) -> None:
        """Count the proposals of a step, before its tokens end sequences that report the
        figures."""
        if self._proposer is None:
            return
        for one, drawn in zip(scheduled, verified, strict=True):
            drafted, accepted = len(one.draft.token_ids), drawn.accepted
            if not drafted or one.draft.forced:
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

    def _force(self, selected: SequenceOf[Selected], left: int) -> dict[Sequence, Draft]:
        """Drafts of the tokens that grammars force, with at most `left` tokens."""
        left = min(left, self._forced)
        if left <= 0:
            return {}
        found: list[tuple[Sequence, int, SequenceOf[int]]] = []
        for sequence, count in selected:
            token_ids = self._forced_after(sequence, count)[:left]
            if token_ids:
                found.append((sequence, count, token_ids))
                left -= len(token_ids)
        saved = sum(len(token_ids) for *_, token_ids in found)
        decodes = all([count == 1 for _, count in selected])
        if decodes and not self._saves(saved, len(selected)):
            return {}
        return {
            sequence: Draft(token_ids, forced=True)
            for sequence, count, token_ids in found
            if self._fits(sequence, count + len(token_ids))
        }

    def _forced_after(self, sequence: Sequence, count: int) -> SequenceOf[int]:
        """The forced tokens after `count` pending ones that one step may compute."""
        matcher = None if sequence.sampling is None else sequence.sampling.matcher
        if matcher is None:
            return ()
        rows = min(SHORT, 1 + self._forced)
        return matcher.forced_tokens(min(rows - count, self._room(sequence, count)))

    def _saves(self, tokens: int, sequences: int) -> bool:
        """True if so many forced tokens are worth a step of so many sequences."""
        return tokens > 0 and tokens >= self._gain * sequences

    def _propose(
        self, selected: SequenceOf[Selected], left: int, proposer: Proposer
    ) -> dict[Sequence, Draft]:
        """Drafts of a proposer, with at most `left` tokens."""
        wanted = []
        for sequence, count in selected:
            number = min(self._number(sequence, count), left)
            if number > 0 and self._fits(sequence, count + number):
                wanted.append((sequence, number))
                left -= number
        proposed = proposer.propose(wanted) if wanted else []
        if self._costs is not None:
            self._costs.proposed()
        return {one: _legal(one, draft) for (one, _), draft in zip(wanted, proposed, strict=True)}

    def _pauses(self, selected: SequenceOf[Selected], *, forced: bool) -> bool:
        """True if a step has no proposals: because they would make it slower, or because it has
        forced tokens."""
        if self._costs is None:
            return forced
        if self._costs.pauses(len(selected)):
            return True
        drawing = sum(bool(one.output_ids) and count == one.pending for one, count in selected)
        return not self._costs.begin(drawing, whole=drawing == len(selected) and not forced)

    def _number(self, sequence: Sequence, count: int) -> int:
        """Number of tokens to propose after `count` pending ones."""
        room = self._room(sequence, count)
        if room <= 0 or count > self._most + 1:
            return 0
        number = sequence.acceptance.length(self._most, self._start)
        if number and self._costs is not None and self._costs.probes:
            number = self._most  # what short drafts cost tells little about long ones
        return min(number, room)

    def _room(self, sequence: Sequence, count: int) -> int:
        """Most tokens of a draft after `count` pending tokens."""
        if not sequence.output_ids or count != sequence.pending:
            return 0  # it computes its prompt, perhaps again
        assert sequence.sampling is not None  # it has drawn tokens
        last = sequence.sampling.params.max_tokens - len(sequence.output_ids) - 1
        room = sequence.sampling.room  # the mark that ends reasoning is none of a draft
        last = last if room is None else min(last, room)
        if self._window is None:
            return last
        return min(last, self._window - count)  # it can take back as many as it has columns

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
    drafting: Drafting | None,
    book: CacheBook,
    run: Run,
    step_tokens: int,
    max_batch: int,
    *,
    overlaps: bool = False,
) -> Speculation:
    """Of an engine with a proposer, or without; `run` executes the plans of a draft model.
    `overlaps`: decode steps without drafts are launched early. With a batch of one, the length of a
    draft does not depend on time: the same request takes the same steps."""
    forced, gain = FORCED_TOKENS * max_batch, OVERLAPPED_GAIN if overlaps else GAIN
    if drafting is None:
        return Speculation(None, book, step_tokens=step_tokens, forced=forced, gain=gain)
    return Speculation(
        drafting.make_proposer(book, run, step_tokens),
        book,
        most=drafting.tokens,
        step_tokens=step_tokens,
        costs=DraftCosts() if max_batch > 1 else None,
        forced=forced,
        gain=gain,
    )

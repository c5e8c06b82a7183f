"""The sequences of a planned step, and the rows of logits that each has in it.

`ScheduledSequence.span` says how many rows it has, `sampling_batch` and `verify` read the rows in
the same order.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from worker.engine.sequence import Sequence
from worker.layers.batch import Span
from worker.sampling.inputs import SamplingBatch
from worker.sampling.sampler import Sampled, StepResult
from worker.speculative.proposer import NO_DRAFT, Draft

Selected = tuple[Sequence, int]  # a sequence and the number of tokens that it computes


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`count` pending tokens of one sequence, and the draft after them."""

    sequence: Sequence
    count: int
    draft: Draft = NO_DRAFT

    @property
    def ready(self) -> bool:
        """True if the next token is drawn after it."""
        return self.sequence.sampling is not None and self.count == self.sequence.pending

    @property
    def checked(self) -> bool:
        """True if it ends after it, and its last logits are only checked to be finite."""
        return self.sequence.sampling is None and self.count == self.sequence.pending

    def span(self) -> Span:
        sequence, start, draft = self.sequence, self.sequence.computed, self.draft.token_ids
        assert sequence.slot is not None
        ids = sequence.tokens(start, start + self.count)
        if draft:
            ids += draft
        logits = 1 + len(draft)
        if sequence.reader is not None:
            logits = sequence.reads(self.count) or logits
        return Span(sequence.slot, start, ids, len(sequence.prompt_ids), logits)

    def verified(self, sampled: SequenceOf[Sampled]) -> Verified:
        """The tokens to append, of those that were drawn: one after each token of the draft that is
        right. Those after a wrong token are void."""
        number = 1
        for proposed, token in zip(self.draft.token_ids, sampled, strict=False):
            if not token.finite or token.token_id != proposed:
                break
            number += 1
        return Verified(
            sampled[:number],
            spoiled=not all([one.finite for one in sampled[number:]]),
        )


@dataclass(frozen=True, slots=True)
class Verified:
    """The tokens that a step drew for one sequence: none, or the right tokens of its draft and one
    more. `spoiled`: the slot may hold NaN after them."""

    tokens: SequenceOf[Sampled] = ()
    spoiled: bool = False

    @property
    def accepted(self) -> int:
        """Number of tokens of the draft that are right."""
        return max(0, len(self.tokens) - 1)


NOTHING = Verified()
NOT_FINITE = Verified((Sampled(0, False),))


def sampling_batch(scheduled: SequenceOf[ScheduledSequence]) -> SamplingBatch:
    """The sampling inputs of the sequences of a plan, which are in the order of its spans."""
    batch, row = SamplingBatch(), 0
    for one in scheduled:
        sequence, draft = one.sequence, one.draft.token_ids
        if sequence.reader is not None and (rows := sequence.reads(one.count)):
            wanted = sequence.reader.wanted(sequence.computed + one.count)
            batch.prompts.append((row, wanted))
            row += rows - 1
        if sequence.sampling is None:
            if one.checked:
                batch.checked.append(row)
        elif one.ready:
            batch.add(sequence.sampling, draft, at=row)
        row += 1 + len(draft)
    return batch


def verify(scheduled: SequenceOf[ScheduledSequence], result: StepResult) -> list[Verified]:
    """The tokens to append to each sequence of a plan. Gives readers of prompts what was read."""
    verified, row, prompts, checks = [], 0, iter(result.prompts), iter(result.checks)
    for one in scheduled:
        finite = True
        if one.sequence.reader is not None and one.sequence.reads(one.count):
            found = next(prompts)
            if found is None:
                finite = False
            else:
                one.sequence.reader.add(found)
        if one.checked:
            finite = next(checks) and finite
        drawn = NOTHING
        if one.ready:
            rows = 1 + len(one.draft.token_ids)
            drawn = one.verified(result.tokens[row : row + rows])
            row += rows
        verified.append(drawn if finite else NOT_FINITE)
    return verified

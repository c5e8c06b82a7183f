"""The sequences of a planned step, and the rows of logits that each has in it.

`ScheduledSequence.span` says how many rows it has, `sampling_batch` and `verify` read the rows in
the same order. A sequence may have ended when its step is verified.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from worker.engine.sequence import Sequence
from worker.layers.batch import Span
from worker.sampling.inputs import SamplingBatch
from worker.sampling.sampler import Sampled, StepResult
from worker.speculative.proposer import NO_DRAFT, Draft

Selected = tuple[Sequence, int]  # a sequence and the number of tokens that it computes


class ScheduledSequence(NamedTuple):
    """Some pending tokens of one sequence in a slot, and the draft after them. `ready`: the next
    token is drawn after it. `decodes`: it can go on from that token before the host knows it."""

    sequence: Sequence
    tokens: int  # their number
    draft: Draft
    slot: int
    ready: bool
    decodes: bool

    @classmethod
    def of(cls, sequence: Sequence, count: int, draft: Draft = NO_DRAFT) -> ScheduledSequence:
        sampling, slot = sequence.sampling, sequence.slot
        assert slot is not None
        ready = sampling is not None and count == sequence.pending
        decodes = (
            sampling is not None
            and ready
            and count == 1
            and not draft.token_ids
            and sequence.computed >= len(sequence.prompt_ids)
            and not sequence.reads(1)
        )
        return cls(sequence, count, draft, slot, ready, decodes)

    @property
    def foreseeable(self) -> bool:
        """True if the draw does not depend on which tokens were drawn before."""
        return self.sequence.sampling is None or self.sequence.sampling.foreseeable

    @property
    def checked(self) -> bool:
        """True if it ends after it, and its last logits are only checked to be finite."""
        return self.sequence.sampling is None and self.tokens == self.sequence.pending

    def span(self) -> Span:
        sequence, start, draft = self.sequence, self.sequence.computed, self.draft.token_ids
        ids = sequence.tokens(start, start + self.tokens)
        if draft:
            ids += draft
        logits = 1 + len(draft)
        if sequence.reader is not None:
            logits = sequence.reads(self.tokens) or logits
        return Span(self.slot, start, ids, len(sequence.prompt_ids), logits)

    def verified(self, sampled: SequenceOf[Sampled]) -> Verified:
        """The tokens to append, of those that were drawn: one after each token of the draft that is
        right. Those after a wrong token are void."""
        number = 1
        for proposed, token in zip(self.draft.token_ids, sampled, strict=False):
            if not token.finite or token.token_id != proposed:
                break
            number += 1
        return Verified(sampled[:number])


class Verified(NamedTuple):
    """The tokens that a step drew for one sequence: none, or the right tokens of its draft and one
    more."""

    tokens: SequenceOf[Sampled] = ()

    @property
    def accepted(self) -> int:
        """Number of tokens of the draft that are right."""
        return max(0, len(self.tokens) - 1)


NOTHING = Verified()
NOT_FINITE = Verified((Sampled(0, False),))


def sampling_batch(scheduled: SequenceOf[ScheduledSequence], ahead: int = 0) -> SamplingBatch:
    """The sampling inputs of the sequences of a plan, which are in the order of its spans. `ahead`:
    tokens that were drawn of each, and that it does not have yet."""
    batch, row = SamplingBatch(), 0
    for one in scheduled:
        sequence, draft = one.sequence, one.draft.token_ids
        if sequence.reader is not None and (rows := sequence.reads(one.tokens)):
            wanted = sequence.reader.wanted(sequence.computed + one.tokens)
            batch.prompts.append((row, wanted))
            row += rows - 1
        if sequence.sampling is None:
            if one.checked:
                batch.checked.append(row)
        elif one.ready:
            if sequence.ended:  # in the step before this one
                batch.add_void(sequence.sampling, at=row)
            else:
                batch.add(sequence.sampling, draft, at=row, ahead=ahead)
        row += 1 + len(draft)
    return batch


def verify(scheduled: SequenceOf[ScheduledSequence], result: StepResult) -> list[Verified]:
    """The tokens to append to each sequence of a plan. Gives readers of prompts what was read."""
    verified, row, prompts, checks = [], 0, iter(result.prompts), iter(result.checks)
    for one in scheduled:
        finite = True
        if one.sequence.reader is not None and one.sequence.reads(one.tokens):
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
            sampled = result.tokens[row : row + rows]
            drawn = Verified(sampled) if rows == 1 else one.verified(sampled)
            row += rows
        verified.append(drawn if finite else NOT_FINITE)
    return verified

"""Proposes the tokens of a draft model: plans what it computes, and keeps what it has computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from worker.cache.book import CacheBook
from worker.layers.batch import Span
from worker.sampling.inputs import SamplingInput
from worker.speculative.draft_plan import DraftPlan, Proposed
from worker.speculative.proposer import NO_DRAFT, Draft, DraftedSequence

Run = Callable[[DraftPlan, Sequence[SamplingInput]], list[Proposed]]


class ModelProposer:
    """Plans what a draft model computes; `run` has a device do it. None of its drafts goes beyond
    its context, or follows a token that it does not have.

    `step_tokens`: so many tokens that are new to it are computed in one step; longer prompts take
    several.
    """

    start = 0.8

    def __init__(
        self, run: Run, book: CacheBook, *, context: int, vocab_size: int, step_tokens: int
    ) -> None:
        self._run, self._book = run, book
        self._context, self._vocab_size, self._step_tokens = context, vocab_size, step_tokens

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """Implements `Proposer`."""
        drafts = [NO_DRAFT] * len(wanted)
        asked: list[int] = []  # which of them
        spans: list[Span] = []
        lengths: list[int] = []
        sampling: list[SamplingInput] = []
        left = self._step_tokens
        for index, (sequence, most) in enumerate(wanted):
            known, length, slot = sequence.draft_computed, sequence.length, sequence.slot
            number, count = min(most, self._context - length), min(length - known, left)
            if number <= 0 or not count:
                continue
            assert slot is not None and sequence.sampling is not None  # it has drawn tokens
            ids = sequence.tokens(known, known + count)
            if max(ids) >= self._vocab_size:
                sequence.acceptance.off = True
                continue
            asked.append(index)
            sampling.append(sequence.sampling)
            spans.append(Span(slot, known, ids, len(sequence.prompt_ids)))
            lengths.append(number if known + count == length else 0)
            left -= count
        if not asked:
            return drafts
        plan = DraftPlan(self._book.take_changes(), tuple(spans), tuple(lengths))
        proposed = self._run(plan, sampling)
        for index, span, number, found in zip(asked, spans, lengths, proposed, strict=True):
            sequence = wanted[index][0]
            if not found.finite:  # nothing is drafted for it any more
                sequence.draft_computed, sequence.acceptance.off = 0, True
                continue
            sequence.draft_computed = span.end
            if number:
                drafts[index] = Draft(found.token_ids, span.end, span.end + number - 1)
        return drafts

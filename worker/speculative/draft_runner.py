"""Proposes tokens with a draft model, whose caches are in the slots of the same sequences."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch.nn import functional as F

from worker.cache.changes import Protect
from worker.cache.pool import CachePool
from worker.layers.batch import Batch, Span
from worker.layers.cache import by_slot
from worker.layers.transfer import read_together, take
from worker.models.model import Model
from worker.sampling.inputs import SamplingBatch, SamplingInput
from worker.sampling.sampler import Sampled, sample
from worker.speculative.draft_plan import DraftPlan, Proposed


class Proposing:
    """One sequence while tokens are proposed for it; `number`: how many."""

    def __init__(self, span: Span, number: int, sampling: SamplingInput) -> None:
        self.span, self.number, self.sampling = span, number, sampling
        self.found: list[int] = []
        self.finite = True

    @property
    def left(self) -> int:
        return self.number - len(self.found)

    def next_span(self) -> Span:
        """The last token that was found."""
        at = self.span.end + len(self.found) - 1
        return Span(self.span.slot, at, self.found[-1:], self.span.prompt_length)


class DraftRunner:
    """Computes the tokens of a sequence that the draft has not seen, then proposes the next ones,
    each drawn with the random number of the token that it predicts. `vocab_size`: ids of the model
    that is drafted for."""

    def __init__(
        self, model: Model, pool: CachePool, device: torch.device, vocab_size: int
    ) -> None:
        self.model, self._pool, self._device = model, pool, device
        self._vocab_size = vocab_size
        self._paged = not by_slot(pool.draft_layers)

    def propose(self, plan: DraftPlan, sampling: Sequence[SamplingInput]) -> list[Proposed]:
        """The drafts after the spans of a plan."""
        drafting = [Proposing(*one) for one in zip(plan.spans, plan.lengths, sampling, strict=True)]
        for one in drafting:
            if not one.span.start:
                self._pool.begin_draft(one.span.slot)
        try:
            self._propose(drafting)
        finally:
            for one in drafting:
                one.sampling.rollback(len(one.found))
        return [Proposed(one.found if one.finite else [], one.finite) for one in drafting]

    def _propose(self, drafting: list[Proposing]) -> None:
        by_slot = {one.span.slot: one for one in drafting}
        spans = [one.span for one in drafting]
        while spans:
            following = []
            for one, tokens in self._advance(spans, by_slot):
                if not all(token.finite for token in tokens):
                    self._give_up(one)
                    continue
                if not one.found and not self._paged:
                    slot, start, end = one.span.slot, one.span.end, one.span.end + one.number - 1
                    self._pool.execute(Protect(slot, start, end, draft=True))
                token_ids = [token.token_id for token in tokens]
                one.found += token_ids
                one.sampling.advance(token_ids)
                if one.left:
                    following.append(one.next_span())
            spans = following

    def _advance(
        self, spans: list[Span], by_slot: dict[int, Proposing]
    ) -> list[tuple[Proposing, list[Sampled]]]:
        """Compute the spans. Returns the next tokens of the sequences that want some: one each, or
        more if the most likely ones are wanted."""
        batch, ordered = Batch.prepare(spans, self._device)
        drafting = [by_slot[span.slot] for span in ordered]
        rows = [row for row, one in enumerate(drafting) if one.left]
        if batch.small and all(one.sampling.greedy for one in drafting):
            count = max(1, min(one.left for one in drafting))
            if not self._paged and not all(one.found for one in drafting):
                count = 1  # what the draft overwrites is not saved yet
            found = self.model.draft_tokens(batch, self._pool.draft_layers, count, self._vocab_size)
            best, ids = read_together(
                torch.stack([values for values, _ in found]),
                torch.stack([tokens for _, tokens in found]),
            )
            return [
                (
                    drafting[row],
                    [Sampled(i[row], isfinite(b[row])) for b, i in zip(best, ids, strict=True)],
                )
                for row in rows
            ]
        logits = self.model(batch, self._pool.draft_layers)
        if not rows:
            return []
        if len(rows) < len(drafting):
            logits = take(logits, rows)
        missing = self._vocab_size - logits.shape[1]  # vocabularies may be padded differently
        if missing:
            logits = F.pad(logits, (0, missing), value=float("-inf"))
        drawn = SamplingBatch()
        for number, row in enumerate(rows):
            drawn.add(drafting[row].sampling, at=number, logprobs=False)
        sampled = sample(logits, drawn)
        return [(drafting[row], [token]) for row, token in zip(rows, sampled, strict=True)]

    def _give_up(self, one: Proposing) -> None:
        one.finite = False
        self._pool.forget_draft(one.span.slot)

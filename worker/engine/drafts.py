"""Drafts by a smaller model. Its caches are in the pool of the model that it drafts for, in the
slots of the same sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch.nn import functional as F

from worker.engine.cache_pool import CachePool
from worker.engine.guess import Guess
from worker.engine.rollback import Undo
from worker.engine.sampler import Sampled, sample
from worker.engine.sampling_batch import SamplingBatch
from worker.engine.sequence import Sequence
from worker.layers.batch import Batch, Span
from worker.layers.transfer import read_back
from worker.models.model import Model


@dataclass(eq=False, slots=True)
class Drafting:
    """One sequence while tokens are drafted for it; `number`: how many at most."""

    sequence: Sequence
    number: int
    found: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.number - len(self.found)


class ModelDraft:
    """Computes the tokens of a sequence that it has not seen, then guesses the next ones, each
    drawn with the random number of the token that it predicts.

    `vocab_size`: ids of the model that is drafted for. `step_tokens`: so many tokens that are new
    to the draft are computed in one step; longer prompts take several.
    """

    start = 0.8

    def __init__(
        self,
        model: Model,
        pool: CachePool,
        device: torch.device,
        vocab_size: int,
        step_tokens: int,
    ) -> None:
        self._model, self._pool, self._device = model, pool, device
        self._vocab_size, self._step_tokens = vocab_size, step_tokens
        self._by_position = all(layer.by_position for layer in pool.draft_layers)

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> dict[Sequence, Guess]:
        """Guesses for the sequences, up to a number of tokens each. None goes beyond the draft's
        context, or follows a token that the draft does not have."""
        by_slot: dict[int, Drafting] = {}
        spans, left = [], self._step_tokens
        for sequence, most in wanted:
            known, length, slot = sequence.draft_computed, sequence.length, sequence.slot
            number = min(most, self._model.context_length - length)
            count = min(length - known, left)
            if number <= 0 or not count:
                continue
            assert slot is not None
            ids = sequence.tokens(known, known + count)
            if max(ids) >= self._model.vocab_size:
                sequence.acceptance.off = True
                continue
            if not known:
                self._pool.begin_draft(slot)
            spans.append(Span(slot, known, ids, len(sequence.prompt_ids)))
            by_slot[slot] = Drafting(sequence, number if known + count == length else 0)
            sequence.draft_computed += count
            left -= count
        try:
            return self._guess(spans, by_slot) if spans else {}
        finally:
            for one in by_slot.values():
                one.sequence.sampling.rollback(len(one.found))

    def _guess(self, spans: list[Span], by_slot: dict[int, Drafting]) -> dict[Sequence, Guess]:
        guesses: dict[Sequence, Guess] = {}
        while spans:
            following = []
            for one, tokens in self._advance(spans, by_slot):
                sequence = one.sequence
                if not all(token.finite for token in tokens):
                    guesses.pop(sequence, None)
                    self._give_up(sequence)
                    continue
                if not one.found:
                    guesses[sequence] = self._begin(one)
                token_ids = [token.token_id for token in tokens]
                one.found += token_ids
                sequence.sampling.advance(token_ids)
                if one.left:
                    assert sequence.slot is not None
                    at, prompt = sequence.length + len(one.found) - 1, len(sequence.prompt_ids)
                    following.append(Span(sequence.slot, at, one.found[-1:], prompt))
            spans = following
        return guesses

    def _advance(
        self, spans: list[Span], by_slot: dict[int, Drafting]
    ) -> list[tuple[Drafting, list[Sampled]]]:
        """Compute the spans. Returns the next tokens of the sequences that want some: one each, or
        more if the most likely ones are wanted."""
        batch, ordered = Batch.prepare(spans, self._device)
        drafting = [by_slot[span.slot] for span in ordered]
        rows = [row for row, one in enumerate(drafting) if one.left]
        if batch.small and all(one.sequence.sampling.greedy for one in drafting):
            count = max(1, min(one.left for one in drafting))
            if not self._by_position and not all(one.found for one in drafting):
                count = 1  # what guesses overwrite is not saved yet
            found = self._model.guess(batch, self._pool.draft_layers, count, self._vocab_size)
            best = read_back(torch.stack([values for values, _ in found]))
            ids = read_back(torch.stack([tokens for _, tokens in found]))
            return [
                (
                    drafting[row],
                    [Sampled(i[row], isfinite(b[row])) for b, i in zip(best, ids, strict=True)],
                )
                for row in rows
            ]
        logits = self._model(batch, self._pool.draft_layers)
        if not rows:
            return []
        if len(rows) < len(drafting):
            logits = logits[rows]
        missing = self._vocab_size - logits.shape[1]  # vocabularies may be padded differently
        if missing:
            logits = F.pad(logits, (0, missing), value=float("-inf"))
        drawn = SamplingBatch()
        for row in rows:
            drawn.add(drafting[row].sequence.sampling, logprobs=False)
        sampled = sample(logits, drawn)
        return [(drafting[row], [token]) for row, token in zip(rows, sampled, strict=True)]

    def _begin(self, one: Drafting) -> Guess:
        """A guess that `one.found` will fill; its first token is known, and not computed yet."""
        slot, start = one.sequence.slot, one.sequence.length
        assert slot is not None
        undo = Undo(self._pool.draft_layers, slot, start, start + one.number - 1)
        return Guess(one.found, start, undo)

    def _give_up(self, sequence: Sequence) -> None:
        """Draft no more for a sequence after logits that are not finite."""
        assert sequence.slot is not None
        for layer in self._pool.draft_layers:
            layer.clear(sequence.slot)
        sequence.draft_computed = 0
        sequence.acceptance.off = True

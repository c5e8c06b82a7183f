"""Drafts by a smaller model. Its caches are in the pool of the model that it drafts for, in the
slots of the same sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.engine.guess import Guess
from worker.engine.kv_pool import CachePool
from worker.engine.rollback import Undo
from worker.engine.sampler import Draw, sample
from worker.engine.sequence import Sequence
from worker.layers.batch import Batch, Span
from worker.models.model import Model

# New tokens of a sequence, after a guess that was right to its end. Their step is one that can be
# replayed if the logits of both are computed.
AFTER_GUESS = 2


@dataclass(eq=False, slots=True)
class Drafting:
    """One sequence while tokens are drafted for it; `number`: how many at most."""

    sequence: Sequence
    number: int
    found: list[int] = field(default_factory=list)

    def draw(self) -> Draw:
        draw = self.sequence.draw
        plan = replace(draw.plan, logprobs=False) if draw.plan.logprobs else draw.plan
        return Draw(plan, draw.choice, draw.prompt_ids, [*draw.output_ids, *self.found])


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
                self._pool.reset_draft(slot)
            logits = count if count <= AFTER_GUESS else 1
            spans.append(Span(slot, known, ids, len(sequence.prompt_ids), logits))
            by_slot[slot] = Drafting(sequence, number if known + count == length else 0)
            sequence.draft_computed += count
            left -= count
        return self._guess(spans, by_slot) if spans else {}

    def _guess(self, spans: list[Span], by_slot: dict[int, Drafting]) -> dict[Sequence, Guess]:
        guesses: dict[Sequence, Guess] = {}
        while spans:
            logits, slots = self._forward(spans)
            rows = [row for row, slot in enumerate(slots) if by_slot[slot].number]
            if not rows:
                break
            drafting = [by_slot[slots[row]] for row in rows]
            if len(rows) < len(slots):
                logits = logits[rows]
            spans = []
            sampled = sample(logits, [one.draw() for one in drafting])
            for one, token in zip(drafting, sampled, strict=True):
                sequence = one.sequence
                if not token.finite:
                    guesses.pop(sequence, None)
                    self._give_up(sequence)
                    continue
                if not one.found:
                    guesses[sequence] = self._begin(one)
                one.found.append(token.token_id)
                if len(one.found) < one.number:
                    assert sequence.slot is not None
                    at, prompt = sequence.length + len(one.found) - 1, len(sequence.prompt_ids)
                    spans.append(Span(sequence.slot, at, one.found[-1:], prompt))
        return guesses

    def _begin(self, one: Drafting) -> Guess:
        """A guess that `one.found` will fill; its first token is known, and not computed yet."""
        slot, start = one.sequence.slot, one.sequence.length
        assert slot is not None
        undo = Undo(self._pool.draft_layers, slot, start, start + one.number - 1)
        return Guess(one.found, start, undo)

    def _forward(self, spans: list[Span]) -> tuple[Tensor, list[int]]:
        """float32 logits [spans, vocab_size] after each span, and the slots of these rows."""
        batch, ordered = Batch.prepare(spans, self._device)
        logits = self._model(batch, self._pool.draft_layers)
        if len(logits) > len(ordered):
            last = accumulate(span.logits for span in ordered)
            logits = logits[[end - 1 for end in last]]
        missing = self._vocab_size - logits.shape[1]  # vocabularies may be padded differently
        if missing:
            logits = F.pad(logits, (0, missing), value=float("-inf"))
        return logits, [span.slot for span in ordered]

    def _give_up(self, sequence: Sequence) -> None:
        """Draft no more for a sequence after logits that are not finite."""
        assert sequence.slot is not None
        for layer in self._pool.draft_layers:
            layer.clear(sequence.slot)
        sequence.draft_computed = 0
        sequence.acceptance.off = True

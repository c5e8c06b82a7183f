"""One forward pass: the tokens that each sequence computes in it, and the tokens that follow."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.guess import Guess
from worker.engine.rollback import Undo
from worker.engine.sampler import Sampled, sample
from worker.engine.sampling_batch import SamplingBatch
from worker.engine.sequence import Sequence
from worker.layers.batch import Batch, Span


@dataclass(frozen=True, slots=True)
class Part:
    """`count` pending tokens of one sequence, and guessed ones after them. `undo`: takes the
    guessed ones back from the slot."""

    sequence: Sequence
    count: int
    guess: Guess | None = None
    undo: Undo | None = None

    @property
    def guessed(self) -> list[int]:
        return self.guess.token_ids if self.guess is not None else []

    @property
    def ready(self) -> bool:
        """True if the next token can be drawn after it."""
        return self.count == self.sequence.pending

    def span(self) -> Span:
        sequence, start = self.sequence, self.sequence.computed
        assert sequence.slot is not None
        ids = sequence.tokens(start, start + self.count) + self.guessed
        scored = sequence.scores_prompt(self.count)
        logits = self.count if scored else 1 + len(self.guessed)
        return Span(sequence.slot, start, ids, len(sequence.prompt_ids), logits)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens that a step drew after one part: none, or the accepted guesses and one more.
    `spoiled`: the slot may hold NaN after them."""

    part: Part
    tokens: SequenceOf[Sampled] = ()
    spoiled: bool = False

    @property
    def accepted(self) -> int:
        """Number of guessed tokens that are right."""
        return max(0, len(self.tokens) - 1)


def prepare(parts: SequenceOf[Part], device: torch.device) -> tuple[Batch, list[Part]]:
    """Returns the batch, and the parts in the order of its logits rows."""
    spans = [part.span() for part in parts]
    by_slot = {span.slot: part for span, part in zip(spans, parts, strict=True)}
    batch, ordered = Batch.prepare(spans, device)
    return batch, [by_slot[span.slot] for span in ordered]


def draw(logits: Tensor, parts: SequenceOf[Part]) -> list[Drawn]:
    """Draw what follows each part, whose logits `prepare` asked for, and score prompts."""
    rows: list[int] = []
    batch = SamplingBatch()
    end = 0
    for part in parts:
        sequence, scores = part.sequence, part.sequence.prompt_logprobs
        if scores is not None and sequence.scores_prompt(part.count):
            scores.add(sequence.computed, logits[end : end + part.count].float())
            end += part.count
        else:
            end += 1 + len(part.guessed)
        if part.ready:
            rows += range(end - 1 - len(part.guessed), end)
            batch.add(sequence.sampling, part.guessed)
    if len(rows) < len(logits):
        logits = logits[rows]
    sampled = sample(logits, batch) if rows else []
    drawn, at = [], 0
    for part in parts:
        if part.ready:
            number = 1 + len(part.guessed)
            drawn.append(_verify(part, sampled[at : at + number]))
            at += number
        else:
            drawn.append(Drawn(part))
    return drawn


def _verify(part: Part, sampled: list[Sampled]) -> Drawn:
    """Each token was drawn after the guessed ones before it: those that follow a wrong guess are
    void."""
    number = 1
    for guessed, token in zip(part.guessed, sampled, strict=False):
        if not token.finite or token.token_id != guessed:
            break
        number += 1
    return Drawn(part, sampled[:number], spoiled=not all(one.finite for one in sampled[number:]))

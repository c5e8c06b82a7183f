"""Logits processors: each changes the logits of one sequence by what it knows of earlier tokens.

Order as in transformers: penalties, bias, then the tokens that must not follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from worker.layers.transfer import to_device
from worker.sampling.params import REPETITION_WINDOW, SamplingParams


class LogitsProcessor(Protocol):
    """One sampling option of one sequence. Its state follows the tokens of the output, also those
    of a draft, which are taken back unless they are accepted."""

    def apply(self, logits: Tensor) -> None:
        """Change the logits [vocab] of the next token, in place."""

    def advance(self, token_id: int) -> None:
        """Add a token to the output."""

    def rollback(self, count: int) -> None:
        """Take the last tokens back."""


class Stateless:
    """A processor that does not depend on the output."""

    def advance(self, token_id: int) -> None:
        """Nothing."""

    def rollback(self, count: int) -> None:
        """Nothing."""


class OutputTokens:
    """A processor that keeps the tokens."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._token_ids = [*token_ids]

    def advance(self, token_id: int) -> None:
        self._token_ids.append(token_id)

    def rollback(self, count: int) -> None:
        del self._token_ids[len(self._token_ids) - count :]


class RepetitionPenalty(OutputTokens):
    """Divides positive logits of the last tokens, prompt included, and multiplies negative ones."""

    def __init__(self, penalty: float, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids[-REPETITION_WINDOW:])
        self._penalty = penalty

    def apply(self, logits: Tensor) -> None:
        window = self._token_ids[-REPETITION_WINDOW:]
        ids = to_device(sorted(set(window)), logits.device)
        seen = logits[ids]
        logits[ids] = (seen / self._penalty).where(seen > 0, seen * self._penalty)


class CountPenalties(OutputTokens):
    """Subtracts from the logits of output tokens: once per token, and for each time it occurs."""

    def __init__(self, presence: float, frequency: float) -> None:
        super().__init__()
        self._presence, self._frequency = presence, frequency
        self._counts: dict[int, int] = {}

    def apply(self, logits: Tensor) -> None:
        if not self._counts:
            return
        ids = to_device([*self._counts], logits.device)
        times = to_device([*self._counts.values()], logits.device, logits.dtype)
        logits[ids] -= self._presence + self._frequency * times

    def advance(self, token_id: int) -> None:
        super().advance(token_id)
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def rollback(self, count: int) -> None:
        for token_id in self._token_ids[len(self._token_ids) - count :]:
            self._counts[token_id] -= 1
            if not self._counts[token_id]:
                del self._counts[token_id]
        super().rollback(count)


class LogitBias(Stateless):
    """Adds a number to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = bias

    def apply(self, logits: Tensor) -> None:
        for token_id, bias in self._bias.items():
            logits[token_id] += bias


class MinTokens:
    """Excludes stop tokens while the output is shorter than `least`."""

    def __init__(self, least: int, stop_ids: frozenset[int]) -> None:
        self._left, self._stop_ids = least, sorted(stop_ids)

    def apply(self, logits: Tensor) -> None:
        if self._left > 0 and self._stop_ids:
            logits[to_device(self._stop_ids, logits.device)] = float("-inf")

    def advance(self, token_id: int) -> None:
        self._left -= 1

    def rollback(self, count: int) -> None:
        self._left += count


class BadWords(OutputTokens):
    """Excludes the last token of a sequence where the output ends with its other tokens."""

    def __init__(self, token_ids: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._words = [([*ids[:-1]], ids[-1]) for ids in token_ids]

    def apply(self, logits: Tensor) -> None:
        excluded = {last for first, last in self._words if self._ends_with(first)}
        if excluded:
            logits[to_device(sorted(excluded), logits.device)] = float("-inf")

    def _ends_with(self, ids: list[int]) -> bool:
        return not ids or self._token_ids[-len(ids) :] == ids


class AllowedTokens(Stateless):
    """Excludes all other tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def apply(self, logits: Tensor) -> None:
        allowed = to_device(self._token_ids, logits.device)
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept


def make_processors(
    params: SamplingParams, prompt_ids: Sequence[int]
) -> tuple[LogitsProcessor, ...]:
    """The processors of a sequence without output, in the order in which they apply."""
    found: list[LogitsProcessor] = []
    if params.repetition_penalty != 1:
        found.append(RepetitionPenalty(params.repetition_penalty, prompt_ids))
    if params.presence_penalty or params.frequency_penalty:
        found.append(CountPenalties(params.presence_penalty, params.frequency_penalty))
    if params.logit_bias:
        found.append(LogitBias(params.logit_bias))
    if params.min_tokens:
        found.append(MinTokens(params.min_tokens, params.stop_ids))
    if params.bad_word_ids:
        found.append(BadWords(params.bad_word_ids))
    if params.allowed_ids is not None:
        found.append(AllowedTokens(params.allowed_ids))
    return tuple(found)

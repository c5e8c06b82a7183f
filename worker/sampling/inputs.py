"""The sampling inputs of one step, made of those of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from worker.constraints.masks import MaskedRow, apply_masks
from worker.sampling.params import SamplingParams
from worker.sampling.processors import Stateless, make_processors
from worker.sampling.prompt_logits import WantedRows


class SamplingInput:
    """The options of one sequence, and the state of its logits processors after its `position`
    output tokens. Belongs to the thread that steps the engine."""

    def __init__(
        self,
        params: SamplingParams,
        choice: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
    ) -> None:
        self.params, self.choice, self.position = params, choice, 0
        self._processors = make_processors(params, prompt_ids)
        constraint = params.constraint
        self.matcher = None if constraint is None else constraint.matcher(params.stop_ids)
        self.changes_logits = bool(self._processors)
        self._stateless = all(isinstance(one, Stateless) for one in self._processors)
        self.advance(output_ids)

    @property
    def foreseeable(self) -> bool:
        """True if the draw of the next two tokens depends on the number of tokens before them, and
        not on which they are."""
        return self._stateless and self.is_free(2)

    @property
    def greedy(self) -> bool:
        """True if the next token is that of the greatest logit."""
        return self.params.greedy and not self.changes_logits and self.is_free(1)

    @property
    def room(self) -> int | None:
        """Least number of tokens that come before one is forced; None if none is forced."""
        return None if self.matcher is None else self.matcher.room

    def is_free(self, count: int) -> bool:
        """True if each of the next `count` tokens may be any."""
        return self.matcher is None or self.matcher.is_free(count)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the output."""
        if self.matcher is not None:
            self.matcher.advance(token_ids)
        self._advance(token_ids)

    def rollback(self, count: int) -> None:
        """Take the last tokens back."""
        if self.matcher is not None:
            self.matcher.rollback(count)
        self._rollback(count)

    def _advance(self, token_ids: Sequence[int]) -> None:
        self.position += len(token_ids)
        for processor in self._processors:
            for token_id in token_ids:
                processor.advance(token_id)

    def _rollback(self, count: int) -> None:
        self.position -= count
        for processor in self._processors:
            processor.rollback(count)

    def process(self, logits: Tensor, first: int, draft: Sequence[int]) -> None:
        """Change the logits [rows, vocab] of the next token, which are at row `first`, and of those
        that follow the draft's, in place."""
        taken = 0
        try:
            for row in range(first, first + 1 + len(draft)):
                if row > first:
                    self._advance(draft[taken : taken + 1])
                    taken += 1
                for processor in self._processors:
                    processor.apply(logits[row])
        finally:
            if taken:
                self._rollback(taken)


class Row(NamedTuple):
    """One row of logits. `position`: number of output tokens before the token that is drawn.
    `logprobs`: its log-probability is wanted."""

    params: SamplingParams
    choice: int
    position: int
    logprobs: bool


class SamplingBatch:
    """The sequences that draw in a step. The rows of each follow those of the one before: one for
    its next token, and one for the token after each token of its draft. `at`: the rows of the
    step's logits that they are. `prompts`: the rows to read of prompts, and where the first one
    is. `checked`: rows that must be finite, of sequences that draw nothing."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.at: list[int] = []
        self.prompts: list[tuple[int, WantedRows]] = []
        self.checked: list[int] = []
        self.greedy = True  # the tokens of the greatest logits are drawn, and nothing else is asked
        self._processed: list[tuple[int, SamplingInput, Sequence[int]]] = []  # from which row on
        self._masked: list[MaskedRow] = []

    def add(
        self,
        sampling: SamplingInput,
        draft: Sequence[int] = (),
        *,
        at: int | None = None,
        ahead: int = 0,
        logprobs: bool = True,
    ) -> None:
        """Add a sequence whose next token comes after row `at`, by default the next one, and after
        `ahead` tokens that it does not have yet. Without `logprobs`, log-probabilities are not
        computed for it."""
        at = len(self.rows) if at is None else at
        params, choice, first = sampling.params, sampling.choice, sampling.position + ahead
        logprobs = params.logprobs and logprobs
        if sampling.changes_logits:
            self._processed.append((len(self.rows), sampling, draft))
        masked = not sampling.is_free(1 + len(draft) + ahead)
        if masked and sampling.matcher is not None:
            self._masked.append(MaskedRow(len(self.rows), sampling.matcher, draft))
        if logprobs or masked or not sampling.greedy:
            self.greedy = False
        self.at.append(at)
        self.rows.append(Row(params, choice, first, logprobs))
        for number in range(1, 1 + len(draft)):
            self.at.append(at + number)
            self.rows.append(Row(params, choice, first + number, logprobs))

    def add_void(self, sampling: SamplingInput, *, at: int) -> None:
        """Add row `at`, of a sequence that has ended: nobody wants the token that is drawn."""
        self.at.append(at)
        self.rows.append(Row(sampling.params, sampling.choice, sampling.position, False))

    @property
    def needs_copy(self) -> bool:
        """True if processors change logits, or they are read in float32."""
        return bool(self._processed) or any([row.logprobs for row in self.rows])

    def process(self, logits: Tensor) -> Tensor:
        """Returns logits [rows, vocab] after the processors, and the masks of grammars. They are
        changed in place, unless log-probabilities are wanted of them."""
        changed = [*[first for first, _, _ in self._processed], *[one.row for one in self._masked]]
        if any(self.rows[row].logprobs for row in changed):
            logits = logits.clone()
        for first, sampling, draft in self._processed:
            sampling.process(logits, first, draft)
        if self._masked:
            apply_masks(logits, self._masked)
        return logits

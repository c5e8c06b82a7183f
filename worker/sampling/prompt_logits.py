"""Reads the logits of a prompt while it is computed: the log-probabilities of its tokens, or the
logits themselves.

A reader belongs to a sequence and knows which rows are still wanted. Each step reads those that it
computes, on the device, and brings back numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from worker.layers.transfer import read_back, read_together, take, to_device

# Bounds of the memory for logits in one step, in rows.
CHUNK_TOKENS = 256  # that are read of one sequence, and that are scored at a time
STEP_TOKENS = 1024  # after so many, no other sequence has logits to read


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token at a position of the prompt. `rank`: 1 for the most probable token."""

    token_id: int
    logprob: float
    rank: int


class WantedRows(NamedTuple):
    """Consecutive rows of logits. `token_ids`: one to score by each row, or several by the only
    row, with the `top` most probable ones; without any, the logits themselves are wanted."""

    rows: int
    token_ids: Sequence[int] = ()
    top: int = 0

    def rows_of_tokens(self, first: int) -> Sequence[int]:
        """The row by which each token is scored. `first`: the first one of these."""
        if self.rows == 1:
            return [first] * len(self.token_ids)
        return range(first, first + self.rows)


Found = list[list[TokenScore]] | Tensor  # scores of each token, or float32 logits [rows, vocab]


class PromptReader:
    """Reads the logits after the tokens [row, end) of a prompt.

    A sequence that was preempted computes its prompt again; rows that were read are skipped.
    """

    def __init__(self, row: int, end: int) -> None:
        self.row, self._end = row, end

    def wants(self, start: int, count: int) -> bool:
        """True if logits of the tokens [start, start + count) are needed."""
        return start + count > self.row < self._end

    def wanted(self, end: int) -> WantedRows:
        """The rows to read in a step that computes the tokens up to `end`: from `row` on."""
        return WantedRows(min(end, self._end) - self.row)

    def add(self, found: Found) -> None:
        """Take what came of the wanted rows."""
        self.row += len(found)


class PromptLogprobs(PromptReader):
    """Log-probabilities of the tokens from position `first` on, and of the `top` most probable
    tokens at each position. The last token need not be computed, so a sequence may lack it."""

    def __init__(self, token_ids: Sequence[int], top: int, first: int = 1) -> None:
        super().__init__(first - 1, len(token_ids) - 1)
        self._ids, self._top = token_ids, top
        self.positions: list[list[TokenScore]] = []  # from `first` on; the token itself is first

    def wanted(self, end: int) -> WantedRows:
        rows, first = super().wanted(end).rows, self.row + 1
        return WantedRows(rows, self._ids[first : first + rows], self._top)

    def add(self, found: Found) -> None:
        super().add(found)
        assert isinstance(found, list)
        self.positions += found


class NextTokenLogprobs(PromptReader):
    """Log-probabilities of some tokens behind a prompt of so many tokens."""

    def __init__(self, tokens: int, token_ids: Sequence[int]) -> None:
        super().__init__(tokens - 1, tokens)
        self._ids = list(token_ids)
        self.positions: list[list[TokenScore]] = []  # of each token, in their order

    def wanted(self, end: int) -> WantedRows:
        return WantedRows(1, self._ids)

    def add(self, found: Found) -> None:
        assert isinstance(found, list)
        self.row += 1
        self.positions += found


class PromptLogits(PromptReader):
    """The logits after each token, in the memory of the host."""

    def __init__(self, tokens: int) -> None:
        super().__init__(0, tokens)
        self.rows: list[Tensor] = []  # float32 [tokens of a step, vocab]

    def add(self, found: Found) -> None:
        super().add(found)
        assert isinstance(found, Tensor)
        self.rows.append(found)


def read_rows(logits: Tensor, wanted: Sequence[tuple[int, WantedRows]]) -> list[Found | None]:
    """Read the logits [rows, vocab] of a step for each entry, from its row on. None for an entry
    whose logits are not finite."""
    scored = [(row, one) for row, one in wanted if one.token_ids]
    scores = iter(score_tokens(logits, scored) if scored else ())
    found: list[Found | None] = []
    for row, one in wanted:
        if one.token_ids:
            found.append(next(scores))
            continue
        rows = logits[row : row + one.rows].to(torch.float32, copy=True)
        found.append(rows.cpu() if read_back(rows.isfinite().all()) else None)
    return found


def score_tokens(
    logits: Tensor, wanted: Sequence[tuple[int, WantedRows]]
) -> list[list[list[TokenScore]] | None]:
    """The scores of the tokens of each entry, whose first one follows a row of the logits [rows,
    vocab]. None for an entry whose logits are not finite."""
    at = [row for first, one in wanted for row in one.rows_of_tokens(first)]
    token_ids = [token_id for _, one in wanted for token_id in one.token_ids]
    scored, top = to_device(token_ids, logits.device), max(one.top for _, one in wanted)
    chunks = [
        _score_chunk(take(logits, at[begin : begin + CHUNK_TOKENS]), ids, top)
        for begin, ids in zip(
            range(0, len(at), CHUNK_TOKENS), scored.split(CHUNK_TOKENS), strict=True
        )
    ]
    finite, logprobs, numbers = read_together(
        *[torch.cat(parts) for parts in zip(*chunks, strict=True)]
    )
    found: list[list[list[TokenScore]] | None] = []
    row = 0
    for _, one in wanted:
        each = range(row, row + len(one.token_ids))
        row += len(one.token_ids)
        found.append(
            [_scores(token_ids[at], logprobs[at], numbers[at], one.top) for at in each]
            if all(finite[at] for at in each)
            else None
        )
    return found


def _score_chunk(logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows of logits [rows, vocab] and a token for each: whether the row is finite [rows], the
    log-probabilities of the token and of the `top` most probable ones [rows, 1 + top], and the
    token's rank and their ids [rows, 1 + top]. In float32, so few rows at a time."""
    rows = logits.float().log_softmax(-1)
    own = rows.gather(1, token_ids[:, None])
    best = rows.topk(min(top, rows.shape[1]), dim=1)
    ranks = (rows > own).sum(1, keepdim=True) + 1
    logprobs, numbers = (
        torch.cat([own, best.values], dim=1),
        torch.cat([ranks, best.indices], dim=1),
    )
    return rows.isfinite().all(1), logprobs, numbers


def _scores(token_id: int, logprobs: list[float], numbers: list[int], top: int) -> list[TokenScore]:
    """The scores at one position. `logprobs`: of the token, then of the most probable ones;
    `numbers`: the rank of the token, then the ids of these."""
    scores = {token_id: TokenScore(token_id, logprobs[0], numbers[0])}
    best = zip(numbers[1 : top + 1], logprobs[1 : top + 1], strict=True)
    for rank, (other, logprob) in enumerate(best, 1):
        scores.setdefault(other, TokenScore(other, logprob, rank))
    return [*scores.values()]

"""Log-probabilities of a prompt's tokens, collected while the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from worker.layers.transfer import read_back, to_device

CHUNK_TOKENS = 256  # tokens per forward pass, which bounds the logits held in memory


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token at a position of the prompt. `rank`: 1 for the most probable token."""

    token_id: int
    logprob: float
    rank: int


class ScoredTokens(NamedTuple):
    """Tokens to score, with the `top` most probable ones. `row`: the first one follows this row of
    the logits of a span."""

    row: int
    token_ids: Sequence[int]
    top: int


class PromptLogprobs:
    """Log-probabilities of each token after the first one, and of the `top` most probable tokens at
    its position.

    A sequence that was preempted computes its prompt again; positions that are here are skipped.
    """

    def __init__(self, prompt_ids: Sequence[int], top: int) -> None:
        self._ids, self._top = list(prompt_ids), top
        self.positions: list[list[TokenScore]] = []  # of tokens 1, 2, …

    def wants(self, start: int, count: int) -> bool:
        """True if logits of the tokens [start, start + count) are needed."""
        return start + count > len(self.positions) < len(self._ids) - 1

    def wanted(self, start: int, count: int) -> ScoredTokens:
        """The tokens to score after a step that computes the tokens [start, start + count)."""
        first, end = len(self.positions), min(start + count, len(self._ids) - 1)
        return ScoredTokens(first - start, self._ids[first + 1 : end + 1], self._top)


def score_tokens(logits: Tensor, token_ids: Sequence[int], top: int) -> list[list[TokenScore]]:
    """The scores of each token by its row of logits [tokens, vocab], and of the `top` most probable
    ones. Raises ValueError if a logit is not finite."""
    rows = logits.float().log_softmax(-1)
    if not read_back(rows.isfinite().all()):
        raise ValueError("the logits of the prompt are not finite")
    chosen = to_device(token_ids, rows.device)[:, None]
    own = rows.gather(1, chosen)
    ranks = (rows > own).sum(1) + 1
    best = rows.topk(min(top, rows.shape[1]), dim=1)
    found = []
    for token_id, value, rank, values, ids in zip(
        token_ids,
        read_back(own[:, 0]),
        read_back(ranks),
        read_back(best.values),
        read_back(best.indices),
        strict=True,
    ):
        scores = {token_id: TokenScore(token_id, value, rank)}
        for place, (other, logprob) in enumerate(zip(ids, values, strict=True), 1):
            scores.setdefault(other, TokenScore(other, logprob, place))
        found.append([*scores.values()])
    return found

"""Log-probabilities of a prompt's tokens, collected while the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from worker.layers.transfer import read_back, to_device

CHUNK_TOKENS = 256  # tokens per forward pass, which bounds the logits held in memory


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token at a position of the prompt. `rank`: 1 for the most probable token."""

    token_id: int
    logprob: float
    rank: int


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

    def add(self, start: int, logits: Tensor) -> None:
        """logits [n, vocab], float32, after the tokens [start, start + n). Raises ValueError if one
        is not finite."""
        first, end = len(self.positions), min(start + len(logits), len(self._ids) - 1)
        if end <= first:
            return
        rows = logits[first - start : end - start].log_softmax(-1)
        if not read_back(rows.isfinite().all()):
            raise ValueError("the logits of the prompt are not finite")
        chosen = to_device(self._ids[first + 1 : end + 1], rows.device)[:, None]
        own = rows.gather(1, chosen)
        ranks = (rows > own).sum(1) + 1
        top = rows.topk(min(self._top, rows.shape[1]), dim=1)
        for token_id, value, rank, values, ids in zip(
            self._ids[first + 1 : end + 1],
            read_back(own[:, 0]),
            read_back(ranks),
            read_back(top.values),
            read_back(top.indices),
            strict=True,
        ):
            scores = {token_id: TokenScore(token_id, value, rank)}
            for place, (other, logprob) in enumerate(zip(ids, values, strict=True), 1):
                scores.setdefault(other, TokenScore(other, logprob, place))
            self.positions.append(list(scores.values()))

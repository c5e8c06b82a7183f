"""Makes the engine answer with given tokens: the sampler's draws are replaced, all else is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from worker.sampling.inputs import Row, SamplingBatch
from worker.sampling.sampler import Sampled


def scripted(answers: Sequence[Sequence[int]]) -> Callable[[Tensor, SamplingBatch], list[Sampled]]:
    """For `draw` of an engine: choice i gets the tokens of answers[i], then the
    end of its turn."""

    def sample(logits: Tensor, batch: SamplingBatch) -> list[Sampled]:
        assert len(logits) == len(batch.rows)
        return [Sampled(_next(answers[row.choice], row), True) for row in batch.rows]

    return sample


def _next(answer: Sequence[int], row: Row) -> int:
    at = row.position
    return answer[at] if at < len(answer) else min(row.params.stop_ids)

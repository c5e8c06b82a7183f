"""Makes the engine answer with given tokens: the sampler's draws are replaced, all else is real."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from worker.engine.sampler import Draw, Sampled


def scripted(answers: Sequence[Sequence[int]]) -> Callable[[Tensor, Sequence[Draw]], list[Sampled]]:
    """In place of `worker.engine.step.sample`: choice i gets the tokens of answers[i], then the
    end of its turn."""

    def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
        assert len(logits) == len(draws)
        return [Sampled(_next(answers[draw.choice], draw), True) for draw in draws]

    return sample


def _next(answer: Sequence[int], draw: Draw) -> int:
    at = len(draw.output_ids)
    return answer[at] if at < len(answer) else min(draw.plan.stop_ids)

"""A model of a worker with a budget, as it is given at the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.model_spec import ModelSpec
from worker.residency.budget import Share
from worker.residency.policy import ResidencyPolicy


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the worker may serve. Its state is that of worker/queue/served.py."""

    name: str
    spec: ModelSpec
    share: Share
    policy: ResidencyPolicy  # at the start

    @property
    def names(self) -> set[str]:
        return {self.name, self.spec.reference, *self.spec.aliases}


def first_models(models: Sequence[Model], budget: int) -> list[Model]:
    """The models that are loaded at the start: the pinned ones, then those with `preload` in their
    order, as long as they fit."""
    chosen = [one for one in models if one.policy.pin]
    for one in models:
        fits = sum(other.share.total for other in (*chosen, one)) <= budget
        if one.policy.preload and one not in chosen and fits:
            chosen.append(one)
    return chosen

"""Room for further jobs at the time of a claim, by model and priority."""

from __future__ import annotations

from collections.abc import Mapping

from jobs import keys
from jobs.store.served_queues import queues_of
from worker.backend import Backend


class Capacity:
    """Shrinks as jobs are started.

    models: the name of the model, by each name that has queues. single: room for one job in all.
    """

    def __init__(self, backend: Backend, models: Mapping[str, str], *, single: bool) -> None:
        self._models, self._single = models, single
        self._left = {
            (model, bulk): backend.room(model, bulk=bulk)
            for model in set(models.values())
            for bulk in (False, True)
        }
        self._first = dict(self._left)

    @property
    def any(self) -> bool:
        return any(left > 0 for left in self._left.values())

    @property
    def everywhere(self) -> bool:
        """True if there is room for each model and priority."""
        return all(left > 0 for left in self._left.values())

    @property
    def wake_keys(self) -> list[str]:
        """The wake lists of the queues for whose jobs there is room."""
        return [
            keys.wake(queue)
            for name in self._models
            for bulk in (False, True)
            if self.of(name, bulk)
            for queue in queues_of(name, bulk=bulk)
        ]

    def of(self, name: str, bulk: bool) -> int:
        """The number of sequences of a model that may be started."""
        left = max(0, self._left[self._models[name], bulk])
        return min(left, 1) if self._single else left

    def use(self, name: str, bulk: bool, sequences: int) -> None:
        """Sequences were started. Interactive ones take the room of bulk ones, unless there was
        room for just one: those must not starve."""
        if self._single:
            self._left = dict.fromkeys(self._left, 0)
            return
        model = self._models[name]
        self._left[model, bulk] -= sequences
        if not bulk and self._first[model, True] > 1:
            self._left[model, True] -= sequences

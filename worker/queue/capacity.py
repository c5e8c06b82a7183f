"""Room for further jobs at the time of a claim, by model and priority."""

from __future__ import annotations

from jobs import keys
from jobs.store.served_queues import queues_of
from worker.backend import Backend
from worker.queue.served import Served

REFUSED_JOBS = 100  # of a model that can't be loaded, that are failed after one claim


class Capacity:
    """Shrinks as jobs are started. There is none for models that are not open.

    single: room for one job in all.
    """

    def __init__(self, backend: Backend, served: Served, *, single: bool) -> None:
        self._single, self._funcs = single, backend.funcs
        refused, self._models = served.refused_names, served.open_names
        self._left = {
            (model, bulk): backend.room(model, bulk=bulk)
            for model in set(self._models.values())
            for bulk in (False, True)
        }
        self._models |= refused
        for model in set(refused.values()):
            self._left |= {(model, False): REFUSED_JOBS, (model, True): REFUSED_JOBS}
        self._first = dict(self._left)

    @property
    def any(self) -> bool:
        return any(left > 0 for left in self._left.values())

    @property
    def everywhere(self) -> bool:
        """True if there is room for each model that is open, and each priority."""
        return all(left > 0 for left in self._left.values())

    @property
    def wake_keys(self) -> list[str]:
        """The wake lists of the queues for whose jobs there is room."""
        return [
            keys.wake(queue)
            for name in self._models
            for bulk in (False, True)
            if self.of(name, bulk)
            for queue in queues_of(name, bulk=bulk, funcs=self._funcs)
        ]

    def of(self, name: str, bulk: bool) -> int:
        """The number of sequences of a model that may be started."""
        if name not in self._models:
            return 0
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

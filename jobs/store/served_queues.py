"""The queues of the models that a worker serves: those that jobs are submitted to, and those to
which other workers have moved jobs of functions that they do not run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import overload

from jobs import keys
from jobs.operations import CHAT, OPERATIONS


def queues_of(
    model: str, *, bulk: bool, funcs: Collection[str] = OPERATIONS.keys()
) -> tuple[str, ...]:
    """The queues of a model's interactive, or bulk, jobs. `funcs`: whose jobs are run."""
    shared = keys.bulk_queue(model) if bulk else keys.chat_queue(model)
    return shared, *(keys.queue_for(func, shared) for func in funcs if func != CHAT.func)


class ServedQueues(Sequence[str]):
    """The names of the queues as they are now: all interactive ones, then all bulk ones. They
    follow `models`, the names that have queues, whose owner may change them. `funcs`: whose jobs
    are run, that of chats among them."""

    def __init__(self, models: Collection[str], funcs: Collection[str]) -> None:
        self._models, self._funcs = models, funcs

    def now(self) -> tuple[str, ...]:
        """The queues, for a caller that needs the same ones twice."""
        names = tuple(self._models)
        return tuple(
            queue
            for bulk in (False, True)
            for kind in zip(*(self._of(name, bulk) for name in names), strict=True)
            for queue in kind
        )

    def _of(self, name: str, bulk: bool) -> tuple[str, ...]:
        return queues_of(name, bulk=bulk, funcs=self._funcs)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self.now()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.now())

    def __len__(self) -> int:
        return 2 * len(self._funcs) * len(self._models)

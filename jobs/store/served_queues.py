"""The queues of the models that a worker serves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import overload

from jobs import keys


class ServedQueues(Sequence[str]):
    """The names of the queues as they are now: all interactive ones, then all bulk ones. They
    follow `models`, the names that have queues, whose owner may change them."""

    def __init__(self, models: Collection[str]) -> None:
        self._models = models

    def now(self) -> tuple[str, ...]:
        """The queues, for a caller that needs the same ones twice."""
        names = tuple(self._models)
        return (*map(keys.chat_queue, names), *map(keys.bulk_queue, names))

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self.now()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.now())

    def __len__(self) -> int:
        return 2 * len(self._models)

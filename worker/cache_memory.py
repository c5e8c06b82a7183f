"""The memory of a device that the caches of its models share.

One owner of the numbers: each model has a share, with bytes that are kept for it (`least`), and
grows into what the others do not hold. The invariant: the weights, the activations and max(least,
held) of all models never exceed the budget. What lies beyond `least` is given back as soon as
another model needs it: kept prefixes, and storage that no sequence uses.

What sequences hold is never taken. A sequence for which the rest is too little waits, the oldest
first: the other models then admit no younger ones beyond their `least`, so their sequences end and
the memory comes free. The oldest sequence of all thus always gets on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jobs.errors import JobError
from jobs.sizes import size_texts


class Holder(Protocol):
    """The cache of a model that is loaded."""

    @property
    def bytes_held(self) -> int:
        """Allocated now, with kept state."""

    @property
    def bytes_needed(self) -> int:
        """Of these, what sequences in slots need, and pinned state."""

    def give_back(self, nbytes: int) -> None:
        """Free about so many bytes, or more, that no sequence needs."""


class Want(NamedTuple):
    """Memory that a sequence lacks, since other models have it."""

    nbytes: int  # that the whole cache would then take
    since: float  # when the sequence has come
    blocked: bool  # no sequence of the model can go on without it


@dataclass(eq=False, slots=True)
class CacheShare:
    """The part of one model, which `CacheMemory` changes. Until a holder is there, the model is
    being loaded."""

    memory: CacheMemory
    name: str
    fixed: int  # bytes of weights and activations, if the budget has them as well
    least: int  # that are kept for its cache
    most: int | None = None  # that its cache may take whatever is free; None: no limit of its own
    part: int | None = None  # of the memory in a fair division; None: as much as every other model
    holder: Holder | None = None

    @property
    def held(self) -> int:
        return 0 if self.holder is None else self.holder.bytes_held

    @property
    def needed(self) -> int:
        return 0 if self.holder is None else self.holder.bytes_needed

    @property
    def taken(self) -> int:
        """Bytes that no other model may have now."""
        return max(self.least, self.held)

    @property
    def spare(self) -> int:
        """Bytes that it can give back."""
        return max(0, self.held - max(self.needed, self.least))

    @property
    def fair(self) -> int:
        """Bytes for more than what is needed now: beyond, others may need the memory soon."""
        members = len(self.memory.shares)
        part = self.memory.total // max(members, 1) if self.part is None else self.part
        return self.ceiling if members < 2 else min(max(part, self.least), self.ceiling)

    @property
    def limit(self) -> int:
        """Bytes that the cache may have now."""
        return self._below(sum(one.taken for one in self._others()))

    @property
    def ceiling(self) -> int:
        """Bytes that it may have if the others give back all that they can."""
        return self._below(sum(one.least for one in self._others()))

    def give_back(self, nbytes: int) -> None:
        """Give back so many bytes, as far as it can."""
        nbytes = min(nbytes, self.spare)
        if nbytes > 0 and self.holder is not None:
            self.holder.give_back(nbytes)

    def take(self, nbytes: int) -> bool:
        """True if the cache may have so many bytes. Others give back for it what they don't need,
        if that is enough."""
        if nbytes <= self.limit:
            return True
        spare = {one: one.held - max(one.needed, one.least) for one in self._others()}
        if nbytes > self.ceiling or nbytes > self.limit + sum(
            max(0, one) for one in spare.values()
        ):
            return False
        for one in sorted(spare, key=lambda one: one.fair - one.held):
            lacking = nbytes - self.limit
            if lacking > 0 and spare[one] > 0 and one.holder is not None:
                one.holder.give_back(min(lacking, spare[one]))
        return nbytes <= self.limit

    def want(self, nbytes: int, since: float, *, blocked: bool) -> bool:
        """Wait for so many bytes; of several sequences the oldest one counts. False if the other
        models don't have them."""
        if not self.limit < nbytes <= self.ceiling:
            return False
        before = self.memory.wants.get(self)
        if before is None or since < before.since:
            self.memory.wants[self] = Want(nbytes, since, blocked)
        return True

    def forget(self) -> None:
        """Wait no more."""
        self.memory.wants.pop(self, None)

    def yields(self, nbytes: int, since: float) -> bool:
        """True if a sequence that came at `since`, with which the cache would need `nbytes`, must
        not be admitted: an older one of another model waits for memory."""
        return nbytes > self.least and any(
            want.since < since
            and (want.blocked or (want.nbytes <= one.fair and self.needed > self.fair))
            for one, want in self._others_wants()
        )

    def oldest(self, since: float) -> bool:
        """True if no older sequence of another model waits for memory."""
        return all(want.since >= since for _, want in self._others_wants())

    def leave(self) -> None:
        """Free everything: the model is unloaded, or was not loaded."""
        self.forget()
        self.memory.shares = tuple(one for one in self.memory.shares if one is not self)

    def _others(self) -> Iterator[CacheShare]:
        return (one for one in self.memory.shares if one is not self)

    def _others_wants(self) -> Iterator[tuple[CacheShare, Want]]:
        return ((one, want) for one, want in self.memory.wants.items() if one is not self)

    def _below(self, others: int) -> int:
        room = max(0, self.memory.total - others)
        return room if self.most is None else min(self.most, room)


class CacheMemory:
    """Owns the shares of the models of a device. Changed by the thread that loads and steps them;
    any thread may read. `budget`: bytes of everything that has a share."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.shares: tuple[CacheShare, ...] = ()  # replaced, never changed
        self.wants: dict[CacheShare, Want] = {}

    @property
    def total(self) -> int:
        """Bytes that all caches may take together."""
        return max(0, self.budget - sum(one.fixed for one in self.shares))

    def enter(self, share: CacheShare, since: float) -> bool:
        """Keep memory for a model that is loaded next. Returns False if sequences of the others
        have it: they admit no further ones until it fits. Raises JobError if it never does."""
        floor = share.fixed + share.least
        room = self.budget - sum(one.fixed for one in self.shares)
        if floor > room - sum(one.least for one in self.shares):
            needed, left = size_texts(floor, room - sum(one.least for one in self.shares))
            raise JobError(
                "out_of_memory",
                f"{share.name} needs {needed} beside the models in memory, which leave {left} of "
                "the budget: unload one of them",
            )
        for one in self.shares:
            one.give_back(floor - (room - sum(other.taken for other in self.shares)))
        if floor > room - sum(one.taken for one in self.shares):
            self.wants[share] = Want(floor, since, blocked=True)
            return False
        share.forget()
        self.shares = (*self.shares, share)
        return True

    def abandon(self, name: str) -> None:
        """Free what is kept for a model that was not loaded after all."""
        for one in (*self.shares, *self.wants):
            if one.holder is None and one.name == name:
                one.leave()


def alone(limit: int) -> CacheShare:
    """The share of a cache that has so many bytes to itself."""
    share = CacheShare(CacheMemory(limit), "", 0, 0)
    share.memory.shares = (share,)
    return share

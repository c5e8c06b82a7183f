"""The byte budget of a device, and the share of each model.

All numbers are known before a weight is read. A model's share holds its weights, the activations of
a step, and a fair part of the memory for caches. The sum of the shares of the models in memory
never exceeds the budget. While models are in memory, `worker.cache_memory` moves what their caches
have beyond their least.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jobs.errors import JobError
from worker.backend import Footprint, Reservation

RESERVE = 1 / 8  # of what the budget has for caches, at least, where models are to fit together


@dataclass(frozen=True, slots=True)
class Share:
    """The bytes of the budget that a model takes while it is in memory."""

    weights: int
    activations: int
    cache: int
    least_cache: int  # of this, what is always kept for the model while it is in memory
    cache_limit: int | None = None  # that was given
    measured: bool = False  # the activations, on this machine

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.cache

    @property
    def reservation(self) -> Reservation:
        return Reservation(
            self.weights + self.activations, self.least_cache, self.cache, self.cache_limit
        )

    def __str__(self) -> str:
        return (
            f"{size(self.total)} (weights {size(self.weights)}, "
            f"{'measured' if self.measured else 'estimated'} activations "
            f"{size(self.activations)}, cache {size(self.cache)})"
        )


def size(nbytes: int) -> str:
    """A number of bytes in binary units, as graphics cards and containers have them."""
    if nbytes >= 2**29:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 10 * 2**20 else f"{nbytes / 2**10:.0f} KiB"


def share_out(
    footprints: Sequence[Footprint],
    budget: int,
    *,
    pinned: Collection[str] = (),
    caches: Mapping[str, int | None] | None = None,
) -> dict[str, Share]:
    """The share of each model, by its name.

    pinned: names of the models that always are in memory. caches: bytes that were given for the
    cache of a model. Every other cache has its least size and an equal part of the rest: of what
    the budget leaves beside the pinned models and as many of the others, the largest first, as fit
    together with RESERVE left. Raises JobError("out_of_memory") if the pinned models don't fit, or
    another one doesn't fit beside them.
    """
    given = {name: nbytes for name, nbytes in (caches or {}).items() if nbytes is not None}
    least = {one.name: _least(one, given.get(one.name)) for one in footprints}
    kept = [one for one in footprints if one.name in pinned]
    others = sorted(
        (one for one in footprints if one.name not in pinned),
        key=lambda one: -least[one.name].total,
    )
    taken = sum(least[one.name].total for one in kept)
    if taken > budget:
        raise _too_many(kept, least, budget)
    for one in others[:1]:  # the largest
        if taken + least[one.name].total > budget:
            raise _too_large(one, kept, least, budget)
    together = 0
    for one in others:
        total = taken + least[one.name].total
        if together and total > budget * (1 - RESERVE):
            break
        taken, together = total, together + 1
    sharing = len(kept) + together
    spare = (budget - taken) // sharing if sharing else 0
    return {
        one.name: least[one.name]
        if one.name in given
        else _grown(least[one.name], min(one.most_cache, least[one.name].cache + spare))
        for one in footprints
    }


def _least(one: Footprint, cache: int | None) -> Share:
    least = one.least_cache if cache is None else cache
    return Share(one.weights, one.activations, least, least, cache, one.activations_measured)


def _grown(share: Share, cache: int) -> Share:
    return replace(share, cache=max(share.cache, cache))


def _too_many(kept: Sequence[Footprint], least: Mapping[str, Share], budget: int) -> JobError:
    lines = [f"  {one.reference}: {least[one.name]}" for one in kept]
    total = sum(least[one.name].total for one in kept)
    return JobError(
        "out_of_memory",
        "\n".join(
            [
                f"the pinned models do not fit into --memory {size(budget)}:",
                *lines,
                f"  together {size(total)}: give more memory, or pin fewer",
            ]
        ),
    )


def _too_large(
    one: Footprint, kept: Sequence[Footprint], least: Mapping[str, Share], budget: int
) -> JobError:
    pinned = sum(least[other.name].total for other in kept)
    beside = f" beside the pinned models, which take {size(pinned)} of it" if kept else ""
    return JobError(
        "out_of_memory",
        f"{one.reference} takes {least[one.name]} and does not fit into --memory {size(budget)}"
        f"{beside}: give more memory, a smaller model or another dtype",
    )

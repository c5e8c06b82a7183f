"""The part of a model that one rank of several computes (Shoeybi et al. 2019, "Megatron-LM").

Linears, embeddings, attention and caches take their part when they are made; families build whole
models. Between the parts are few exchanges: a sum after each row-split linear, and after the
embedding; the logits are gathered for rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Indivisible(Exception):
    """A model that can't be split over the ranks; says why."""


class Exchange(Protocol):
    """What the ranks of a model tell each other. All of them make the same calls in the same order;
    the tensors have the same shape on each."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, with the same bits on each. May overwrite x."""

    def first(self, x: Tensor) -> Tensor:
        """The tensor of rank 0. May overwrite x."""

    def gather(self, x: Tensor) -> Tensor:
        """x [rows, n] → on rank 0 [rows, ranks · n], in the order of the ranks; on others x."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `ranks`. Without an `exchange`, it has the shapes of its part and computes
    nothing."""

    rank: int = 0
    ranks: int = 1
    exchange: Exchange | None = None

    @property
    def whole(self) -> bool:
        return self.ranks == 1

    def part(self, channels: int, units: int, named: str, *, replicate: bool = False) -> slice:
        """This rank's part of `channels` that consist of equal `units`, which stay whole. With
        `replicate`, ranks share a unit where there are fewer of them. Raises Indivisible."""
        if replicate and self.ranks % units == 0:
            first, count = self.rank * units // self.ranks, 1
        elif units % self.ranks == 0:
            count = units // self.ranks
            first = self.rank * count
        else:
            raise Indivisible(f"its {units} {named} can't be divided by {self.ranks} ranks")
        size = channels // units
        return slice(first * size, (first + count) * size)

    def padded_part(self, rows: int) -> slice:
        """This rank's part of rows that need not divide: the last rank may have fewer."""
        count = self.padded_length(rows)
        return slice(self.rank * count, min(rows, (self.rank + 1) * count))

    def padded_length(self, rows: int) -> int:
        """The rows of each rank, with those that the last one lacks."""
        return -(-rows // self.ranks)

    def sum(self, x: Tensor) -> Tensor:
        return x if self.exchange is None else self.exchange.sum(x)

    def first(self, x: Tensor) -> Tensor:
        return x if self.exchange is None else self.exchange.first(x)

    def gather(self, x: Tensor) -> Tensor:
        return x if self.exchange is None else self.exchange.gather(x)


WHOLE = Shard()

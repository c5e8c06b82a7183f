"""Cache of a gated delta net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from worker.layers.cache import Moves, Size, resize_slots


@dataclass(frozen=True)
class StoredStates:
    """The tensors of a cache while they are at one place."""

    inputs: Tensor
    state: Tensor

    @cached_property
    def place(self) -> tuple[int, int]:
        """Their addresses."""
        return self.inputs.data_ptr(), self.state.data_ptr()

    def require(self, *, slots: int, positions: int) -> None:
        """Raise IndexError unless there are that many slots: kernels trust their arguments. A slot
        has any number of positions."""
        if slots > len(self.state):
            raise IndexError(f"{slots} slots, in a cache of {len(self.state)}")


class RecurrentCache:
    """The last inputs of the convolution [slots, kernel - 1, channels] and the recurrent state
    [slots, heads, key_dim, value_dim] in float32.

    The size does not depend on the sequence's length. The state cannot be rewound to an earlier
    token, only restored from a copy.
    """

    paged = False
    needs_clearing = True
    rewinds = False
    kind = "recurrent"
    parts: tuple[str, ...] = ("inputs", "state")

    def __init__(
        self,
        *,
        channels: int,
        kernel: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stored = StoredStates(
            torch.zeros(0, kernel - 1, channels, dtype=dtype, device=device),
            torch.zeros(0, heads, key_dim, value_dim, device=device),  # float32
        )

    @property
    def inputs(self) -> Tensor:
        return self._stored.inputs

    @property
    def state(self) -> Tensor:
        return self._stored.state

    def stored(self) -> StoredStates:
        """The storage, for kernels: the same object until it is at another place."""
        return self._stored

    def resize(self, size: Size, *, keep: int, moves: Moves = ()) -> None:
        self._stored = StoredStates(
            resize_slots(self.inputs, size.slots, keep), resize_slots(self.state, size.slots, keep)
        )

    def bytes_for(self, size: Size) -> int:
        return size.slots * sum(
            one.element_size() * one.shape[1:].numel() for one in (self.inputs, self.state)
        )

    def clear(self, slot: int) -> None:
        self.inputs[slot].zero_()
        self.state[slot].zero_()

    def views(self, slot: int, end: int) -> tuple[Tensor, Tensor]:
        return self.inputs[slot], self.state[slot]

    def save(self, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self.inputs[slot].clone(), self.state[slot].clone()

    def restore(self, slot: int, saved: Sequence[Tensor], start: int, kept: int, end: int) -> None:
        assert kept == start
        self.inputs[slot], self.state[slot] = saved

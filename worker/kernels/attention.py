"""Decode attention over a layer's caches: `src/attention.cpp`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.kernels import library
from worker.kernels.library import TYPE_CODES

# Limits of src/attention.cpp.
CHANNELS = 16  # a head's channels are a multiple of this
MAX_GROUP = 64  # query heads per key-value head
MAX_STATE = 16_384  # query heads per key-value head · channels
PLACES = (6, 7, 13)  # arguments that say where a cache is: keys, values, columns


@dataclass(frozen=True)
class Stored:
    """The keys and values of a layer [slots, kv_heads, columns, head_dim]. The column of a position
    is position % window with a window, else the position."""

    keys: Tensor
    values: Tensor
    window: int | None

    def require(self, *, slots: int, positions: int) -> None:
        """Raise IndexError unless there are that many slots and positions: the kernel trusts its
        arguments."""
        columns = positions if self.window is None else min(positions, self.window)
        if slots > self.keys.shape[0] or columns > self.keys.shape[2]:
            raise IndexError(
                f"{slots} slots of {columns} columns, in a cache of {tuple(self.keys.shape)}"
            )


def serves(q: Tensor, stored: Stored) -> bool:
    """Whether the kernel computes this shape and type."""
    heads, dim = q.shape[1:]
    group = heads // stored.keys.shape[1]
    return (
        library.serves(q)
        and stored.keys.dtype is q.dtype
        and dim % CHANNELS == 0
        and group <= MAX_GROUP
        and group * dim <= MAX_STATE
    )


def attend_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: Stored,
    slots: Tensor,
    positions: Tensor,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Stores k and v [rows, kv_heads, head_dim] of new tokens, and attends with
    q [rows, heads, head_dim] to the positions that each sees → [rows, heads * head_dim].

    slots and positions: int64 [rows]; rows of one sequence lie together, in their order. `cap`
    limits scores to (-cap, cap) with tanh; `sinks` [heads] are further scores without values.
    """
    rows, heads, dim = q.shape
    q, k, v = _adjacent(q), _adjacent(k), _adjacent(v)
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty(rows, heads * dim, dtype=q.dtype)
    library.require().attend_decode(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        stored.keys.data_ptr(),
        stored.values.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        rows,
        stored.keys.shape[2],
        stored.window or 0,
        heads,
        stored.keys.shape[1],
        dim,
        scale,
        cap or 0.0,
        TYPE_CODES[q.dtype],
        torch.get_num_threads(),
    )
    return out


def relocate(args: tuple[Any, ...], stored: Stored) -> None:
    """Let a recorded call use caches at another place: `args` are those of `attend_decode`."""
    keys, values, capacity = (args[place] for place in PLACES)
    keys.value, values.value = stored.keys.data_ptr(), stored.values.data_ptr()
    capacity.value = stored.keys.shape[2]


def _adjacent(x: Tensor) -> Tensor:
    """x [rows, heads, dim] with its heads adjacent in memory: itself if they are."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()

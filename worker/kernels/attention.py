"""Attention over a layer's caches: of single tokens, `src/attention.cpp`, and of chunks,
`src/chunks.cpp`."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from worker.kernels import choices, library
from worker.kernels.choices import Measurement
from worker.kernels.library import TYPE_CODES

# Limits of the sources.
CHANNELS = 16  # a head's channels are a multiple of this
MAX_DIM = 512
MAX_GROUP = 64  # query heads per key-value head
MAX_STATE = 16_384  # query heads per key-value head · channels
MEASURED_TOKENS, MEASURED_COLUMNS = 8, 256
PAGE = 16  # tokens of a page, as in src/attention.h
# Arguments of attend_decode that say where a cache is, see `Stored.place`.
PLACES = (6, 7, 8, 14)


@dataclass(frozen=True, eq=False)
class Stored:
    """The keys and values of a layer: with `pages` [pages, kv_heads, PAGE, head_dim], else
    [slots, kv_heads, columns, head_dim]. The column of a position is position % window with a
    window, else the position.

    `pages`, int32 [slots, n] on the same device: column c of a slot is column c % PAGE of page
    c // PAGE in its row.
    """

    keys: Tensor
    values: Tensor
    window: int | None
    pages: Tensor | None = None

    @cached_property
    def place(self) -> tuple[int, int, int, int]:
        """Addresses of keys, values and `pages` (0: none), and `capacity`."""
        pages = 0 if self.pages is None else self.pages.data_ptr()
        return self.keys.data_ptr(), self.values.data_ptr(), pages, self.capacity

    @cached_property
    def capacity(self) -> int:
        """The columns of a slot, or the pages of one with `pages`."""
        return self.keys.shape[2] if self.pages is None else self.pages.shape[1]

    @cached_property
    def columns(self) -> int:
        """The columns that a slot can have."""
        return self.capacity if self.pages is None else self.capacity * PAGE

    def require(self, *, slots: int, positions: int) -> None:
        """Raise IndexError unless there are that many slots and positions: kernels trust their
        arguments."""
        columns = positions if self.window is None else min(positions, self.window)
        most = len(self.keys if self.pages is None else self.pages)
        if slots > most or columns > self.columns:
            raise IndexError(
                f"{slots} slots of {columns} columns, in a cache of {most} slots of {self.columns}"
            )


def serves(q: Tensor, stored: Stored) -> bool:
    """True if the kernels compute this shape and type."""
    heads, dim = q.shape[1:]
    group = heads // stored.keys.shape[1]
    return (
        library.serves(q)
        and stored.keys.dtype is q.dtype
        and dim % CHANNELS == 0
        and dim <= MAX_DIM
        and group <= MAX_GROUP
        and group * dim <= MAX_STATE
    )


@dataclass(frozen=True)
class Way:
    """The choice of vector units: pairs of bf16, or float32, where the level of the kernels
    has both: for single tokens, and for chunks."""

    tokens_in_pairs: bool
    chunks_in_pairs: bool


@cache
def fastest_way() -> Way:
    """The one of this machine, by measurement. It is measured when the first token is computed,
    since no step is recorded at its first time."""
    level = library.require().level
    if not level.has_pairs:
        return Way(False, False)
    kept = choices.of(level.name, torch.get_num_threads())
    return Way(
        bool(kept.get("attention of single tokens in pairs of bf16", _prefers_pairs_of_tokens)),
        bool(kept.get("attention of chunks in pairs of bf16", _prefers_pairs_of_chunks)),
    )


def _prefers_pairs_of_tokens() -> Measurement:
    rows = torch.arange(MEASURED_TOKENS)
    positions = torch.full((MEASURED_TOKENS,), MEASURED_COLUMNS - 1)
    q, k, v, stored, out = _measured(MEASURED_TOKENS)
    return choices.compare(
        *(
            partial(attend_decode, q, k, v, stored, rows, positions, 1.0, None, None, out, pairs)
            for pairs in (True, False)
        )
    )


def _prefers_pairs_of_chunks() -> Measurement:
    chunks = torch.tensor([[0, 0, MEASURED_COLUMNS, 0]])
    q, k, v, stored, out = _measured(MEASURED_COLUMNS)
    return choices.compare(
        *(
            partial(attend_chunks, q, k, v, stored, chunks, 1.0, None, None, out, pairs)
            for pairs in (True, False)
        )
    )


def _measured(rows: int) -> tuple[Tensor, Tensor, Tensor, Stored, Tensor]:
    """q, k, v, caches and results that are measured with: those of many models."""
    heads, kv_heads, dim = 16, 8, 128
    ones = partial(torch.ones, dtype=torch.bfloat16)
    caches = ones(2, MEASURED_TOKENS, kv_heads, MEASURED_COLUMNS, dim)
    q, k, v = ones(rows, heads, dim), ones(rows, kv_heads, dim), ones(rows, kv_heads, dim)
    return q, k, v, Stored(caches[0], caches[1], None), ones(rows, heads * dim)


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
    out: Tensor,
    pairs: bool | None = None,
) -> None:
    """Stores k and v [rows, kv_heads, head_dim] of new tokens, and attends with
    q [rows, heads, head_dim] to the positions that each sees: out [rows, heads * head_dim].

    slots and positions: int64 [rows]; rows of one sequence lie together, in their order. `cap`
    limits scores to (-cap, cap) with tanh; `sinks`, float32 [heads], are further scores without
    values. `out` is contiguous. `pairs`: see `Way`; None: as this machine does so faster.
    """
    q, k, v = _adjacent(q), _adjacent(k), _adjacent(v)
    keys, values, pages, _ = stored.place
    library.require().attend_decode(
        *_new(q, k, v),
        keys,
        values,
        pages,
        slots.data_ptr(),
        positions.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        len(q),
        *_shape(q, stored),
        scale,
        cap or 0.0,
        TYPE_CODES[q.dtype],
        fastest_way().tokens_in_pairs if pairs is None else pairs,
        torch.get_num_threads(),
    )


def attend_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: Stored,
    chunks: Tensor,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
    out: Tensor,
    pairs: bool | None = None,
) -> None:
    """The same for chunks of sequences that differ. Other rows of q, k, v and out are not touched.

    chunks: int64 [n, 4], the slot, the first position, the length and the first row of each. The
    output of a token depends on its position and the tokens that it sees, not on where its chunk
    begins.
    """
    q, k, v = _adjacent(q), _adjacent(k), _adjacent(v)
    keys, values, pages, _ = stored.place
    library.require().attend_chunks(
        *_new(q, k, v),
        keys,
        values,
        pages,
        chunks.data_ptr(),
        len(chunks),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        *_shape(q, stored),
        scale,
        cap or 0.0,
        TYPE_CODES[q.dtype],
        fastest_way().chunks_in_pairs if pairs is None else pairs,
        torch.get_num_threads(),
    )


def _new(*tensors: Tensor) -> Iterator[int]:
    """The address of each tensor's rows, and the number of elements between two rows."""
    for x in tensors:
        yield from (x.data_ptr(), x.stride(0))


def _shape(q: Tensor, stored: Stored) -> tuple[int, ...]:
    """Capacity and window of the caches, heads, key-value heads, channels."""
    return stored.capacity, stored.window or 0, q.shape[1], stored.keys.shape[1], q.shape[2]


def relocate(words: MutableSequence[int], first: int, stored: Stored) -> None:
    """Let a recorded call use caches at another place: `words` hold the arguments of
    `attend_decode` from `first` on."""
    for place, word in zip(PLACES, stored.place, strict=True):
        words[first + place] = word


def _adjacent(x: Tensor) -> Tensor:
    """x [rows, heads, dim] with its heads adjacent in memory: itself if they are."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()

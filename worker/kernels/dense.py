"""Products with plain bf16 weights: `src/dense.cpp`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from worker.kernels import choices, library
from worker.kernels.choices import Costs, Measurement, Times

STEP = 32  # columns are a multiple of this
UNIT = 32  # outputs of a unit of work: a matrix has at least as many
TILE_ROWS = 16  # rows of x that are packed together
PADDING = 16  # columns in float32, see dense_linear in src/dense.cpp
MEASURED_ROWS = (6, 8, 10, 12, 16, 20, 24, 32, 48)
LEAST_UNPACKED = 5  # rows, each with the bits that it has alone: a token and a draft after it
UNLIMITED = 1 << 30  # rows


def serves(outputs: int, columns: int) -> bool:
    """True if the kernel multiplies with bf16 matrices of this shape."""
    return outputs >= UNIT and columns % STEP == 0 and library.active() is not None


@dataclass(frozen=True)
class Way:
    """A way of computing, where the level of the kernels has several."""

    pairs: bool  # vector units multiply pairs of bf16, or else float32
    few: int  # rows of a matrix up to which they are not packed


def fastest_way() -> Way:
    """The one of this machine, by measurement."""
    level = library.require().level
    if not level.is_wide:  # which has no other
        return Way(pairs=False, few=UNLIMITED)
    kept = choices.of(level.name, torch.get_num_threads())
    pairs = level.has_pairs and (
        level.name == "amx" or bool(kept.get("products of pairs of bf16", _prefers_pairs))
    )
    name = f"rows that are not packed, in {'pairs of bf16' if pairs else 'float32'}"
    return Way(pairs, max(kept.get(name, lambda: _most_unpacked(pairs)), LEAST_UNPACKED))


def _most_unpacked(pairs: bool) -> Measurement:
    rounds = _seconds([Way(pairs, UNLIMITED), Way(pairs, 0)])
    return Measurement.of(rounds, partial(choices.crossing, MEASURED_ROWS))


def _prefers_pairs() -> Measurement:
    def costs(times: Times) -> Costs:
        unpacked_pairs, packed_pairs, unpacked_floats, packed_floats = times
        pairs = [*map(min, unpacked_pairs, packed_pairs)]
        floats = [*map(min, unpacked_floats, packed_floats)]
        return choices.either([pairs, floats])

    ways = [Way(pairs, few) for pairs in (True, False) for few in (UNLIMITED, 0)]
    return Measurement.of(_seconds(ways), costs)


def _seconds(ways: Sequence[Way]) -> list[Times]:
    weights = choices.weights()
    functions = [[partial(linear, weights=Matrices([w], way)) for w in weights] for way in ways]
    return choices.seconds(functions, MEASURED_ROWS)


class Matrices:
    """bf16 weights [outputs, columns] of one shape, as `linear` reads them, and the way of doing
    so: by default the fastest one of this machine."""

    def __init__(self, weights: Sequence[Tensor], way: Way | None = None) -> None:
        self._weights = weights  # keeps their memory
        self.way = way or fastest_way()
        self.count, self.outputs = len(weights), len(weights[0])
        self.table = (c_int64 * len(weights))(*(weight.data_ptr() for weight in weights))


def linear(x: Tensor, weights: Matrices, counts: Tensor | None = None) -> Tensor:
    """x Wᵀ in bf16: x [rows, columns] → [rows, outputs]. `counts`, int64 on the CPU: how many rows
    belong to each matrix, in order; None: all belong to the only one."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    y = torch.empty(rows, weights.outputs, dtype=torch.bfloat16)
    tiles = rows // TILE_ROWS + min(rows, weights.count)  # at most
    scratch = torch.empty(tiles * TILE_ROWS * (columns + PADDING), dtype=torch.float32)
    library.require().dense_linear(
        x.data_ptr(),
        x.stride(0),
        rows,
        columns,
        weights.table,
        None if counts is None else counts.data_ptr(),
        weights.count,
        y.data_ptr(),
        weights.outputs,
        scratch.data_ptr(),
        weights.way.pairs,
        weights.way.few,
        torch.get_num_threads(),
    )
    return y

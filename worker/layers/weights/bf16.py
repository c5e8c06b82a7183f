"""A linear's weight in bf16 as checkpoints have it, multiplied by the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import choices, dense, library
from worker.kernels.choices import Measurement
from worker.layers.weights.dense import linear
from worker.layers.weights.linear_weight import GroupedProduct

MEASURED_ROWS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def served(weight: Tensor) -> bool:
    """True if the kernels multiply with this weight [out_features, in_features]."""
    rows, columns = max(len(weight), dense.UNIT), weight.shape[1]
    return weight.is_cpu and weight.dtype is torch.bfloat16 and dense.serves(rows, columns)


def most_rows() -> int:
    """Rows up to which the kernels multiply: where they are faster than torch on this machine, by
    measurement, and as many as have the bits that each has alone; 0: any number."""
    kept = choices.of(library.require().level.name, torch.get_num_threads())
    way = dense.fastest_way()
    faster = kept.get("rows that kernels multiply in bf16", lambda: _faster_rows(way))
    return 0 if faster == MEASURED_ROWS[-1] else max(faster, dense.LEAST_UNPACKED)


def _faster_rows(way: dense.Way) -> Measurement:
    """Rows up to which the kernels are faster."""
    weights = choices.weights()
    kernels = [partial(dense.linear, weights=dense.Matrices([one], way)) for one in weights]
    torch_ = [partial(linear, weight=one) for one in weights]
    rounds = choices.seconds([kernels, torch_], MEASURED_ROWS)
    return Measurement.of(rounds, partial(choices.crossing, MEASURED_ROWS))


class Bf16Weight:
    """One contiguous tensor [out_features, in_features]."""

    def __init__(self, weight: Tensor) -> None:
        self._out_features = len(weight)
        missing = max(0, dense.UNIT - len(weight))  # as few as routers and gates may have
        self._weight = F.pad(weight, (0, 0, 0, missing)) if missing else weight
        self._matrices = dense.Matrices([self._weight])
        self._most = most_rows()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = len(x)
        if self._most and rows > self._most:
            return linear(x, self._weight[: self._out_features], bias)
        y = dense.linear(x, self._matrices)[:, : self._out_features]
        return y if bias is None else y.add_(bias)

    @staticmethod
    def grouped(weights: Sequence[Bf16Weight]) -> GroupedProduct:
        """One product with the rows of each of the weights, which have one shape."""
        outputs = weights[0]._out_features
        matrices = dense.Matrices([weight._weight for weight in weights])
        return lambda x, counts: dense.linear(x, matrices, counts)[:, :outputs]

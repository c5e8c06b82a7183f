"""A tensor of a model, made from a tensor of the file: one of its stacked matrices, its rows in
another order, its values changed back.

Rows and matrices are taken from quantised blocks as they are. Changing values dequantises them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

import torch
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from worker.checkpoint.headers import TensorHeader
from worker.gguf.read.header import StoredTensor
from worker.gguf.tensor_format import DENSE
from worker.layers.weights.quantised_tensor import QuantisedTensor, Weight

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class TensorView:
    """`matrix` is taken first, then `rows` of it, then `transforms` are applied to float32 values.
    `shape` is that of the result."""

    stored: StoredTensor
    shape: tuple[int, ...]
    matrix: int | None = None
    rows: slice | Tensor | None = None
    transforms: tuple[Transform, ...] = field(default=())

    @classmethod
    def whole(cls, stored: StoredTensor) -> TensorView:
        return cls(stored, stored.shape)

    def one_matrix(self, index: int) -> TensorView:
        """One of the stacked matrices of a whole tensor."""
        return replace(self, matrix=index, shape=self.shape[1:])

    def with_rows(self, rows: slice | Tensor) -> TensorView:
        """Some rows, or all in another order."""
        assert self.rows is None
        count = len(range(self.shape[0])[rows]) if isinstance(rows, slice) else len(rows)
        return replace(self, rows=rows, shape=(count, *self.shape[1:]))

    def changed(self, transform: Transform, shape: tuple[int, ...] | None = None) -> TensorView:
        """With other values, and maybe another shape."""
        return replace(self, transforms=(*self.transforms, transform), shape=shape or self.shape)

    @property
    def header(self) -> TensorHeader:
        """Its entry under the model's names, with the size of its part of the file."""
        stored = self.stored
        matrix = self.matrix or 0
        size = (stored.end - stored.begin) * prod(self.shape) // prod(stored.shape)
        begin = stored.begin
        if self.matrix is not None:
            begin += matrix * ((stored.end - stored.begin) // stored.shape[0])
        return TensorHeader(
            stored.file,
            stored.type.name,
            self.shape,
            begin,
            begin + size,
            blocks=stored.type not in DENSE and not self.transforms,
        )

    def read(self, file: Tensor) -> Weight:
        """The values, where possible as a view of `file`: the bytes of the whole file."""
        weight = view_of(self.stored, file)
        if isinstance(weight, QuantisedTensor) and (self.transforms or len(weight.shape) == 1):
            weight = self._few(weight).dequantise(torch.float32)
        elif self.matrix is not None:
            weight = weight[self.matrix]
        if self.rows is not None:
            weight = weight[self.rows]
        if self.transforms:
            assert isinstance(weight, Tensor)
            values = weight.float()
            for transform in self.transforms:
                values = transform(values)
            return values
        return weight

    def _few(self, weight: QuantisedTensor) -> QuantisedTensor:
        return weight if self.matrix is None else weight[self.matrix]


def view_of(stored: StoredTensor, file: Tensor) -> Weight:
    """A stored tensor as a view of the bytes of its file."""
    raw = file[stored.begin : stored.end]
    if stored.type in DENSE:
        return raw.view(DENSE[stored.type]).view(stored.shape)
    block, size = GGML_QUANT_SIZES[stored.type]
    row = stored.shape[-1] // block * size
    return QuantisedTensor(stored.type, stored.shape, raw.view(*stored.shape[:-1], row))


def floats(stored: StoredTensor, raw: bytes) -> list[float]:
    """The values of a small tensor, such as RoPE factors, from its bytes."""
    alone = replace(stored, begin=0, end=len(raw))
    weight = view_of(alone, torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    values = weight.dequantise(torch.float32) if isinstance(weight, QuantisedTensor) else weight
    numbers: list[float] = values.flatten().float().tolist()
    return numbers

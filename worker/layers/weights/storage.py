"""Chooses the storage of a linear's weight, and of those of all experts of a layer, by what their
checkpoint tensors hold.

Blocks of types that no kernel multiplies with are re-encoded on the way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from worker.kernels import library, planes
from worker.kernels import quantised as cpu_kernels
from worker.kernels.formats import FORMATS
from worker.kernels.library import TYPE_CODES
from worker.layers.weights import bf16, onednn, triton
from worker.layers.weights.dense import DenseWeight, empty, merge
from worker.layers.weights.dequantising import DequantisingWeight
from worker.layers.weights.integer import IntegerWeight
from worker.layers.weights.linear_weight import JoinedWeight, LinearWeight
from worker.layers.weights.quantised_tensor import (
    QuantisedTensor,
    Weight,
    bytes_of,
    place,
    stays_quantised,
)
from worker.layers.weights.stacked import DequantisingStack, PlainStack, StackedWeight

TARGET = Type.Q8_0  # its error is small beside that of the types with fewer bits
REENCODE_VALUES = 1 << 20  # values that are encoded at a time


class ProductKind(Enum):
    """The kinds of products with a weight, as shown to users."""

    INTEGERS = "integer products"
    TRITON = "Triton kernels"
    REENCODED = f"re-encoded as {TARGET.name}"
    DEQUANTISED = "dequantised for each product, which is slow"
    PLAIN = "dequantised while loading"


def product_kind(
    kind: Type, columns: int, dtype: torch.dtype, device: torch.device, keep: bool
) -> ProductKind:
    """The kind of product of a linear of `dtype` on the device with rows of `columns` values.
    `keep`: blocks stay as they are where they can."""
    kernels = _kernels(kind, columns, dtype, device)
    if kernels is not None:
        return kernels
    fits = columns % GGML_QUANT_SIZES[TARGET][0] == 0
    if fits and not keep and _kernels(TARGET, columns, dtype, device) is not None:
        return ProductKind.REENCODED
    return ProductKind.DEQUANTISED if stays_quantised(kind, device) else ProductKind.PLAIN


def reencodes(dtype: torch.dtype, device: torch.device) -> bool:
    """True if kernels of linears of `dtype` multiply with re-encoded blocks on the device."""
    return _kernels(TARGET, GGML_QUANT_SIZES[TARGET][0], dtype, device) is not None


def _kernels(
    kind: Type, columns: int, dtype: torch.dtype, device: torch.device
) -> ProductKind | None:
    if device.type == "cuda":
        return ProductKind.TRITON if triton.multiplies(kind) else None
    if device.type == "cpu" and dtype in TYPE_CODES and cpu_kernels.serves(kind.name, columns):
        return ProductKind.INTEGERS
    return None


def bytes_of_blocks(
    kind: Type, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Memory of the blocks of a linear of `dtype` on the device, which are not re-encoded."""
    if _kernels(kind, columns, dtype, device) is ProductKind.TRITON:
        return planes.bytes_of(kind.name, rows, columns)
    return rows * bytes_of(columns, kind)


def prepare(kinds: Collection[Type], dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels of linears of `dtype` with blocks of these types, all at once, where they
    are missing."""
    names = {kind.name for kind in kinds}
    if names and device.type == "cpu" and dtype in TYPE_CODES:
        others = {TARGET.name} if names - FORMATS.keys() else set()  # which are re-encoded
        library.prepare(sorted(names & FORMATS.keys() | others))


def reencode(weight: QuantisedTensor) -> QuantisedTensor:
    """A matrix in blocks of TARGET, with its values rounded once more."""
    rows, columns = weight.shape
    blocks = torch.empty(rows, bytes_of(columns, TARGET), dtype=torch.uint8)
    step = max(1, REENCODE_VALUES // columns)
    with np.errstate(all="ignore"):  # a damaged scale may be infinite or NaN
        for start in range(0, rows, step):
            values = weight[start : start + step].dequantise(torch.float32).cpu().numpy()
            blocks[start : start + step] = torch.from_numpy(quants.quantize(values, TARGET))
    return QuantisedTensor(TARGET, weight.shape, blocks.to(weight.device))


def store_linear(
    parts: Sequence[Weight], dtype: torch.dtype, device: torch.device, *, keep_quantised: bool
) -> LinearWeight:
    """The weight of a linear that is merged from `parts`, each [rows, in_features], in order.
    Adjacent parts with the same kind of product are merged in one. `keep_quantised`: no blocks are
    re-encoded."""
    runs = _runs(parts, dtype, device, keep_quantised)
    stored = [_store_alike(kind, run, dtype, device) for kind, run in runs]
    return stored[0] if len(stored) == 1 else JoinedWeight(stored)


class StackedWeights:
    """The weights of one projection of all experts of a layer on an accelerator, each merged from
    one or more tensors, as they arrive. The first expert's choose the layouts: files hold all
    experts of a projection in one type."""

    def __init__(
        self, experts: int, dtype: torch.dtype, device: torch.device, *, keep_quantised: bool
    ) -> None:
        self._experts, self._dtype, self._device = experts, dtype, device
        self._keep = keep_quantised
        self._stacks: list[StackedWeight] = []  # of adjacent parts with one kind of product

    def put(self, expert: int, parts: Sequence[Weight]) -> None:
        """Store the tensors of an expert, each [rows, in_features], in order."""
        runs = _runs(parts, self._dtype, self._device, self._keep)
        if not self._stacks:
            self._stacks = [self._stack(kind, run) for kind, run in runs]
        for stack, (_, run) in zip(self._stacks, runs, strict=True):
            stack.put(expert, run)

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """As `StackedWeight`."""
        assert self._stacks, "the weights are not loaded"
        found = [stack(x, counts) for stack in self._stacks]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _stack(self, kind: ProductKind, first: Sequence[Weight]) -> StackedWeight:
        if kind is ProductKind.PLAIN:
            plain = [part for part in first if isinstance(part, Tensor)]
            return PlainStack(self._experts, plain, self._dtype, self._device)
        blocks = [part for part in first if isinstance(part, QuantisedTensor)]
        if kind is ProductKind.TRITON:
            return triton.TritonStack(self._experts, blocks, self._device)
        return DequantisingStack(self._experts, blocks, self._device)


def _runs(
    parts: Sequence[Weight], dtype: torch.dtype, device: torch.device, keep: bool
) -> list[tuple[ProductKind, list[Weight]]]:
    """Adjacent parts with the same kind of product together, in the form that it reads."""
    ready = [_prepared(part, dtype, device, keep) for part in parts]
    return [(kind, [part for _, part in run]) for kind, run in groupby(ready, key=itemgetter(0))]


def _prepared(
    part: Weight, dtype: torch.dtype, device: torch.device, keep: bool
) -> tuple[ProductKind, Weight]:
    """The kind of product of a part, and the part in the form that this product reads."""
    if not isinstance(part, QuantisedTensor):
        return ProductKind.PLAIN, part
    kind = product_kind(part.type, part.shape[1], dtype, device, keep)
    if kind is ProductKind.REENCODED:
        part = reencode(part)
        kind = product_kind(part.type, part.shape[1], dtype, device, keep)
    if kind is ProductKind.PLAIN:
        return kind, place(part, dtype, device)
    return kind, part


def _store_alike(
    kind: ProductKind, parts: Sequence[Weight], dtype: torch.dtype, device: torch.device
) -> LinearWeight:
    plain = [part for part in parts if isinstance(part, Tensor)]
    blocks = [part for part in parts if isinstance(part, QuantisedTensor)]
    if kind is ProductKind.INTEGERS:
        return IntegerWeight(blocks)
    if kind is ProductKind.PLAIN:
        return _store_plain(plain, dtype, device)
    placed = [part.to(device) for part in blocks]
    if kind is ProductKind.TRITON:
        return triton.TritonWeight(placed)
    return DequantisingWeight(placed)


def _store_plain(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> LinearWeight:
    merged = merge(parts, dtype, device)
    native = bf16.served(merged)
    if not native and onednn.supports(dtype, device):
        return onednn.OneDnnWeight(merged)
    # On the CPU the tensor may be a view of the mapped file. Weights that every step reads are
    # copied into memory of their own.
    mapped = device.type == "cpu" and merged.data_ptr() == parts[0].data_ptr()
    own = empty(merged.shape, dtype, device).copy_(merged) if mapped else merged
    return bf16.Bf16Weight(own) if native else DenseWeight(own)

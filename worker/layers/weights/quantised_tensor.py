"""Tensors whose values are stored in GGUF's quantised blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from worker.layers.transfer import is_accelerator
from worker.layers.weights.dequantise import FUNCTIONS, dequantise

# Values that a CPU dequantises at a time. The temporary tensors stay in the cache of one core, and
# torch starts no threads for them, which would wait for each other after every operation.
DEQUANTISE_VALUES = 1 << 15
ACCELERATOR_DEQUANTISE_VALUES = 1 << 24  # each operation starts a kernel there


@dataclass(frozen=True, eq=False, slots=True)
class QuantisedTensor:
    """A tensor of `shape` [..., rows, columns], quantised along its last dimension.

    `blocks` are the bytes of the rows, uint8 [*shape[:-1], bytes per row]. They may be a view of a
    mapped file.
    """

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    blocks: Tensor

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def __getitem__(self, index: int | slice | Tensor) -> QuantisedTensor:
        """Rows, or one of the stacked matrices: `index` applies to the first dimension."""
        assert len(self.shape) > 1, "values inside a row cannot be indexed"
        blocks = self.blocks[index]
        return QuantisedTensor(self.type, (*blocks.shape[:-1], self.shape[-1]), blocks)

    def to(self, device: torch.device) -> QuantisedTensor:
        return QuantisedTensor(self.type, self.shape, self.blocks.to(device))

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The values, computed in float32 and rounded to `dtype`."""
        values, size = GGML_QUANT_SIZES[self.type]
        blocks = self.blocks.reshape(-1, size)
        output = torch.empty(len(blocks), values, dtype=dtype, device=self.device)
        chunk = ACCELERATOR_DEQUANTISE_VALUES if is_accelerator(self.device) else DEQUANTISE_VALUES
        step = max(1, chunk // values)
        for start in range(0, len(blocks), step):
            output[start : start + step] = dequantise(blocks[start : start + step], self.type)
        return output.view(self.shape)


def bytes_of(values: int, kind: GGMLQuantizationType) -> int:
    """Bytes of so many values in blocks of this type."""
    per_block, size = GGML_QUANT_SIZES[kind]
    return values // per_block * size


# What a checkpoint holds: plain floats or quantised blocks. Both can be indexed by rows.
Weight = Tensor | QuantisedTensor
# Stores a plain matrix in fewer bytes; returns it as it is if that is not possible.
Compress = Callable[[Tensor], Weight]


def stays_quantised(kind: GGMLQuantizationType, device: torch.device) -> bool:
    """True if blocks of this type are kept on the device. gguf dequantises some on the CPU only."""
    return kind in FUNCTIONS or not is_accelerator(device)


def place(weight: Weight, dtype: torch.dtype, device: torch.device) -> Weight:
    """`weight` on the device: plain ones in `dtype`, blocks as they are if they stay so there."""
    if not isinstance(weight, QuantisedTensor):
        return weight.to(device=device, dtype=dtype)
    if stays_quantised(weight.type, device):
        return weight.to(device)
    return weight.dequantise(dtype).to(device)

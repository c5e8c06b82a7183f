"""Chooses how a linear multiplies with blocks of each type, and re-encodes the types that no kernel
multiplies with."""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type

from worker.kernels import quantised as cpu_kernels
from worker.kernels.library import TYPE_CODES
from worker.layers import triton_weight
from worker.layers.quantised import QuantisedTensor, bytes_of, stays_quantised

TARGET = Type.Q8_0  # its error is small beside that of the types with fewer bits
CHUNK = 1 << 20  # values that are encoded at a time


class Way(Enum):
    """The kinds of products with a type of weights, as shown to users."""

    INTEGERS = "integer products"
    TRITON = "Triton kernels"
    REENCODED = f"re-encoded as {TARGET.name}"
    DEQUANTISED = "dequantised for each product, which is slow"
    PLAIN = "dequantised while loading"


def way(kind: Type, columns: int, dtype: torch.dtype, device: torch.device, keep: bool) -> Way:
    """The kind of product of a linear of `dtype` on the device with rows of `columns` values.
    `keep`: blocks stay as they are where they can."""
    kernels = _kernels(kind, columns, dtype, device)
    if kernels is not None:
        return kernels
    fits = columns % GGML_QUANT_SIZES[TARGET][0] == 0
    if fits and not keep and _kernels(TARGET, columns, dtype, device) is not None:
        return Way.REENCODED
    return Way.DEQUANTISED if stays_quantised(kind, device) else Way.PLAIN


def _kernels(kind: Type, columns: int, dtype: torch.dtype, device: torch.device) -> Way | None:
    if device.type == "cuda":
        return Way.TRITON if triton_weight.multiplies(kind) else None
    if device.type == "cpu" and dtype in TYPE_CODES and cpu_kernels.serves(kind.name, columns):
        return Way.INTEGERS
    return None


def reencode(weight: QuantisedTensor) -> QuantisedTensor:
    """A matrix in blocks of TARGET, with its values rounded once more."""
    rows, columns = weight.shape
    blocks = torch.empty(rows, bytes_of(columns, TARGET), dtype=torch.uint8)
    step = max(1, CHUNK // columns)
    with np.errstate(all="ignore"):  # a damaged scale may be infinite or NaN
        for start in range(0, rows, step):
            values = weight[start : start + step].dequantise(torch.float32).cpu().numpy()
            blocks[start : start + step] = torch.from_numpy(quants.quantize(values, TARGET))
    return QuantisedTensor(TARGET, weight.shape, blocks.to(weight.device))

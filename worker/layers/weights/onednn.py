"""bf16 weights in oneDNN's blocked layout, for CPUs with bf16 instructions.

The weight is packed once, at load. At small batches the product is about twice as fast as with the
dense layout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.layers.weights.dense import bf16_is_fast

# Rows of x that the layout is optimised for. Other row counts work, a little slower.
PACKED_FOR_ROWS = 16
# Larger row counts are padded to a multiple of this. oneDNN compiles a kernel per row count and
# caches a thousand of them, at a few hundred KiB each.
ROUND_ROWS = 8


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """True if weights of this dtype can be packed on this device."""
    return device.type == "cpu" and dtype is torch.bfloat16 and bf16_is_fast()


class OneDnnWeight:
    """[out_features, in_features] in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` in the plain layout."""
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(
            weight.contiguous(), PACKED_FOR_ROWS
        )

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        padding = -rows % ROUND_ROWS if rows > PACKED_FOR_ROWS else 0
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        return y[:rows] if padding else y

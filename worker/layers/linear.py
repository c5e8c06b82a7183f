"""Linear layers, made by one factory, so that a model never touches a weight's storage.

On CPUs with bf16 instructions the weight is packed once for oneDNN (about twice as fast as the
plain layout at small batches); elsewhere it stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.layers.weight import WeightSlot

# Rows of activations that the packed layout is chosen for; other numbers work, a little slower.
PACKED_FOR_ROWS = 16
# Larger numbers are rounded up to a multiple of this: oneDNN builds a kernel for each number, and
# keeps a thousand of them, of a few hundred KiB each.
ROUND_ROWS = 8


class Linear:
    """y = x Wᵀ + b, with W [sum(parts), in_features] made of one or several checkpoint tensors.

    `parts` are the out-features of the fused tensors, in their order (q, k, v or gate, up).
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.in_features = in_features
        self.parts = parts
        self.out_features = sum(parts)
        self._dtype, self._device = dtype, device
        self._packed = device.type == "cpu" and _packs(dtype)
        self._weight = torch.empty(0)
        self._bias = torch.zeros(self.out_features, dtype=dtype, device=device) if bias else None
        self._missing = set(range(len(parts)))

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in_features] → [rows, out_features], in the layer's dtype."""
        if self._packed:
            return self._run_packed(x)
        return F.linear(x, self._weight, self._bias)

    def _run_packed(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        missing = -rows % ROUND_ROWS if rows > PACKED_FOR_ROWS else 0
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y[:rows] if missing else y

    def weight_slot(self, part: int = 0) -> WeightSlot:
        """Slot of one fused tensor [parts[part], in_features]."""

        def load(tensor: Tensor) -> None:
            self._load_part(part, tensor)

        return WeightSlot((self.parts[part], self.in_features), load)

    def bias_slot(self, part: int = 0) -> WeightSlot:
        """Slot of one fused bias [parts[part]]."""
        assert self._bias is not None
        start = sum(self.parts[:part])
        target = self._bias[start : start + self.parts[part]]

        def load(tensor: Tensor) -> None:
            target.copy_(tensor)

        return WeightSlot((self.parts[part],), load)

    def _load_part(self, part: int, tensor: Tensor) -> None:
        if len(self.parts) == 1:
            weight = tensor.to(device=self._device, dtype=self._dtype)
        else:
            if len(self._missing) == len(self.parts):
                shape = (self.out_features, self.in_features)
                self._weight = torch.empty(shape, dtype=self._dtype, device=self._device)
            start = sum(self.parts[:part])
            self._weight[start : start + self.parts[part]].copy_(tensor)
            weight = self._weight
        self._missing.discard(part)
        if self._missing:
            return
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
        elif self._device.type == "cpu" and weight.data_ptr() == tensor.data_ptr():
            weight = weight.clone()  # no weight that is read at each step stays in the mapped file
        self._weight = weight


@dataclass(frozen=True)
class LinearFactory:
    """Makes all linears of one model, in its dtype and on its device."""

    dtype: torch.dtype
    device: torch.device

    def __call__(self, in_features: int, *parts: int, bias: bool = False) -> Linear:
        return Linear(in_features, parts, bias, self.dtype, self.device)


def _packs(dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

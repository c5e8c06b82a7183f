"""RMS norms (Zhang & Sennrich 2019), computed in float32.

Two kinds: plain (weight w) and zero-centred (weight 1 + w, as in Gemma and Qwen3-Next). They also
differ in the order of cast and product, which matters in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import elementwise, gpu, library
from worker.layers.shard import Shard
from worker.layers.weights.slot import Parameter, WeightSlot


class Norm(Protocol):
    """x [..., size] → the same shape and dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def after_add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm."""

    def factors(self) -> tuple[Tensor, float]:
        """The factors of the channels, and eps: for kernels that fuse the norm."""

    def weight_slot(self) -> WeightSlot: ...


MakeNorm = Callable[[int], Norm]  # takes the size of the last dimension


class RMSNorm:
    """x * rsqrt(mean(x²) + eps) * w over the last dimension of `size`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.eps = size, eps
        self._weight = Parameter(size, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        if library.serves(x):
            return elementwise.rms_norm(x, self._weight.value, self.eps)
        return F.rms_norm(x, (self.size,), self._weight.value, self.eps)

    def after_add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        if library.serves(x):
            return elementwise.add_rms_norm(x, delta, self._weight.value, self.eps)
        if gpu.serves(x):
            added: tuple[Tensor, Tensor] = gpu.elementwise().add_rms_norm(
                x, delta, self._weight.value, self.eps
            )
            return added
        total = x + delta
        return total, self(total)

    def factors(self) -> tuple[Tensor, float]:
        return self._weight.value, self.eps

    def weight_slot(self) -> WeightSlot:
        return self._weight.slot()


class ZeroCentredRMSNorm:
    """x * rsqrt(mean(x²) + eps) * (1 + w). The product is in float32, before the cast."""

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        self.size, self.eps = size, eps
        self._weight = torch.empty(size, dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        if library.serves(x):
            return elementwise.rms_norm(x, self._weight, self.eps)
        return F.rms_norm(x.float(), (self.size,), self._weight, self.eps).to(x.dtype)

    def after_add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        if library.serves(x):
            return elementwise.add_rms_norm(x, delta, self._weight, self.eps)
        if gpu.serves(x):
            added: tuple[Tensor, Tensor] = gpu.elementwise().add_rms_norm(
                x, delta, self._weight, self.eps
            )
            return added
        total = x + delta
        return total, self(total)

    def factors(self) -> tuple[Tensor, float]:
        return self._weight, self.eps

    def weight_slot(self) -> WeightSlot:
        def load(tensor: Tensor) -> None:
            self._weight.copy_(tensor.float() + 1)

        return WeightSlot((self.size,), load)


class WholeNorm:
    """A norm over the channels of all heads [tokens, size], of which each rank has a part. Ranks
    that replicate heads count alike, so the mean over the ranks is that of all channels."""

    def __init__(self, make: MakeNorm, size: int, heads: int, shard: Shard) -> None:
        self._size, self._shard = size, shard
        self._part = shard.part(size, heads, "heads", replicate=True)
        self._norm = make(self._part.stop - self._part.start)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, channels of this rank] → the same shape and dtype."""
        if self._shard.whole:
            return self._norm(x)
        weight, eps = self._norm.factors()
        wide = x.float()
        mean = self._shard.sum(wide.square().mean(-1, keepdim=True)) / self._shard.ranks
        return (wide * torch.rsqrt(mean + eps) * weight.float()).to(x.dtype)

    def weight_slot(self) -> WeightSlot:
        slot = self._norm.weight_slot()
        return WeightSlot((self._size,), lambda tensor: slot.fill(tensor[self._part]))

"""The gated MLP of all families: down(act(gate(x)) * up(x)) (Shazeer 2020, "GLU Variants")."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import elementwise, gpu, library
from worker.layers.linear import LinearFactory
from worker.layers.weights.slot import WeightSlot

Activation = Callable[[Tensor], Tensor]
Gate = Callable[[Tensor, Tensor], Tensor]  # gate and up channels → channels of the down projection


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}
# Activations that the kernels compute together with the product.
FUSED = {F.silu: "silu", gelu_tanh: "gelu_tanh"}


def gated_by(act: Activation) -> Gate:
    """act(gate) * up."""

    def gate_by(gate: Tensor, up: Tensor) -> Tensor:
        if act in FUSED and library.serves(gate):
            return elementwise.gated_activation(gate, up, FUSED[act])
        if act in FUSED and gpu.serves(gate):
            output: Tensor = gpu.elementwise().gated_activation(gate, up, FUSED[act])
            return output
        return act(gate) * up

    return gate_by


def clamped(slope: float, limit: float) -> Gate:
    """(up + 1) · gate · sigmoid(slope · gate), with gate at most `limit` and up within ±limit."""

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        if library.serves(gate):
            return elementwise.gated_activation(gate, up, "clamped", slope=slope, limit=limit)
        if gpu.serves(gate):
            output: Tensor = gpu.elementwise().gated_activation(
                gate, up, "clamped", slope=slope, limit=limit
            )
            return output
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(slope * gate)

    return gated


class GatedMLP:
    """x [..., hidden] → [..., hidden] through `inner` gated channels.

    `merged`: checkpoints have gate and up in one tensor, `gate_up_proj`.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        linears: LinearFactory,
        *,
        act: Activation = F.silu,
        bias: bool = False,
        merged: bool = False,
    ) -> None:
        self._gate, self._bias, self._merged = gated_by(act), bias, merged
        self._gate_up = linears.column(hidden, inner, inner, bias=bias)
        self._down = linears.row(inner, hidden, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._gate(gate, up))

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        if self._merged:
            return {
                f"{prefix}.gate_up_proj.weight": self._gate_up.merged_slot(),
                f"{prefix}.down_proj.weight": self._down.weight_slot(),
            }
        projections = {
            "gate_proj": (self._gate_up, 0),
            "up_proj": (self._gate_up, 1),
            "down_proj": (self._down, 0),
        }
        slots = {}
        for name, (linear, part) in projections.items():
            slots[f"{prefix}.{name}.weight"] = linear.weight_slot(part)
            if self._bias:
                slots[f"{prefix}.{name}.bias"] = linear.bias_slot(part)
        return slots

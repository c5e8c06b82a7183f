"""A mixture of experts: a router picks a few gated MLPs for each token (Shazeer et al. 2017).

Tokens are grouped by expert: each selected expert runs once per step over its tokens. The storage
of the experts is an `ExpertLinears`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from worker.kernels import gpu, library, mixture
from worker.layers.expert_linears import ExpertFactory
from worker.layers.linear import LinearFactory
from worker.layers.mlp import Activation, Gate, GatedMLP, gated_by
from worker.layers.weights.slot import Parameter, StackedPlace, WeightSlot

# Name of a stacked tensor under the experts' prefix → the parts of its rows, in order.
StackedNames = Mapping[str, tuple[str, ...]]


class Router:
    """The top k of a float32 softmax over all experts. With `normalise` they are scaled to sum 1,
    which equals a softmax over the selected logits."""

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        normalise: bool,
        linears: LinearFactory,
        *,
        bias: bool = False,
    ) -> None:
        self._linear = linears.replicated(hidden, experts)
        self._bias = (
            Parameter(experts, dtype=torch.float32, device=linears.device) if bias else None
        )
        self._top_k, self._normalise, self._shard = top_k, normalise, linears.shard

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] → weights and expert indices, both [tokens, top_k]."""
        # Ranks may round differently, and must choose the same experts.
        logits = self._shard.first(self._linear(x))
        bias = None if self._bias is None else self._bias.value
        if library.serves(logits):
            return mixture.select(logits, bias, self._top_k, self._normalise)
        if gpu.serves(logits):
            found: tuple[Tensor, Tensor] = gpu.mixture().select(
                logits, bias, self._top_k, self._normalise
            )
            return found
        logits = logits.float() if bias is None else logits.float() + bias
        probs = torch.softmax(logits, dim=-1)
        weights, experts = probs.topk(self._top_k, dim=-1)
        if self._normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        slots = {f"{prefix}.weight": self._linear.weight_slot()}
        if self._bias is not None:
            slots[f"{prefix}.bias"] = self._bias.slot()
        return slots


def group(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `mixture.group` of the kernels, by torch."""
    top_k, flat = chosen.shape[1], chosen.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
    return order // top_k, places.view(-1, top_k), counts


def combine(outputs: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """As `mixture.combine` of the kernels, by torch. Summed in the order of a token's experts:
    deterministic, unlike adding into shared rows."""
    return (outputs[places] * weights[..., None]).sum(1)


def _group(x: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """By the kernels that read x, if there are some."""
    if library.serves(x):
        return mixture.group(chosen, experts)
    if gpu.serves(x) and chosen.numel() <= gpu.mixture().MOST_PAIRS:
        found: tuple[Tensor, Tensor, Tensor] = gpu.mixture().group(chosen, experts)
        return found
    return group(chosen, experts)


def _combine(outputs: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """By the kernels that read the outputs, if there are some."""
    if library.serves(outputs):
        return mixture.combine(outputs, weights, places)
    if gpu.serves(outputs):
        found: Tensor = gpu.mixture().combine(outputs, weights, places)
        return found
    return combine(outputs, weights, places)


class Experts:
    """`count` gated MLPs of `inner` channels, run on the tokens that the router assigns to them.

    `gate` joins the gate and up channels. Each of several ranks has a part of the channels of every
    expert. `stacked` maps tensors that hold one projection of all
    experts, [count, rows, columns], to the parts of those rows. A checkpoint may have these instead
    of one tensor per expert and part.
    """

    def __init__(
        self,
        count: int,
        hidden: int,
        inner: int,
        linears: LinearFactory,
        gate: Gate,
        stacked: StackedNames,
        *,
        bias: bool = False,
    ) -> None:
        self._count, self._shard = count, linears.shard
        self._gate, self._stacked_names = gate, stacked
        factory = ExpertFactory(count, linears)
        self.gate_up = factory.column(hidden, inner, inner, bias=bias)
        self.down = factory.row(inner, hidden, bias=bias)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [tokens, hidden], weights and experts [tokens, top_k] → [tokens, hidden]."""
        rows, places, counts = _group(x, experts, self._count)
        gate, up = self.gate_up(x.index_select(0, rows), counts).chunk(2, dim=-1)
        outputs = self.down(self._gate(gate, up), counts)
        return self._shard.sum(_combine(outputs, weights, places))

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        """One set of slots per expert, each with its place in a stacked tensor."""
        slots = {}
        for index in range(self._count):
            expert = f"{prefix}.{index}"
            own = {
                f"{expert}.gate_proj.weight": self.gate_up.weight_slot(index, 0),
                f"{expert}.up_proj.weight": self.gate_up.weight_slot(index, 1),
                f"{expert}.down_proj.weight": self.down.weight_slot(index),
            }
            for name, parts in self._stacked_names.items():
                names = [f"{expert}.{part}.weight" for part in parts]
                own.update(self._stack(f"{prefix}.{name}", index, {n: own[n] for n in names}))
            slots.update(own)
        return slots

    def _stack(self, name: str, index: int, parts: dict[str, WeightSlot]) -> dict[str, WeightSlot]:
        """The slots of one expert, with their places in the stacked tensor `name`."""
        rows = sum(slot.shape[0] for slot in parts.values())
        placed, start = {}, 0
        for part, slot in parts.items():
            end = start + slot.shape[0]
            shape = (self._count, rows, slot.shape[1])
            place = StackedPlace(name, shape, index, slice(start, end))
            placed[part] = replace(slot, stacked=place)
            start = end
        return placed


class SparseMLP:
    """A router, its experts, and (Qwen3-Next, Qwen3.5) one gated shared expert:
    y = Σ wₑ expertₑ(x) + sigmoid(gate(x)) · shared(x). `stacked`: see Experts."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        linears: LinearFactory,
        *,
        experts: int,
        top_k: int,
        normalise: bool,
        act: Activation,
        stacked: StackedNames,
        shared_inner: int = 0,
    ) -> None:
        self._router = Router(hidden, experts, top_k, normalise, linears)
        self._experts = Experts(experts, hidden, inner, linears, gated_by(act), stacked)
        self._shared = GatedMLP(hidden, shared_inner, linears, act=act) if shared_inner else None
        self._shared_gate = linears.replicated(hidden, 1) if shared_inner else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self._experts(x, *self._router(x))
        if self._shared is not None and self._shared_gate is not None:
            y = y + self._shared_gate(x).sigmoid() * self._shared(x)
        return y

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        slots = {
            **self._router.weight_map(f"{prefix}.gate"),
            **self._experts.weight_map(f"{prefix}.experts"),
        }
        if self._shared is not None and self._shared_gate is not None:
            slots.update(self._shared.weight_map(f"{prefix}.shared_expert"))
            slots[f"{prefix}.shared_expert_gate.weight"] = self._shared_gate.weight_slot()
        return slots

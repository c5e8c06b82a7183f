"""A mixture of experts: a router picks a few gated MLPs for each token (Shazeer et al. 2017).

Tokens are grouped by expert: each selected expert runs once per step over its tokens. On CUDA all
experts run in one grouped matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.layers.linear import LinearFactory
from worker.layers.mlp import Activation, GatedMLP
from worker.layers.weight import StackedPlace, WeightSlot

# Name of a stacked tensor under the experts' prefix → the parts of its rows, in order.
StackedNames = Mapping[str, tuple[str, ...]]


class Router:
    """The top k of a float32 softmax over all experts, renormalised to sum 1 if `normalise`."""

    def __init__(
        self, hidden: int, experts: int, top_k: int, normalise: bool, linears: LinearFactory
    ) -> None:
        self._linear = linears.replicated(hidden, experts)
        self._top_k, self._normalise = top_k, normalise

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] → weights and expert indices, both [tokens, top_k]."""
        probs = torch.softmax(self._linear(x), dim=-1, dtype=torch.float32)
        weights, experts = probs.topk(self._top_k, dim=-1)
        if self._normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts

    def weight_slot(self) -> WeightSlot:
        return self._linear.weight_slot()


class Experts:
    """`count` gated MLPs of `inner` channels, run on the tokens that the router assigns to them.

    `stacked` maps tensors that hold one projection of all experts, [count, rows, columns], to the
    parts of those rows. A checkpoint may have these instead of one tensor per expert and part.
    """

    def __init__(
        self,
        count: int,
        hidden: int,
        inner: int,
        linears: LinearFactory,
        act: Activation,
        stacked: StackedNames,
    ) -> None:
        self._count, self._hidden, self._inner, self._act = count, hidden, inner, act
        self._stacked_names = stacked
        self._grouped = runs_grouped(linears.device)
        self._mlps: list[GatedMLP] = []
        if not self._grouped:
            self._mlps = [GatedMLP(hidden, inner, linears, act=act) for _ in range(count)]
        else:
            here = torch.empty(0, dtype=linears.dtype, device=linears.device)
            self._gate_up = here.new_empty(count, 2 * inner, hidden)
            self._down = here.new_empty(count, hidden, inner)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [tokens, hidden], weights and experts [tokens, top_k] → [tokens, hidden]."""
        top_k = experts.shape[1]
        flat = experts.flatten()
        order = flat.argsort(stable=True)  # (token, expert) pairs, grouped by expert
        tokens = order // top_k
        counts = torch.bincount(flat, minlength=self._count)
        run = self._run_grouped if self._grouped else self._run_each
        outputs = run(x[tokens], counts) * weights.flatten()[order, None]
        # Back in token order, then summed: deterministic, unlike adding into shared rows.
        by_token = torch.empty_like(outputs)
        by_token[order] = outputs
        return by_token.view(-1, top_k, self._hidden).sum(1)

    def _run_each(self, x: Tensor, counts: Tensor) -> Tensor:
        sizes: list[int] = counts.tolist()
        pieces = x.split(sizes)
        selected = [i for i, size in enumerate(sizes) if size]
        return torch.cat([self._mlps[i](pieces[i]) for i in selected])

    def _run_grouped(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        gate_up = F.grouped_mm(x, self._gate_up.transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.grouped_mm(self._act(gate) * up, self._down.transpose(1, 2), offs=ends)

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        """One set of slots per expert, each with its place in a stacked tensor."""
        slots = {}
        for index in range(self._count):
            expert = f"{prefix}.{index}"
            if self._grouped:
                own = self._grouped_map(expert, index)
            else:
                own = self._mlps[index].weight_map(expert)
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

    def _grouped_map(self, prefix: str, index: int) -> dict[str, WeightSlot]:
        inner, hidden = self._inner, self._hidden
        gate, up = self._gate_up[index, :inner], self._gate_up[index, inner:]
        return {
            f"{prefix}.gate_proj.weight": WeightSlot((inner, hidden), _copy_into(gate)),
            f"{prefix}.up_proj.weight": WeightSlot((inner, hidden), _copy_into(up)),
            f"{prefix}.down_proj.weight": WeightSlot(
                (hidden, inner), _copy_into(self._down[index])
            ),
        }


def runs_grouped(device: torch.device) -> bool:
    """Whether all experts of a layer are stored in one tensor, for the grouped product."""
    return device.type == "cuda"


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
        self._experts = Experts(experts, hidden, inner, linears, act, stacked)
        self._shared = GatedMLP(hidden, shared_inner, linears, act=act) if shared_inner else None
        self._shared_gate = linears.replicated(hidden, 1) if shared_inner else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self._experts(x, *self._router(x))
        if self._shared is not None and self._shared_gate is not None:
            y = y + self._shared_gate(x).sigmoid() * self._shared(x)
        return y

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        slots = {
            f"{prefix}.gate.weight": self._router.weight_slot(),
            **self._experts.weight_map(f"{prefix}.experts"),
        }
        if self._shared is not None and self._shared_gate is not None:
            slots.update(self._shared.weight_map(f"{prefix}.shared_expert"))
            slots[f"{prefix}.shared_expert_gate.weight"] = self._shared_gate.weight_slot()
        return slots


def _copy_into(target: Tensor) -> Callable[[Tensor], None]:
    def load(tensor: Tensor) -> None:
        target.copy_(tensor)

    return load

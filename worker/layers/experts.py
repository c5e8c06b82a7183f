"""A mixture of experts: a router picks a few gated MLPs for each token (Shazeer et al. 2017).

Tokens are grouped by expert: each expert that is picked at all runs once per step over its tokens,
on CUDA all of them in one grouped product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.layers.linear import LinearFactory
from worker.layers.mlp import Activation, GatedMLP
from worker.layers.weight import WeightSlot


class Router:
    """softmax over all experts in float32, the top k of it, normalised to sum 1 if asked for."""

    def __init__(
        self, hidden: int, experts: int, top_k: int, normalise: bool, make: LinearFactory
    ) -> None:
        self._linear = make(hidden, experts)
        self._top_k, self._normalise = top_k, normalise

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] → weights and expert indices, both [tokens, top_k]."""
        shares = torch.softmax(self._linear(x), dim=-1, dtype=torch.float32)
        weights, experts = shares.topk(self._top_k, dim=-1)
        if self._normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts

    def weight_slot(self) -> WeightSlot:
        return self._linear.weight_slot()


class Experts:
    """`count` gated MLPs of `inner` channels, run on the tokens that a router sends them."""

    def __init__(
        self, count: int, hidden: int, inner: int, make: LinearFactory, act: Activation
    ) -> None:
        self._count, self._hidden, self._inner, self._act = count, hidden, inner, act
        self._stacked = stacks(make.device)
        self._mlps: list[GatedMLP] = []
        if not self._stacked:
            self._mlps = [GatedMLP(hidden, inner, make, act=act) for _ in range(count)]
        else:
            here = torch.empty(0, dtype=make.dtype, device=make.device)
            self._gate_up = here.new_empty(count, 2 * inner, hidden)
            self._down = here.new_empty(count, hidden, inner)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [tokens, hidden], weights and experts [tokens, top_k] → [tokens, hidden]."""
        top_k = experts.shape[1]
        flat = experts.flatten()
        order = flat.argsort(stable=True)  # picks, grouped by expert
        tokens = order // top_k
        counts = torch.bincount(flat, minlength=self._count)
        run = self._run_stacked if self._stacked else self._run_each
        said = run(x[tokens], counts) * weights.flatten()[order, None]
        # Back to each token's picks in their order, and summed: no two writes meet.
        back = torch.empty_like(said)
        back[order] = said
        return back.view(-1, top_k, self._hidden).sum(1)

    def _run_each(self, x: Tensor, counts: Tensor) -> Tensor:
        sizes: list[int] = counts.tolist()
        pieces = x.split(sizes)
        picked = [i for i, size in enumerate(sizes) if size]
        return torch.cat([self._mlps[i](pieces[i]) for i in picked])

    def _run_stacked(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        gate_up = F.grouped_mm(x, self._gate_up.transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.grouped_mm(self._act(gate) * up, self._down.transpose(1, 2), offs=ends)

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        """One set of tensors per expert; the loader takes fused ones apart."""
        slots = {}
        for index in range(self._count):
            if self._stacked:
                slots.update(self._stacked_map(f"{prefix}.{index}", index))
            else:
                slots.update(self._mlps[index].weight_map(f"{prefix}.{index}"))
        return slots

    def _stacked_map(self, prefix: str, index: int) -> dict[str, WeightSlot]:
        inner, hidden = self._inner, self._hidden
        gate, up = self._gate_up[index, :inner], self._gate_up[index, inner:]
        return {
            f"{prefix}.gate_proj.weight": WeightSlot((inner, hidden), _copy_into(gate)),
            f"{prefix}.up_proj.weight": WeightSlot((inner, hidden), _copy_into(up)),
            f"{prefix}.down_proj.weight": WeightSlot(
                (hidden, inner), _copy_into(self._down[index])
            ),
        }


def stacks(device: torch.device) -> bool:
    """Whether all experts of a layer lie in one tensor, for the grouped product."""
    return device.type == "cuda"


class SparseMLP:
    """A router, its experts, and (Qwen3-Next, Qwen3.5) one shared expert behind a gate:
    y = Σ wₑ expertₑ(x) + sigmoid(gate(x)) · shared(x)."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        make: LinearFactory,
        *,
        experts: int,
        top_k: int,
        normalise: bool,
        act: Activation,
        shared_inner: int = 0,
    ) -> None:
        self._router = Router(hidden, experts, top_k, normalise, make)
        self._experts = Experts(experts, hidden, inner, make, act)
        self._shared = GatedMLP(hidden, shared_inner, make, act=act) if shared_inner else None
        self._shared_gate = make(hidden, 1) if shared_inner else None

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

"""Gated delta nets with random weights and states."""

from __future__ import annotations

import torch

from worker.layers.cache import Size
from worker.layers.delta_net import DeltaShape, GatedDeltaNet
from worker.layers.linear import LinearFactory
from worker.layers.recurrent_cache import RecurrentCache

HIDDEN, SLOTS = 16, 5


def filled_net(shape: DeltaShape, dtype: torch.dtype) -> tuple[GatedDeltaNet, RecurrentCache]:
    """Equal ones for equal arguments."""
    random = torch.Generator().manual_seed(3)
    linears = LinearFactory(dtype, torch.device("cpu"))
    net = GatedDeltaNet(HIDDEN, shape, linears, eps=1e-6, grouped=False)
    for slot in net.weight_map("net").values():
        slot.load(torch.randn(slot.shape, generator=random))
    cache = net.make_cache()
    cache.resize(Size(SLOTS, 1, 0), keep=0)
    for one in (cache.inputs, cache.state):
        one.copy_(torch.randn(one.shape, generator=random))
    return net, cache

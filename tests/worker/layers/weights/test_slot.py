"""Slots: quantised blocks reach a slot as they are, or as values."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType

from tests.worker.layers.weights.test_dequantise import random_tensor
from worker.layers.weights.quantised_tensor import QuantisedTensor
from worker.layers.weights.slot import WeightSlot


def test_a_slot_of_plain_floats_gets_the_values_of_quantised_blocks() -> None:
    stored: list[torch.Tensor] = []
    slot = WeightSlot((4, 64), stored.append)
    tensor = random_tensor(GGMLQuantizationType.Q8_0, 4, 64)
    slot.fill(tensor)
    slot.fill(torch.ones(4, 64))
    assert not slot.quantised
    assert torch.equal(stored[0], tensor.dequantise(torch.float32))
    assert torch.equal(stored[1], torch.ones(4, 64))


def test_a_slot_that_stores_blocks_gets_them_as_they_are() -> None:
    dense: list[torch.Tensor] = []
    blocks: list[QuantisedTensor] = []
    slot = WeightSlot((4, 64), dense.append, load_quantised=blocks.append)
    tensor = random_tensor(GGMLQuantizationType.Q8_0, 4, 64)
    slot.fill(tensor)
    assert slot.quantised
    assert dense == []
    assert blocks == [tensor]

"""Experts that a checkpoint stacks in one tensor per projection."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from jobs.errors import JobError
from worker.checkpoint import weights
from worker.layers.experts import SparseMLP
from worker.layers.linear import LinearFactory
from worker.models.mixture import STACKED_EXPERTS

COUNT, HIDDEN, INNER = 3, 8, 5
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@dataclass
class Checkpoint:
    """The tensors of a checkpoint in memory."""

    values: dict[str, torch.Tensor]
    location: Path = Path("the folder")
    described_by = "config.json"
    readable = ("F32",)

    @property
    def tensors(self) -> dict[str, Any]:
        return {
            n: SimpleNamespace(shape=tuple(t.shape), dtype="F32") for n, t in self.values.items()
        }

    def read(self, name: str) -> torch.Tensor:
        return self.values[name]

    def label(self, name: str) -> str:
        return name


def make() -> SparseMLP:
    linears = LinearFactory(torch.float32, torch.device("cpu"))
    return SparseMLP(
        HIDDEN,
        INNER,
        linears,
        experts=COUNT,
        top_k=2,
        normalise=True,
        act=F.silu,
        stacked=STACKED_EXPERTS,
    )


@pytest.fixture
def separate() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    slots = make().weight_map("mlp")
    return {name: torch.randn(slot.shape, generator=random) for name, slot in slots.items()}


@pytest.fixture
def stacked(separate: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def all_of(part: str) -> torch.Tensor:
        return torch.stack([separate[f"mlp.experts.{i}.{part}.weight"] for i in range(COUNT)])

    return {
        "mlp.gate.weight": separate["mlp.gate.weight"],
        GATE_UP: torch.cat([all_of("gate_proj"), all_of("up_proj")], dim=1),
        DOWN: all_of("down_proj"),
    }


def loaded(tensors: dict[str, torch.Tensor]) -> SparseMLP:
    mlp = make()
    checkpoint: Any = Checkpoint(tensors)
    weights.load(mlp.weight_map("mlp"), checkpoint)
    return mlp


def refusal(tensors: dict[str, torch.Tensor]) -> str:
    with pytest.raises(JobError) as caught:
        loaded(tensors)
    assert caught.value.code == "unsupported_model"
    return caught.value.message


def test_stacked_and_separate_experts_are_the_same_weights(
    separate: dict[str, torch.Tensor], stacked: dict[str, torch.Tensor]
) -> None:
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded(stacked)(x), loaded(separate)(x))


def test_one_projection_may_be_stacked_alone(
    separate: dict[str, torch.Tensor], stacked: dict[str, torch.Tensor]
) -> None:
    mixed = {DOWN: stacked[DOWN]}
    mixed |= {name: tensor for name, tensor in separate.items() if "down_proj" not in name}
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded(mixed)(x), loaded(separate)(x))


def test_a_stacked_tensor_of_the_wrong_shape_is_named(stacked: dict[str, torch.Tensor]) -> None:
    stacked[GATE_UP] = stacked[GATE_UP][:, :-1].contiguous()
    assert refusal(stacked) == (
        f"the folder: tensor {GATE_UP} has shape [3, 9, 8], its config.json requires [3, 10, 8]"
    )


def test_a_missing_stacked_tensor_is_named_by_its_parts(stacked: dict[str, torch.Tensor]) -> None:
    del stacked[DOWN]
    assert re.match(r"the folder lacks the tensors mlp\.experts\.0\.down_proj", refusal(stacked))


def test_experts_stored_in_both_ways_are_refused(
    separate: dict[str, torch.Tensor], stacked: dict[str, torch.Tensor]
) -> None:
    name = "mlp.experts.1.up_proj.weight"
    stacked[name] = separate[name]
    assert refusal(stacked) == f"the folder has {name} twice: as {name} and as {GATE_UP}"

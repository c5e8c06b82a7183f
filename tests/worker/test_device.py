"""The threads of models on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import make_checkpoint
from worker import Engine, device
from worker.engine.engine import EngineCore


@pytest.mark.parametrize("order", [["large", "small"], ["small", "large"]])
def test_each_model_computes_on_its_own_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[str]
) -> None:
    """Not on that of the model that was loaded last."""
    make_checkpoint(tmp_path / "small", num_hidden_layers=1)
    make_checkpoint(tmp_path / "large", num_hidden_layers=8)
    weights = {name: Engine.load(str(tmp_path / name), device="cpu") for name in order}
    sizes = [weights[name].info.weight_bytes for name in ("small", "large")]
    monkeypatch.setattr(device, "SMALL_BYTES", sum(sizes) // 2)
    seen: dict[str, set[int]] = {"small": set(), "large": set()}
    forward = EngineCore._forward

    def noted(core: EngineCore, batch: Any) -> Any:
        seen[core.info.name].add(torch.get_num_threads())
        return forward(core, batch)

    monkeypatch.setattr(EngineCore, "_forward", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for engine in [*weights.values()] * 2:
            engine.generate([[3, 4, 5]], Sampling(temperature=0, max_tokens=3))
            assert torch.get_num_threads() == 3  # for the caller, and for a model that is loaded
    finally:
        torch.set_num_threads(before)
    assert seen == {"small": {1}, "large": {3}}

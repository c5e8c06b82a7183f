"""The last layer computes no more than the rows whose logits are wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from jobs import Sampling
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.layers.mlp import GatedMLP


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2", "granite"])
def test_only_the_last_token_of_a_prompt_passes_the_last_mlp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    rows: list[int] = []
    multiply = GatedMLP.__call__

    def noted(self: GatedMLP, x: Tensor) -> Tensor:
        rows.append(len(x))
        return multiply(self, x)

    monkeypatch.setattr(GatedMLP, "__call__", noted)
    engine = Engine.load(str(make_checkpoint(tmp_path / "model", family)), dtype="fp32")
    engine.generate([[5, 6, 7, 8, 9, 10]], Sampling(max_tokens=1))
    *others, last = rows
    assert others == [6] * len(others) and len(others) > 0
    assert last == 1
    rows.clear()
    engine.prompt_logits([5, 6, 7, 8, 9, 10])
    assert rows == [6] * (1 + len(others))
    engine.close()

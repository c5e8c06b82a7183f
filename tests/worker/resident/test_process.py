"""Settings of the process that generates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.engine.engine import EngineCore
from worker.resident import process

FAULTS = """
import resource, sys
from jobs.api.sampling import Sampling
from worker import Engine

engine = Engine.load(sys.argv[1], device="cpu", max_batch=16, prefix_cache=False)
prompts = [[number + 3] * 32 for number in range(16)]
found = []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    engine.generate(prompts, Sampling(temperature=0, max_tokens=1))
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_prefill_does_not_request_its_memory_from_the_system_again(tmp_path: Path) -> None:
    """Activations of a layer are 512 rows of up to 62.5 KiB: 8,000 pages."""
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    model = make_checkpoint(tmp_path, intermediate_size=8000, num_hidden_layers=4, **heads)
    run = subprocess.run(
        [sys.executable, "-c", FAULTS, str(model)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 2000


@pytest.mark.parametrize("order", [["large", "small"], ["small", "large"]])
def test_each_model_computes_on_its_own_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[str]
) -> None:
    """Not on that of the model that was loaded last."""
    make_checkpoint(tmp_path / "small", num_hidden_layers=1)
    make_checkpoint(tmp_path / "large", num_hidden_layers=8)
    weights = {name: Engine.load(str(tmp_path / name), device="cpu") for name in order}
    sizes = [weights[name].info.weight_bytes for name in ("small", "large")]
    monkeypatch.setattr(process, "SMALL_BYTES", sum(sizes) // 2)
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

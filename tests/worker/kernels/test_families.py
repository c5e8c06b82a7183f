"""Every family computes the same with and without kernels, in prompts and in decode steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.worker.checkpoints import FAMILIES, make_checkpoint
from tests.worker.slot_storage import SlotStorage
from worker import Engine
from worker.kernels import library
from worker.layers.batch import Batch, Span

CPU = torch.device("cpu")
PROMPTS, STEPS = (70, 11), 6


def logits(engine: Engine, ids: Tensor) -> Tensor:
    """All logits of two sequences: prompts in one batch, then steps of one token."""
    model = engine._core.runner.model
    caches = model.make_caches()
    SlotStorage(caches, 3, 128)
    starts, outputs = [0, 0], []
    slots = (2, 0)
    with torch.inference_mode():
        for step in range(1 + STEPS):
            spans = []
            for row, prompt in enumerate(PROMPTS):
                count = 1 if step else prompt
                tokens = ids[row, starts[row] : starts[row] + count].tolist()
                spans.append(Span(slots[row], starts[row], tokens, prompt, len(tokens)))
                starts[row] += count
            outputs.append(model(Batch.prepare(spans, CPU)[0], caches))
    return torch.cat(outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_ways_agree(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.active() is None:
        pytest.skip("this machine has no kernels")
    path = make_checkpoint(tmp_path / "model", family)
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(engine._core.runner.model.vocab_size, (2, 128), generator=random)
    ours = logits(engine, ids)
    monkeypatch.setattr(library, "active", lambda: None)
    torch_only = logits(engine, ids)
    difference = (ours - torch_only).abs().max() / torch_only.abs().max()
    assert 0 < difference < 2e-4  # 0: the kernels were not used

"""Steps of ranks that are made again by recorded kernel calls, beside computed ones."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.checkpoints import make_checkpoint
from tests.worker.ranks.threads import load_part, on_ranks
from tests.worker.slot_storage import SlotStorage
from worker.layers import replay
from worker.layers.batch import Batch, Span
from worker.layers.replay import Inputs, Step
from worker.layers.shard import Shard
from worker.models.model import Decoder

CPU = torch.device("cpu")
SHAPE = {"intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}  # what kernels multiply
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 48, "num_hidden_layers": 4},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 64},
}


def steps(model: Decoder) -> list[Tensor]:
    """The logits of two prompts, then of steps of single tokens and of short chunks."""
    caches = model.make_caches()
    SlotStorage(caches, 2, 128)
    ids = torch.randint(400, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    plans = [[Span(0, 0, ids[:20], 20), Span(1, 0, ids[20:60], 40)]]
    for at in range(6):
        plans.append([Span(slot, 20 + 20 * slot + at, [ids[at]], 20) for slot in (0, 1)])
    for at in range(26, 42, 4):
        plans.append([Span(0, at, ids[at : at + 4], 20, logits=4)])
    with torch.inference_mode():
        return [model(Batch.prepare(plan, CPU)[0], caches).clone() for plan in plans]


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_that_are_made_again_have_the_logits_of_computed_ones(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, family, **{**SHAPE, **FAMILIES[family]})
    monkeypatch.setattr(replay, "RECORDED_AT", 2)
    again: list[threading.Thread] = []

    class Noted(Step[Tensor]):
        def __call__(self, inputs: Inputs, stored: Any) -> Tensor:
            again.append(threading.current_thread())
            return super().__call__(inputs, stored)

    monkeypatch.setattr(replay, "Step", Noted)

    def run(shard: Shard, recorded: bool) -> list[Tensor]:
        model = load_part(folder, "bf16", shard).model
        assert isinstance(model, Decoder)
        if not recorded:
            model._replay.most_rows = 0
        return steps(model)

    expected = on_ranks(2, lambda shard: run(shard, False))[0]
    assert not again
    found = on_ranks(2, lambda shard: run(shard, True))[0]
    assert len(set(again)) == 2  # both ranks
    assert len(again) == 2 * (4 + 2)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)

"""The context that a config gives: positions, and how its RoPE stretches them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.models.config_fields import Fields
from worker.models.model import Placement
from worker.models.registry import FAMILIES

SHAPE: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
LONGROPE = {"rope_type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16}
QWEN3 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def build(family: str, positions: int, scaling: dict[str, Any] | None, **more: Any) -> Any:
    fields = {**SHAPE, "max_position_embeddings": positions, "rope_scaling": scaling, **more}
    place = Placement(torch.float32, torch.device("meta"))
    return FAMILIES[family](Fields(fields, "config.json"), False, place)


@pytest.mark.parametrize(
    ("family", "positions", "scaling", "context"),
    [
        ("qwen3", 40_960, None, 40_960),
        ("qwen3", 40_960, QWEN3, 131_072),  # the README's block
        ("llama", 4096, {"type": "linear", "factor": 4.0}, 16_384),  # vicuna-7b-v1.5-16k
        ("llama", 4096, {"type": "dynamic", "factor": 2.0}, 8192),
        ("llama", 4096, {"type": "yarn", "factor": 16.0}, 65_536),
        ("llama", 65_536, {"type": "yarn", "original_max_position_embeddings": 4096}, 65_536),
        ("llama", 131_072, LLAMA3, 131_072),
        ("llama", 131_072, {**LONGROPE, "factor": 32.0}, 131_072),
        ("gemma3_text", 131_072, {"rope_type": "linear", "factor": 8.0}, 131_072),
    ],
)
def test_the_context_is_that_of_vllm(
    family: str, positions: int, scaling: dict[str, Any] | None, context: int
) -> None:
    assert build(family, positions, scaling).context_length == context


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_factor_that_stretches_beyond_any_context_is_refused(kind: str) -> None:
    with pytest.raises(JobError, match=r"field 'factor' must be at most 524288, got 1e\+300"):
        build("llama", 4096, {"rope_type": kind, "factor": 1e300})


def test_a_plain_context_may_be_exceeded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path / "tiny", "llama", max_position_embeddings=32)
    with caplog.at_level(logging.WARNING):
        engine = Engine.load(str(path), device="cpu", context=48)
    assert "context 48 exceeds the 32 positions of its config.json" in caplog.text
    (one,) = engine.generate([[5, 6, 7]], Sampling(temperature=0, ignore_eos=True))
    assert len(one.token_ids) == 45


def test_a_stretched_context_is_not_exceeded(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path / "tiny",
        "llama",
        max_position_embeddings=32,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )
    assert Engine.load(str(path), device="cpu", context=128).context_length == 128
    with pytest.raises(JobError, match="context must be 2 to 128 for this model, got 129"):
        Engine.load(str(path), device="cpu", context=129)

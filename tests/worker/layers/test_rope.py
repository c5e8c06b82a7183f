"""Frequencies of every RoPE variant are bit-identical to transformers'."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from worker.layers.rope import Rope
from worker.models.config_fields import Fields, read_rope

LONG = {"long_factor": [1.5 + i for i in range(32)], "short_factor": [1 + i / 9 for i in range(32)]}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32_768},
    "longrope": {**LONG, "factor": 32.0, "original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 1e7])
@pytest.mark.parametrize("kind", VARIANTS)
def test_frequencies_are_those_of_transformers(kind: str, theta: float) -> None:
    transformers: Any = import_module("transformers")
    utilities: Any = import_module("transformers.modeling_rope_utils")
    llama: Any = import_module("transformers.models.llama.modeling_llama")
    shape = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131_072}
    rope = {"rope_type": kind, "rope_theta": theta, **VARIANTS[kind]}
    reference = transformers.LlamaConfig(**shape, rope_parameters=rope)
    if kind == "default":
        expected, factor = llama.LlamaRotaryEmbedding.compute_default_rope_parameters(reference)
    else:
        expected, factor = utilities.ROPE_INIT_FUNCTIONS[kind](reference, device="cpu")
    config = read_rope(Fields({**shape, "rope_parameters": rope}, "config"), 64)
    ours = Rope(config, torch.float32, torch.device("cpu"))
    frequencies = ours._frequencies_for(torch.tensor([1]))[0]
    assert torch.equal(frequencies, expected)
    assert ours._factor == pytest.approx(factor)


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_table_has_the_rotations_that_are_computed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it grows; where the prompt matters there is none."""
    monkeypatch.setattr("worker.layers.rope.LEAST_ROWS", 8)
    shape = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131_072}
    rope = {"rope_type": kind, "rope_theta": 1e4, **VARIANTS[kind]}
    config = read_rope(Fields({**shape, "rope_parameters": rope}, "config"), 64)
    ours = Rope(config, torch.bfloat16, torch.device("cpu"))
    plain = Rope(config, torch.bfloat16, torch.device("cpu"))  # nothing is reserved
    sizes = []
    for positions in ([0, 3], [9, 2, 9], [5000], [4]):
        sizes.append(ours.reserve(max(positions) + 1))
        at, lengths = torch.tensor(positions), torch.full((len(positions),), 7000)
        expected, found = plain(at, lengths), ours(at, lengths)
        assert torch.equal(found.cos, expected.cos) and torch.equal(found.sin, expected.sin)
    assert sizes == ([0] * 4 if kind in ("dynamic", "longrope") else [8, 16, 5001, 5001])

"""Files of every quantised type, as a whole: against the dense model with the values that `gguf`
computes, against llama.cpp (recorded; see record.py), and the error of rounded activations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.worker.gguf.blocks import TYPES, dequantised, make_type_file, make_wide
from tests.worker.gguf.cases import PROMPT
from tests.worker.gguf.record import ANSWERS
from worker import Engine
from worker.gguf.write.model import quantise_model
from worker.kernels import library
from worker.loading.find import find

RECORDED = json.loads(ANSWERS.read_text(encoding="utf-8"))["models"]
# llama.cpp rounds activations to 8 bits, which gives errors of a few per cent; values in another
# order give errors around 1.
LLAMA_CPP = 0.15
# Kind of file → bound of the error of rounded activations in parts of the quantisation's own.
ROUNDED = {"Q4_0": 0.5, "Q4_K_S": 0.5, "Q5_K_S": 0.5, "Q6_K": 0.5, "Q8_0": 1.0}


def logits(path: Path) -> torch.Tensor:
    return Engine.load(str(path), device="cpu", dtype="fp32").prompt_logits(PROMPT)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide(tmp_path_factory.mktemp("wide") / "m")


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_a_file_runs_with_the_values_of_gguf_and_as_in_llama_cpp(
    kind: Type, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_type_file(wide, tmp_path / "it.gguf", kind)
    expected = logits(dequantised(file, wide, tmp_path / "dense.gguf"))
    recorded = RECORDED[f"type {kind.name}"]
    ours = logits(file)
    if recorded is not None:
        theirs = torch.tensor(recorded["logits"])
        assert error(ours[-1, : len(theirs)], theirs) < LLAMA_CPP
    # The kernels round activations, and types that they don't multiply with are re-encoded.
    monkeypatch.setattr(library, "active", lambda: None)
    ours = logits(file)
    assert error(ours, expected) < 1e-3


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounded_activations_cost_less_than_the_quantisation(
    kind: str, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.active() is None:
        pytest.skip("this machine has no kernels")
    file = tmp_path / "it.gguf"
    quantise_model(find(str(wide)), kind, file, lambda done, total: None)
    original, ours = logits(wide), logits(file)
    monkeypatch.setattr(library, "active", lambda: None)
    exact = logits(file)
    rounding, quantisation = error(ours, exact), error(exact, original)
    print(f"{kind}: rounding {rounding:.4f}, quantisation {quantisation:.4f}")
    assert 0 < rounding < ROUNDED[kind] * quantisation

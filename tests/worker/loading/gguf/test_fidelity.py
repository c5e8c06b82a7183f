"""Models in GGUF files against the safetensors that they were made from, and against llama.cpp's
greedy tokens (recorded; see record.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jobs.api.sampling import Sampling
from tests.worker.loading.gguf.cases import COUNT, KINDS, MODELS, PROMPT, make_file, make_model
from tests.worker.loading.gguf.record import ANSWERS
from worker import Engine

RECORDED = json.loads(ANSWERS.read_text(encoding="utf-8"))["models"]
# The factors of llama3's frequencies are rounded to float32 in the file.
ROUNDED = ("llama llama3",)


def load(path: Path) -> Engine:
    return Engine.load(str(path), device="cpu", dtype="fp32")


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", MODELS, ids=lambda name: name.replace(" ", "-"))
def test_the_model_is_that_of_the_safetensors_and_of_llama_cpp(name: str, tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path / "m", name)
    expected = load(checkpoint).prompt_logits(PROMPT)
    greedy = Sampling(temperature=0, max_tokens=COUNT, ignore_eos=True)
    for kind in KINDS:
        engine = load(make_file(checkpoint, tmp_path / f"{kind}.gguf", kind))
        logits, recorded = engine.prompt_logits(PROMPT), RECORDED[f"{name} {kind}"]
        if kind == "F32":
            assert relative(logits, expected) < (1e-5 if name in ROUNDED else 1e-6)
        theirs = torch.tensor(recorded["logits"])
        assert relative(logits[-1, : len(theirs)], theirs) < 1e-2
        assert engine.generate([PROMPT], greedy)[0].token_ids == recorded["tokens"]

"""Models in GGUF files against the safetensors that they were made from, and against llama.cpp's
greedy tokens (recorded; see record.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jobs.api.sampling import Sampling
from tests.worker.gguf.cases import COUNT, KINDS, MODELS, PROMPT, make_file, make_model
from tests.worker.gguf.record import ANSWERS
from worker import Engine

RECORDED = json.loads(ANSWERS.read_text(encoding="utf-8"))["models"]
# Files hold an eps of 1e-5 in float32, and the factors of llama3's frequencies and the decays of
# delta nets in other forms.
ROUNDED = ("gpt_oss", "llama llama3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


def load(path: Path) -> Engine:
    return Engine.load(str(path), device="cpu", dtype="fp32")


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", MODELS, ids=lambda name: name.replace(" ", "-"))
def test_the_model_is_that_of_the_safetensors_and_of_llama_cpp(name: str, tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path / "m", name)
    expected = load(checkpoint).prompt_logits(PROMPT)
    for kind in KINDS:
        engine = load(make_file(checkpoint, tmp_path / f"{kind}.gguf", kind))
        recorded = RECORDED[f"{name} {kind}"]
        theirs, tokens = torch.tensor(recorded["logits"]), recorded["tokens"]
        logits = engine.prompt_logits([*PROMPT, *tokens[:-1]])
        last = logits[len(PROMPT) - 1]
        assert relative(last[: len(theirs)], theirs) < (1e-3 if kind == "F32" else 1e-2)
        if kind == "F32":
            assert relative(logits[: len(PROMPT)], expected) < (1e-5 if name in ROUNDED else 1e-6)
            greedy = Sampling(temperature=0, max_tokens=COUNT, ignore_eos=True)
            assert engine.generate([PROMPT], greedy)[0].token_ids == tokens
            continue
        # llama.cpp rounds activations to float16 as well: a near tie may fall the other way.
        chosen = logits[len(PROMPT) - 1 :].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        best = logits[len(PROMPT) - 1 :].amax(1)
        assert bool((best - chosen <= 1e-3 * best.abs()).all())

"""Token ids, likelihoods and greedy tokens of real files, beside llama.cpp and transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from jobs import Sampling
from tests.real.conftest import COUNT, Real
from tests.real.dequantised import dequantise
from tests.worker.gguf.texts import FIXED
from worker import Engine

pytestmark = pytest.mark.real

LOSS = 0.01  # difference of the mean loss: 1 % of the perplexity
Q8_LOSS = 0.02  # of weights made Q8_0 once more: llama.cpp loses 0.010 with Gemma's file
TIE = 1.0  # difference of two logits that rounding may exchange; the largest are 20 to 40


def mean_loss(logits: torch.Tensor, window: list[int]) -> float:
    targets = torch.tensor(window[1:])
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), targets))


def test_texts_have_the_token_ids_of_llama_cpp(real: Real) -> None:
    ours = [real.engine.tokenizer.encode(text, add_special_tokens=False) for text in FIXED]
    assert ours == real.llama["texts"]


def test_prose_has_the_perplexity_of_llama_cpp(real: Real) -> None:
    (expected,) = real.llama["losses"]
    ours = mean_loss(real.engine.prompt_logits(real.window), real.window)
    assert ours == pytest.approx(expected, abs=LOSS)
    assert math.exp(ours) < 60  # so that equal nonsense does not pass


def test_prose_has_the_perplexity_of_the_dequantised_weights_in_transformers(real: Real) -> None:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        real.path.parent, gguf_file=real.path.name, dtype=torch.float32
    )
    with torch.inference_mode():
        theirs = loaded(torch.tensor([real.window])).logits[0]
    ours = mean_loss(real.engine.prompt_logits(real.window), real.window)
    assert ours == pytest.approx(mean_loss(theirs, real.window), abs=LOSS)


def test_greedy_tokens_are_those_of_llama_cpp_up_to_near_ties(real: Real) -> None:
    """Both round activations, each in its own order: where the two best logits are close, either
    may come first."""
    equal = 0
    for prompt, expected in zip(real.prompts, real.llama["greedy"], strict=True):
        logits = real.engine.prompt_logits([*prompt, *expected[:-1]])[len(prompt) - 1 :]
        best = logits.max(dim=-1).values
        theirs = logits.gather(1, torch.tensor(expected)[:, None])[:, 0]
        assert float((best - theirs).max()) < TIE
        equal += int((logits.argmax(dim=-1) == torch.tensor(expected)).sum())
    assert equal > 0.9 * COUNT * len(real.prompts)


def test_generated_tokens_are_those_that_the_logits_of_the_prompt_name(real: Real) -> None:
    sampling = Sampling(temperature=0, max_tokens=COUNT, ignore_eos=True)
    for found, prompt in zip(
        real.engine.generate(real.prompts, sampling), real.prompts, strict=True
    ):
        logits = real.engine.prompt_logits([*prompt, *found.token_ids[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        assert float((logits.max(dim=-1).values - chosen).max()) < TIE


def test_q8_loses_next_to_nothing_of_dequantised_weights(real: Real, tmp_path: Any) -> None:
    """The file's weights, dequantised to safetensors by transformers, loaded with --quantize q8,
    and quantised back into a GGUF file."""
    from worker.gguf.write.model import quantise_model
    from worker.loading.find import find

    folder = tmp_path / "dequantised"
    loaded = dequantise(real.path, folder)
    window = real.window
    with torch.inference_mode():
        expected = mean_loss(loaded(torch.tensor([window])).logits[0], window)
    quantised = tmp_path / "back-Q8_0.gguf"
    quantise_model(
        find(str(folder), None), "Q8_0", quantised, lambda done, total: None, replace=False
    )
    for engine in (
        Engine.load(str(folder), device="cpu", quantize="q8"),
        Engine.load(str(quantised), device="cpu"),
    ):
        assert mean_loss(engine.prompt_logits(window), window) == pytest.approx(
            expected, abs=Q8_LOSS
        )
        engine.close()

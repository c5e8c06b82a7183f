"""Every family: logits, greedy tokens and scores of the device against those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from tests.gpu.conftest import DEVICE, Load, distance, greatest
from tests.worker.checkpoints import FAMILIES
from tests.worker.models.variants import CASES

# In steps of 16 tokens of the short limits below, prompts take several chunks.
LENGTHS = (150, 11, 23)
LIMITS = (24, 7, 16, 3, 24, 12)  # of six sequences in four slots
ROUNDING = 2.0
# Grouped products read the numbers of rows on the host, but in bf16 on some cards.
MIXTURES = {"gpt_oss", "mixtral", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"}
GROUPED_AT = ((9, 0), (10, 0))  # compute capabilities of these
LEAST = 0.01  # of the distance that roundings make: models with few layers have less on the CPU


def prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize("case", CASES, ids=lambda name: name.replace(" ", "-"))
def test_float32_is_that_of_the_cpu(case: str, checkpoint: Callable[..., Path], load: Load) -> None:
    """Logits within 1e-4, scores within 1e-3, and all greedy tokens, alone and in a batch whose
    sequences end at different times."""
    family, fields = CASES[case]
    path = checkpoint(family, **fields)
    ours, theirs = load(path), load(path, reference=True)
    given = prompts(ours._core.vocab_size)
    for prompt in given:
        assert greatest(ours.prompt_logits(prompt), theirs.prompt_logits(prompt)) < 1e-4
    first = given[0]
    scores = theirs.score(first[:40], first[40:100])
    assert ours.score(first[:40], first[40:100]) == pytest.approx(scores, abs=1e-3)
    options = [Sampling(temperature=0, max_tokens=n, ignore_eos=True) for n in LIMITS]
    batch = [given[i % 3][:100] for i in range(len(LIMITS))]
    expected = [one.token_ids for one in theirs.generate(batch, options)]
    assert [one.token_ids for one in ours.generate(batch, options)] == expected
    (alone,) = ours.generate(batch[:1], options[0])
    assert alone.token_ids == expected[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_small_dtypes_round_as_on_the_cpu(
    family: str, dtype: str, checkpoint: Callable[..., Path], load: Load
) -> None:
    path = checkpoint(family)
    exact = load(path, reference=True)
    rounded = load(path, reference=True, dtype="bf16")
    ours = load(path, dtype=dtype)
    given = prompts(ours._core.vocab_size)
    logits = torch.cat([exact.prompt_logits(prompt) for prompt in given])
    theirs = torch.cat([rounded.prompt_logits(prompt) for prompt in given])
    found = torch.cat([ours.prompt_logits(prompt) for prompt in given])
    assert distance(found, logits) < max(LEAST, ROUNDING * distance(theirs, logits))
    # Decode computes what the prompt does: the greedy token has nearly the greatest logit.
    options = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
    generated = ours.generate([prompt[:20] for prompt in given], options)
    if DEVICE.startswith("cuda"):
        grouped = dtype == "bf16" and torch.cuda.get_device_capability(DEVICE) in GROUPED_AT
        model: Any = ours._core.runner.model
        made = len(model._graphs._graphs)
        assert made > 0 or (family in MIXTURES and not grouped)
    for prompt, one in zip(given, generated, strict=True):
        whole = [*prompt[:20], *one.token_ids]
        after = ours.prompt_logits(whole)[len(prompt[:20]) - 1 : -1]
        chosen = after[torch.arange(len(after)), torch.tensor(one.token_ids)]
        span = float(logits.amax() - logits.amin())
        assert float((after.amax(1) - chosen).max()) < 0.05 * span

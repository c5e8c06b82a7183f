"""The contestants of the generation benchmarks: chatjobs and transformers, on one checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.harness import seconds
from jobs.api.sampling import Sampling
from worker import Engine

DECODED = 32  # tokens whose time `decode_rate` takes

Contestant = Callable[[], float]  # runs once, returns tokens per second
# Seconds to prefill the prompts and to generate a number of tokens for each.
Generate = Callable[[list[list[int]], int], float]


def random_prompts(batch: int, length: int, vocab: int) -> list[list[int]]:
    """The same prompts for all contestants: `batch` lists of `length` token ids."""
    generator = torch.Generator().manual_seed(batch)
    prompts: list[list[int]] = torch.randint(vocab, (batch, length), generator=generator).tolist()
    return prompts


def ours(engine: Engine) -> Generate:
    """chatjobs, greedily."""

    def generate(prompts: list[list[int]], tokens: int) -> float:
        sampling = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
        return seconds(lambda: engine.generate(prompts, sampling))

    return generate


def theirs(model: Any, device: torch.device) -> Generate:
    """transformers' `generate`, greedily."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts, device=device)
        options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens}
        mask = torch.ones_like(ids)
        return seconds(lambda: model.generate(ids, attention_mask=mask, pad_token_id=0, **options))

    return generate


def whole_rate(generate: Generate, prompts: list[list[int]], tokens: int) -> float:
    """Generated tokens per second of the whole call."""
    return len(prompts) * tokens / generate(prompts, tokens)


def decode_rate(generate: Generate, prompts: list[list[int]]) -> float:
    """Decode-only tokens per second: the time of 34 new tokens less the time of two."""
    taken = generate(prompts, 2 + DECODED) - generate(prompts, 2)
    return len(prompts) * DECODED / taken


def prefill_rate(generate: Generate, prompts: list[list[int]]) -> float:
    """Prompt tokens per second of one new token."""
    return sum(map(len, prompts)) / generate(prompts, 1)


def load_reference(path: Path, device: torch.device) -> Any:
    """Load a model folder with transformers, in bf16."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return model.to(device).eval()

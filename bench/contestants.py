"""The contestants of the generation benchmarks: chatjobs and transformers, on one checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.harness import seconds
from jobs.api.sampling import Sampling
from worker import Engine

Contestant = Callable[[], float]  # runs once, returns tokens per second


def random_prompts(batch: int, length: int, vocab: int) -> list[list[int]]:
    """The same prompts for all contestants: `batch` lists of `length` token ids."""
    generator = torch.Generator().manual_seed(batch)
    prompts: list[list[int]] = torch.randint(vocab, (batch, length), generator=generator).tolist()
    return prompts


def chatjobs(engine: Engine, prompts: list[list[int]], tokens: int, counted: int) -> Contestant:
    """Generates `tokens` tokens per prompt, greedily. Tokens per second = `counted` / seconds."""
    sampling = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    return lambda: counted / seconds(lambda: engine.generate(prompts, sampling))


def transformers(
    model: Any, prompts: list[list[int]], tokens: int, counted: int, device: torch.device
) -> Contestant:
    """The same with transformers' `generate`."""
    ids = torch.tensor(prompts, device=device)
    options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens}

    @torch.inference_mode()
    def generate() -> None:
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, pad_token_id=0, **options)

    return lambda: counted / seconds(generate)


def load_reference(path: Path, device: torch.device) -> Any:
    """Load a model folder with transformers, in bf16."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return model.to(device).eval()

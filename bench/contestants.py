"""The two sides of every generation benchmark: our engine and transformers, on the same folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.harness import seconds
from jobs.api.sampling import Sampling
from worker import Engine

Contestant = Callable[[], float]  # runs once, answers tokens per second


def random_prompts(batch: int, length: int, vocab: int) -> list[list[int]]:
    """The same prompts for everybody: [batch] lists of `length` token ids."""
    generator = torch.Generator().manual_seed(batch)
    prompts: list[list[int]] = torch.randint(vocab, (batch, length), generator=generator).tolist()
    return prompts


def chatjobs(engine: Engine, prompts: list[list[int]], tokens: int, counted: int) -> Contestant:
    """Continue the prompts greedily by `tokens`; `counted` tokens make the figure."""
    sampling = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    return lambda: counted / seconds(lambda: engine.generate(prompts, sampling))


def transformers(
    model: Any, prompts: list[list[int]], tokens: int, counted: int, device: torch.device
) -> Contestant:
    """The same by transformers' generate."""
    given = torch.tensor(prompts, device=device)
    fixed = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens}

    @torch.inference_mode()
    def generate() -> None:
        mask = torch.ones_like(given)
        model.generate(given, attention_mask=mask, pad_token_id=0, **fixed)

    return lambda: counted / seconds(generate)


def load_peer(path: Path, device: torch.device) -> Any:
    """The folder's model in transformers, bf16."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return model.to(device).eval()

"""Prefill and decode speed of every family at a mid-size shape, beside transformers.

    python -m bench.families [--device cpu] [--rounds 3] [--family qwen3_next]

Random weights in bf16, about half a billion parameters (mixtures of experts: active parameters).
Prefill: one prompt of 512 tokens, one token generated; prompt tokens per second. Decode: prompts of
16 tokens, 32 tokens generated; generated tokens per second of the whole call.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.contestants import (
    Generate,
    load_reference,
    ours,
    prefill_rate,
    random_prompts,
    theirs,
    whole_rate,
)
from bench.harness import alternate, median, report
from bench.shapes import random_checkpoint
from worker import Engine
from worker.device import choose_device

BASE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 65_536,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 30, "num_experts_per_tok": 6, "moe_intermediate_size": 512}
LINEAR = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen3": BASE,
    "qwen3_moe": {**BASE, **EXPERTS, "norm_topk_prob": True},
    "qwen3_next": {**BASE, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 512},
    "qwen3_5_text": {**BASE, **LINEAR},
    "qwen3_5_moe_text": {**BASE, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 512},
    "gemma3_text": {**BASE, "sliding_window": 512},
}
CELLS = {"prefill 512": (1, 512), "decode 1": (1, 16), "decode 16": (16, 16)}
TOKENS = 32  # generated in the cells of decode


@click.command()
@click.option("--device", default="auto", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--family", "families", multiple=True, type=click.Choice(list(SHAPES)))
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(device: str, rounds: int, families: tuple[str, ...], out: Path | None) -> None:
    """Measure tokens per second of each family: chatjobs and transformers."""
    place = choose_device(device)
    rows: list[dict[str, Any]] = []
    for family in families or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            path = random_checkpoint(Path(folder), family, SHAPES[family])
            engine = Engine.load(str(path), device=str(place), max_batch=16, prefix_cache=False)
            reference = load_reference(path, place)
            contestants: dict[str, Generate] = {
                "chatjobs": ours(engine),
                "transformers": theirs(reference, place),
            }
            for cell, (batch, length) in CELLS.items():
                prompts = random_prompts(batch, length, engine.tokenizer.vocab_size)
                rate = (
                    partial(prefill_rate, prompts=prompts)
                    if cell.startswith("prefill")
                    else partial(whole_rate, prompts=prompts, tokens=TOKENS)
                )
                figures = alternate(
                    {who: partial(rate, one) for who, one in contestants.items()}, rounds
                )
                chatjobs, transformers = (median(values) for values in figures.values())
                rows.append(
                    {
                        "family": family,
                        "cell": cell,
                        "chatjobs tok/s": chatjobs,
                        "transformers tok/s": transformers,
                        "ours / transformers": chatjobs / transformers,
                    }
                )
            del engine, reference, contestants
    report(f"Families, about 0.5 B parameters, bf16, {place}", rows, str(place), out)


if __name__ == "__main__":
    main()

"""Decode and prefill speed of chatjobs, transformers and the floor, on a Qwen3-0.6B shape.

    python -m bench.decode [--device cpu] [--rounds 5]

Random weights in bf16, each contestant continues the same random prompts greedily. Decode-only
tokens per second: prompts of 64 tokens, the time of 34 new tokens less the time of two. The floor
of a step is the time of its matrix products, called one by one from Python, and of reading the keys
and values of 80 positions. Prefill: prompt tokens per second, one prompt of 512 tokens and one new
token. Ratios are medians of the rounds' own ratios.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from bench.contestants import (
    DECODED,
    Contestant,
    Generate,
    decode_rate,
    load_reference,
    ours,
    prefill_rate,
    random_prompts,
    theirs,
)
from bench.harness import alternate, median, report, seconds
from bench.shapes import QWEN3_06B, random_checkpoint
from worker import Engine
from worker.device import choose_device
from worker.layers.linear import LinearFactory

PROMPT, LONG_PROMPT = 64, 512


def floor(device: torch.device, batch: int) -> Contestant:
    """The least work of a decode step of `batch` rows: products and cache reads; DECODED times."""
    shape = QWEN3_06B
    linears = LinearFactory(torch.bfloat16, device)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    layer = [(hidden, q + 2 * kv), (q, hidden), (hidden, 2 * inner), (inner, hidden)]
    sizes = layer * shape["num_hidden_layers"] + [(hidden, shape["vocab_size"])]
    work = []
    for features_in, features_out in sizes:
        linear = linears.column(features_in, features_out)
        linear.weight_slot().load(torch.randn(features_out, features_in, dtype=torch.bfloat16))
        work.append((linear, torch.randn(batch, features_in, dtype=torch.bfloat16, device=device)))
    values = batch * (PROMPT + DECODED // 2) * 2 * kv * shape["num_hidden_layers"]
    cache = torch.ones(values // 4, dtype=torch.int64, device=device)  # the bytes of bf16

    @torch.inference_mode()
    def steps() -> None:
        for _ in range(DECODED):
            cache.sum()
            for linear, x in work:
                linear(x)

    return lambda: batch * DECODED / seconds(steps)


@click.command()
@click.option("--device", default="auto", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--batches", default="1,8,16", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(device: str, rounds: int, batches: str, out: Path | None) -> None:
    """Measure tokens per second per batch size: chatjobs, transformers, the floor."""
    place = choose_device(device)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = random_checkpoint(Path(folder), "qwen3", QWEN3_06B)
        engine = Engine.load(str(path), device=str(place), max_batch=16, prefix_cache=False)
        contestants: dict[str, Generate] = {
            "chatjobs": ours(engine),
            "transformers": theirs(load_reference(path, place), place),
        }
        vocabulary = engine.tokenizer.vocab_size
        for batch in map(int, batches.split(",")):
            prompts = random_prompts(batch, PROMPT, vocabulary)
            able = {who: partial(decode_rate, one, prompts) for who, one in contestants.items()}
            figures = alternate({**able, "floor": floor(place, batch)}, rounds)
            rows.append({"cell": f"decode {batch}", **_row(figures)})
        prompts = random_prompts(1, LONG_PROMPT, vocabulary)
        able = {who: partial(prefill_rate, one, prompts) for who, one in contestants.items()}
        rows.append({"cell": f"prefill 1 x {LONG_PROMPT}", **_row(alternate(able, rounds))})
    report(f"Qwen3-0.6B shape, bf16, tokens/s, {place}", rows, str(place), out)


def _row(figures: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and ratios; without a floor, None in its columns."""
    chatjobs, reference, limits = (
        figures.get(who, []) for who in ("chatjobs", "transformers", "floor")
    )
    return {
        "chatjobs": median(chatjobs),
        "transformers": median(reference),
        "floor": median(limits) if limits else None,
        "ours / transformers": _ratio(chatjobs, reference),
        "ours / floor": _ratio(chatjobs, limits) if limits else None,
    }


def _ratio(ours: list[float], others: list[float]) -> float:
    return median([one / other for one, other in zip(ours, others, strict=True)])


if __name__ == "__main__":
    main()

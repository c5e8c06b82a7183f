"""Decode speed of chatjobs, transformers and the linear layers alone, on a Qwen3-0.6B shape.

    python -m bench.decode [--device cpu] [--rounds 5]

Each contestant continues the same prompts of 64 random tokens greedily. The figure is generated
tokens per second of the whole call, prefill included. "Linears alone" runs only the matrix products
of a decode step, once per token: the floor.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import torch

from bench.contestants import Contestant, chatjobs, load_reference, random_prompts, transformers
from bench.harness import alternate, median, report, seconds
from bench.shapes import QWEN3_06B, random_checkpoint
from worker import Engine
from worker.layers.linear import LinearFactory
from worker.resident.device import choose_device

PROMPT = 64


def linears_alone(device: torch.device, batch: int, tokens: int) -> Contestant:
    """The matrix products of a decode step on `batch` rows, `tokens` times."""
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

    @torch.inference_mode()
    def steps() -> None:
        for _ in range(tokens):
            for linear, x in work:
                linear(x)

    return lambda: batch * tokens / seconds(steps)


@click.command()
@click.option("--device", default="auto", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Tokens generated per sequence.")
@click.option("--batches", default="1,8,16", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(device: str, rounds: int, tokens: int, batches: str, out: Path | None) -> None:
    """Measure tokens per second per batch size: chatjobs, transformers, linears alone."""
    place = choose_device(device)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = random_checkpoint(Path(folder), "qwen3", QWEN3_06B)
        engine = Engine.load(str(path), device=str(place), max_batch=16, prefix_cache=False)
        reference = load_reference(path, place)
        for batch in map(int, batches.split(",")):
            prompts = random_prompts(batch, PROMPT, engine.tokenizer.vocab_size)
            counted = batch * tokens
            figures = alternate(
                {
                    "chatjobs": chatjobs(engine, prompts, tokens, counted),
                    "transformers": transformers(reference, prompts, tokens, counted, place),
                    "linears alone": linears_alone(place, batch, tokens),
                },
                rounds,
            )
            ours, theirs, floor = (median(values) for values in figures.values())
            rows.append(
                {
                    "batch": batch,
                    "chatjobs tok/s": ours,
                    "transformers tok/s": theirs,
                    "linears alone tok/s": floor,
                    "ours / transformers": ours / theirs,
                    "ours / floor": ours / floor,
                }
            )
    title = f"Decode, Qwen3-0.6B shape, bf16, prompt {PROMPT}, {tokens} new tokens, {place}"
    report(title, rows, str(place), out)


if __name__ == "__main__":
    main()

"""Decode speed of a random Qwen3-0.6B shape beside transformers and beside its linears alone.

    python -m bench.decode [--device cpu] [--rounds 5]

Each contestant continues the same prompts of 64 random tokens greedily; the figure is generated
tokens per second of the whole call, prefill included, as a batch job sees it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import torch

from bench.harness import median, report, seconds, turn_about
from bench.shapes import QWEN3_06B, random_checkpoint
from jobs.types import Sampling
from worker import Engine
from worker.engine.device import choose_device
from worker.layers.linear import LinearFactory

PROMPT = 64


def linears_alone(device: torch.device, rows: int) -> Callable[[], object]:
    """One decode step's matrix products, and nothing else: what no engine can beat."""
    shape = QWEN3_06B
    make = LinearFactory(torch.bfloat16, device)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    layer = [(hidden, q + 2 * kv), (q, hidden), (hidden, 2 * inner), (inner, hidden)]
    sizes = layer * shape["num_hidden_layers"] + [(hidden, shape["vocab_size"])]
    work = []
    for features_in, features_out in sizes:
        linear = make(features_in, features_out)
        linear.weight_slot().load(torch.randn(features_out, features_in, dtype=torch.bfloat16))
        work.append((linear, torch.randn(rows, features_in, dtype=torch.bfloat16, device=device)))

    @torch.inference_mode()
    def step() -> None:
        for linear, x in work:
            linear(x)

    return step


@click.command()
@click.option("--device", default="auto", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--tokens", default=32, show_default=True, help="Tokens generated per sequence.")
@click.option("--batches", default="1,8,16", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(device: str, rounds: int, tokens: int, batches: str, out: Path | None) -> None:
    """Tokens per second, batch by batch: chatjobs, transformers, floor."""
    from transformers import AutoModelForCausalLM

    place = choose_device(device)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = random_checkpoint(Path(folder), "qwen3", QWEN3_06B)
        engine = Engine.load(str(path), device=str(place), max_batch=16)
        peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(place).eval()
        for batch in map(int, batches.split(",")):
            generator = torch.Generator().manual_seed(batch)
            vocab = engine.tokenizer.vocab_size
            prompts = torch.randint(vocab, (batch, PROMPT), generator=generator)
            sampling = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
            floor = linears_alone(place, batch)

            def ours() -> float:
                taken = seconds(lambda: engine.generate(prompts.tolist(), sampling))
                return batch * tokens / taken

            @torch.inference_mode()
            def theirs() -> float:
                given = prompts.to(place)
                taken = seconds(
                    lambda: peer.generate(
                        given,
                        attention_mask=torch.ones_like(given),
                        do_sample=False,
                        min_new_tokens=tokens,
                        max_new_tokens=tokens,
                        pad_token_id=0,
                    )
                )
                return batch * tokens / taken

            def alone() -> float:
                return batch * tokens / seconds(lambda: [floor() for _ in range(tokens)])

            found = turn_about(
                {"chatjobs": ours, "transformers": theirs, "linears alone": alone}, rounds
            )
            best = {name: median(figures) for name, figures in found.items()}
            rows.append(
                {
                    "batch": batch,
                    "chatjobs tok/s": best["chatjobs"],
                    "transformers tok/s": best["transformers"],
                    "linears alone tok/s": best["linears alone"],
                    "ours / transformers": best["chatjobs"] / best["transformers"],
                    "ours / floor": best["chatjobs"] / best["linears alone"],
                }
            )
            del floor
    title = f"Decode, Qwen3-0.6B shape, bf16, prompt {PROMPT}, {tokens} new tokens, {place}"
    report(title, rows, str(place), out)


if __name__ == "__main__":
    main()

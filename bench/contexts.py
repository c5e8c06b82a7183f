"""Speed and memory with long contexts, one contestant in memory at a time.

    make bench-peers
    python -m bench.contexts [--format Q8_0] [--cell "4096 x 8"] [--peer OpenVINO] [--rounds 1]

The Qwen3-0.6B shape with random weights; prompts of 1,024 and 4,096 tokens, one and eight at a
time, and one of 16,384. Prefill: prompt tokens per second until all prompts have a first token;
engines that decode some sequences meanwhile spend part of the time on it. Decode: tokens per second
from then on, while all sequences run. Each contestant has a process of its own for each cell, for
half an hour at most; peak RSS has the pages of mapped files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from bench.alone import LIMIT_SECONDS, Run, run_all
from bench.cells import SMALLEST_VOCABULARY
from bench.contestants import random_prompts
from bench.harness import MIB
from bench.models import FORMATS, OURS, SHAPES, Model, checkpoint, peers_of, process
from bench.peers.closed_loop import Request
from bench.peers.process import PeerProcess
from bench.serving import Served

# Prompt tokens and batch. Engines that read 512 tokens in a step decode the first of eight prompts
# of 4,096 for 56 steps before they have read the last.
CELLS = {
    f"{length} x {batch}": (length, batch)
    for length, batch in ((1024, 1), (1024, 8), (4096, 1), (4096, 8), (16_384, 1))
}
TOKENS = 128
FIGURES = ("prefill tokens/s", "decode tokens/s", "peak RSS MiB")
COMPARED = ("llama.cpp", "OpenVINO", "ik_llama.cpp", "vLLM")


def figures(requests: list[Request], served: Served, peak_bytes: int) -> dict[str, Any]:
    """Of one cell."""
    prompts = sum(len(prompt) for prompt, _ in requests)
    found = (prompts / served.prefilled_at(), served.decode_rate(), peak_bytes / MIB)
    return dict(zip(FIGURES, found, strict=True))


def measure(contestant: PeerProcess, length: int, batch: int) -> dict[str, Any]:
    """Start a contestant, warm it up, measure it, and stop it. Raises PeerFailed."""
    with contestant:
        short = random_prompts(batch, 64, SMALLEST_VOCABULARY)
        contestant.serve([(prompt, 4) for prompt in short], batch)
        prompts = random_prompts(batch, length, SMALLEST_VOCABULARY)
        requests = [(prompt, TOKENS) for prompt in prompts]
        return figures(requests, contestant.serve(requests, batch), contestant.peak_bytes())


@click.command()
@click.option("--rounds", default=1, show_default=True)
@click.option("--format", "formats", multiple=True, type=click.Choice(list(FORMATS)))
@click.option("--cell", "cells", multiple=True, type=click.Choice(list(CELLS)))
@click.option("--peer", "peers", multiple=True, type=click.Choice(COMPARED))
@click.option("--folder", type=click.Path(path_type=Path), default=None)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(
    rounds: int,
    formats: tuple[str, ...],
    cells: tuple[str, ...],
    peers: tuple[str, ...],
    folder: Path | None,
    out: Path | None,
) -> None:
    """Measure prefill, decode and memory with long contexts."""

    def runs(source: Path) -> Iterator[Run]:
        for name in formats or FORMATS:
            model = Model(source, name)
            others = peers_of(model, peers or COMPARED, LIMIT_SECONDS)
            contestants = {"chatjobs": process(OURS, model, LIMIT_SECONDS), **others}
            for cell in cells or CELLS:
                for number in range(rounds):
                    for who, contestant in contestants.items():
                        names = {"format": name, "cell": cell, "contestant": who, "round": number}
                        yield Run(names, partial(measure, contestant, *CELLS[cell]))

    title = f"Long contexts, {SHAPES['dense'][2]}, {torch.get_num_threads()} threads"
    with tempfile.TemporaryDirectory() as temporary:
        source = checkpoint(folder or Path(temporary), "dense")
        run_all(title, runs(source), FIGURES, out)


if __name__ == "__main__":
    main()

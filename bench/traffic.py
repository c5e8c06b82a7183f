"""Requests of mixed lengths, 16 at any time: beside OpenVINO GenAI and llama.cpp's server.

    make bench-peers
    python -m bench.traffic [--requests 128] [--at-once 16] [--format Q8_0] [--rounds 1]
                            [--peer OpenVINO] [--folder FOLDER]

The Qwen3-0.6B shape with random weights. The lengths are drawn from lognormal distributions, as
those of public traces of chats are: prompts of 20 to 1,000 tokens (median 150), answers of 10 to
400 (median 110), the same for all contestants. A closed loop: whenever an answer ends, the next
request is submitted. Prompts have nothing in common. The time to the first token begins at submit.
Each contestant runs alone in a process of its own, for half an hour at most, and is stopped before
the next one starts; peak RSS has the pages of mapped files, and the KV cache that an engine
reserves. No HTTP server is between the requests and any of the engines.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from bench.alone import LIMIT_SECONDS, Run, run_all
from bench.cells import SMALLEST_VOCABULARY
from bench.harness import MIB
from bench.models import FORMATS, OURS, SHAPES, Model, checkpoint, peers_of, process
from bench.peers.closed_loop import Request
from bench.peers.process import PeerProcess
from bench.serving import Served, percentile

PROMPTS, ANSWERS = (150, 20, 1000), (110, 10, 400)  # median, shortest, longest
SPREAD = 1.0  # standard deviation of the logarithm of a length
SERVERS = ("OpenVINO", "llama.cpp server", "vLLM")
FIGURES = ("answer tokens/s", "all tokens/s", "first token p50 s", "p95 s", "peak RSS MiB")


def traffic(count: int, seed: int) -> list[Request]:
    """Prompts of random tokens, and lengths of answers."""
    draw = random.Random(seed)

    def length(median: int, shortest: int, longest: int) -> int:
        while not shortest <= (drawn := round(median * draw.lognormvariate(0, SPREAD))) <= longest:
            pass
        return drawn

    return [
        (
            [draw.randrange(SMALLEST_VOCABULARY) for _ in range(length(*PROMPTS))],
            length(*ANSWERS),
        )
        for _ in range(count)
    ]


def figures(requests: list[Request], served: Served, peak_bytes: int) -> dict[str, Any]:
    """Of one run: rates of its whole time, and times to the first token."""
    answers = sum(tokens for _, tokens in requests)
    prompts = sum(len(prompt) for prompt, _ in requests)
    first = served.first_token_seconds()
    found = (
        answers / served.seconds,
        (answers + prompts) / served.seconds,
        percentile(first, 0.5),
        percentile(first, 0.95),
        peak_bytes / MIB,
    )
    return dict(zip(FIGURES, found, strict=True))


def measure(contestant: PeerProcess, count: int, at_once: int, seed: int) -> dict[str, Any]:
    """Start a contestant, warm it up, serve the requests, and stop it. Raises PeerFailed."""
    with contestant:
        contestant.serve(traffic(at_once, seed=-1 - seed), at_once)
        requests = traffic(count, seed)
        served = contestant.serve(requests, at_once)
        return figures(requests, served, contestant.peak_bytes())


@click.command()
@click.option("--requests", "count", default=128, show_default=True)
@click.option("--at-once", default=16, show_default=True)
@click.option("--rounds", default=1, show_default=True)
@click.option("--format", "formats", multiple=True, type=click.Choice(list(FORMATS)))
@click.option("--peer", "peers", multiple=True, type=click.Choice(SERVERS))
@click.option("--folder", type=click.Path(path_type=Path), default=None)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(
    count: int,
    at_once: int,
    rounds: int,
    formats: tuple[str, ...],
    peers: tuple[str, ...],
    folder: Path | None,
    out: Path | None,
) -> None:
    """Measure tokens per second and times to the first token under mixed traffic."""

    def runs(source: Path) -> Iterator[Run]:
        for name in formats or FORMATS:
            model = Model(source, name)
            others = peers_of(model, peers or SERVERS, LIMIT_SECONDS)
            contestants = {"chatjobs": process(OURS, model, LIMIT_SECONDS), **others}
            for number in range(rounds):
                for who, contestant in contestants.items():
                    names = {"format": name, "contestant": who, "round": number}
                    yield Run(names, partial(measure, contestant, count, at_once, number))

    shape = f"{SHAPES['dense'][2]}, {torch.get_num_threads()} threads"
    title = f"{count} requests, {at_once} at any time, {shape}"
    with tempfile.TemporaryDirectory() as temporary:
        source = checkpoint(folder or Path(temporary), "dense")
        run_all(title, runs(source), FIGURES, out)


if __name__ == "__main__":
    main()

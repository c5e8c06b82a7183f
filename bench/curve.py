"""Speed of decoding by batch, and the batches at which it falls: bf16, Q8_0, Q4_K_M.

    python -m bench.curve [--rounds 3] [--format bf16] [--batch 5 --batch 6] [--folder FOLDER]
    python -m bench.curve --file model.gguf     any GGUF file

The Qwen3-0.6B shape with random weights, unless files are given. Decode only, as in bench.gguf:
prompts of 64 tokens, the time of 34 new tokens less the time of two. The batches of a format take
turns. A larger batch should never generate fewer tokens per second than a smaller one: where it
does, another way of computing begins too early or too late.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from bench.cells import PROMPT, SMALLEST_VOCABULARY
from bench.contestants import decode_rate, ours, random_prompts
from bench.harness import alternate, median, report
from bench.models import FORMATS, Model, checkpoint
from worker import Engine

BATCHES = (1, 2, 4, 5, 6, 8, 10, 12, 16, 24, 32)

Curve = Mapping[int, float]  # batch → tokens per second


class Fall(NamedTuple):
    """A batch that generates `ratio` < 1 times the tokens per second of a smaller one."""

    batch: int
    smaller: int
    ratio: float


def falls(curve: Curve) -> list[Fall]:
    """Each batch that is slower than a smaller one, beside the fastest of these."""
    found = []
    for batch in sorted(curve):
        below = [smaller for smaller in curve if smaller < batch]
        best = max(below, key=lambda smaller: curve[smaller], default=batch)
        if curve[batch] < curve[best]:
            found.append(Fall(batch, best, curve[batch] / curve[best]))
    return found


def curve_rows(name: str, curve: Curve) -> list[dict[str, Any]]:
    """A step of a batch generates one token for each of its sequences."""
    return [
        {"format": name, "batch": batch, "tokens/s": rate, "steps/s": rate / batch}
        for batch, rate in curve.items()
    ]


def measure(path: Path, batches: tuple[int, ...], rounds: int) -> dict[int, float]:
    """The median tokens per second of each batch."""
    engine = Engine.load(str(path), max_batch=max(batches), prefix_cache=False)
    generate = ours(engine)
    contestants = {
        f"batch {batch}": partial(
            decode_rate, generate, random_prompts(batch, PROMPT, SMALLEST_VOCABULARY)
        )
        for batch in batches
    }
    rates = alternate(contestants, rounds)
    engine.close()
    return {batch: median(rates[f"batch {batch}"]) for batch in batches}


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--format", "formats", multiple=True, type=click.Choice(list(FORMATS)))
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1))
@click.option("--file", "files", multiple=True, type=click.Path(exists=True, path_type=Path))
@click.option("--folder", type=click.Path(path_type=Path), default=None)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(
    rounds: int,
    formats: tuple[str, ...],
    batches: tuple[int, ...],
    files: tuple[Path, ...],
    folder: Path | None,
    out: Path | None,
) -> None:
    """Measure decoded tokens per second by batch."""
    rows: list[dict[str, Any]] = []
    sentences: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        models = [(file.name, file) for file in files]
        if not files:
            source = checkpoint(folder or Path(temporary), "dense")
            models = [(name, Model(source, name).ours) for name in formats or FORMATS]
        for name, path in models:
            curve = measure(path, batches or BATCHES, rounds)
            rows += curve_rows(name, curve)
            sentences += [
                f"{name}: batch {fall.batch} generates {fall.ratio:.2f} times the tokens/s "
                f"of batch {fall.smaller}"
                for fall in falls(curve)
            ]
    title = "Decoding by batch" if files else "Decoding by batch, Qwen3-0.6B shape"
    report(f"{title}, {torch.get_num_threads()} threads", rows, "cpu", out)
    print("\n".join(sentences) or "No batch generates fewer tokens/s than a smaller one.")


if __name__ == "__main__":
    main()

"""A decode step of one model on one rank with all cores, and on several with a part of them each.

    python -m bench.parallel [--ranks 2] [--batches 1,16] [--rounds 5] [--model FOLDER]

Without a model, one of the Qwen3-0.6B shape with random weights is made. The time of a step is that
of long answers without that of short ones, in alternating rounds; the bytes are those that all
ranks give to others in a decode step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from torch import Tensor

from bench.harness import median, report, seconds
from bench.models import checkpoint
from jobs.api.sampling import Sampling
from worker import Engine

SHORT, LONG, PROMPT = 4, 20, 64  # tokens


@click.command()
@click.option("--ranks", default=2, show_default=True)
@click.option("--batches", default="1,16", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--model", default=None, metavar="FOLDER")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(ranks: int, batches: str, rounds: int, model: str | None, out: Path | None) -> None:
    """Measure the steps of one rank and of several."""
    with tempfile.TemporaryDirectory() as folder:
        reference = model or str(checkpoint(Path(folder), "dense"))
        one = Engine.load(reference, device="cpu", max_batch=64)
        split = Engine.load(reference, device="cpu", max_batch=64, tensor_parallel=ranks)
        try:
            rows = [
                _row(one, split, ranks, batch, rounds) for batch in map(int, batches.split(","))
            ]
        finally:
            split.close()
    report(f"decode step, one rank and {ranks}", rows, "cpu", out)


def _row(one: Engine, split: Engine, ranks: int, batch: int, rounds: int) -> dict[str, Any]:
    times: dict[int, list[float]] = {1: [], ranks: []}
    for _ in range(rounds):
        for count, engine in ((1, one), (ranks, split)):
            times[count].append(_step(engine, batch))
    ours, others = median(times[1]), median(times[ranks])
    return {
        "batch": batch,
        "ms, 1 rank": 1000 * ours,
        f"ms, {ranks} ranks": 1000 * others,
        "ratio": others / ours,
        "bytes": _bytes(split, ranks, batch),
    }


def _step(engine: Engine, batch: int) -> float:
    short, long = (seconds(partial(_generate, engine, batch, n)) for n in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


def _generate(engine: Engine, batch: int, tokens: int) -> None:
    sampling = Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine.generate([[100 + row, *range(10, 9 + PROMPT)] for row in range(batch)], sampling)


def _bytes(engine: Engine, ranks: int, batch: int) -> int:
    """Of a decode step: what a longer answer takes beyond a shorter one. No step is made again, so
    that each exchange is called from here. The tensors of an exchange have one shape on all
    ranks."""
    group = engine._core.runner.ranks
    assert group is not None
    exchange: Any = group.shard.exchange
    given = 0

    def counting(method: Callable[[Tensor], Tensor], givers: int) -> Callable[[Tensor], Tensor]:
        def count(x: Tensor) -> Tensor:
            nonlocal given
            given += givers * x.nbytes
            return method(x)

        return count

    found = []
    model: Any = engine._core.loaded.model
    replay = model._replay
    most, replay.most_rows = replay.most_rows, 0
    givers = {"sum": ranks, "first": 1, "gather": ranks - 1}
    for name, count in givers.items():
        setattr(exchange, name, counting(getattr(exchange, name), count))
    for tokens in (SHORT, LONG):
        given = 0
        _generate(engine, batch, tokens)
        found.append(given)
    for name in givers:
        delattr(exchange, name)
    replay.most_rows = most
    return (found[1] - found[0]) // (LONG - SHORT)


if __name__ == "__main__":
    main()

"""Log-likelihoods of many short rows, in-process and by `chatjobs run` through the queue.

    python -m bench.score_queue [--rows 10000] [--rounds 3]

Each row has about 30 tokens: a prompt and one continuation, with the demo model and a batch of 16.
In-process: scoring requests of as many items as the largest jobs have, on the engine. Queue: the
whole command, from its start to the audit, with one worker process on a private Redis. Rows per
second, in alternating rounds, each with rows of its own: no state of earlier ones is reused.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from bench.harness import alternate, report_queue, seconds, wait_for_worker
from jobs import Client
from jobs.api.score_request import ScoreRequest
from jobs.embedded import EmbeddedRedis
from jobs.runs.packs import LIMITS
from worker import Engine
from worker.local.collect import CollectingSink
from worker.processes.tuning import freeze_gc_heap
from worker.scoring.generation import start_scoring

COMMAND = str(Path(sys.executable).with_name("chatjobs"))
TOKENS = 30
WORDS = ["the", "dog", "sleeps", "near", "a", "river", "while", "seven", "birds", "count", "stones"]
LOADING_SECONDS = 120.0


def make_rows(engine: Engine, count: int, seed: int) -> list[dict[str, Any]]:
    draw, rows = random.Random(seed), []
    for _ in range(count):
        words: list[str] = []
        while len(engine.tokenizer.encode(" ".join(words))) < TOKENS - 3:
            words.append(draw.choice(WORDS))
        rows.append({"prompt": " ".join(words), "continuations": [f" {draw.choice(WORDS)}"]})
    return rows


def score(engine: Engine, rows: list[dict[str, Any]]) -> None:
    """All rows, as soon as the engine takes them."""
    for begin in range(0, len(rows), LIMITS.items):
        items = [{"type": "loglikelihood", **row} for row in rows[begin : begin + LIMITS.items]]
        sink = CollectingSink()
        for _ in start_scoring(engine._core, ScoreRequest(model="demo", items=items), sink):
            pass  # each item
        while sink.outcome is None and engine.step():
            pass


@click.command()
@click.option("--rows", "count", default=10_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--max-batch", default=16, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(count: int, rounds: int, max_batch: int, out: Path | None) -> None:
    """Measure rows per second in-process and through the queue."""
    engine = Engine.load("demo", max_batch=max_batch)
    made = [make_rows(engine, count, seed) for seed in range(rounds + 1)]  # one warms up
    freeze_gc_heap()  # as in a worker
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        places = ["--redis", server.url, "--results", folder]
        words = [COMMAND, "work", "--model", "demo", "--max-batch", str(max_batch), "-q", *places]
        worker = subprocess.Popen(words)
        try:
            wait_for_worker(Client(server.url), worker, LOADING_SECONDS)
            ours, queued = iter(made), iter(enumerate(made))

            def in_process() -> float:
                rows = next(ours)
                return count / seconds(lambda: score(engine, rows))

            def through_queue() -> float:
                number, rows = next(queued)
                data = Path(folder, f"{number}.jsonl")
                data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
                run = ["run", str(data), "-m", "demo", "--run", f"r{number}", "-q", *places]
                command = [COMMAND, *run, "--mode", "loglikelihood"]
                return count / seconds(lambda: subprocess.run(command, check=True))

            figures = alternate({"in-process": in_process, "queue": through_queue}, rounds)
        finally:
            worker.terminate()
            worker.wait()
    report_queue(
        "Log-likelihoods of 30 tokens", count, max_batch, figures, str(engine.info.device), out
    )


if __name__ == "__main__":
    main()

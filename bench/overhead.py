"""What the queue costs: the demo rows in-process, and through queue, streams and Parquet.

    python -m bench.overhead [--rounds 5]

(a) `Engine.generate` on the rendered prompts. (b) one worker process on a private Redis: from the
first submit until the last row is in a Parquet file, every token stream published. Rows per second
of both, turn about.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.harness import median, report, seconds, turn_about
from jobs import ChatRequest, Client, Results, Sampling
from jobs.cli.jsonl import Overrides, read_requests
from jobs.embedded import EmbeddedRedis
from worker import Engine
from worker.demo import DATASET

SECONDS = 120.0  # that long a round may take


def requests() -> list[ChatRequest]:
    """The demo data set, greedy."""
    with DATASET.open("rb") as file:
        rows, _ = read_requests(file, Overrides(model="demo", run="demo"))
    return [row.request.model_copy(update={"temperature": 0.0}) for row in rows]


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--max-batch", default=16, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(rounds: int, device: str, max_batch: int, out: Path | None) -> None:
    """Rows per second in-process and through the queue."""
    asked = requests()
    engine = Engine.load("demo", device=device, max_batch=max_batch)
    prompts = [engine.prompt_ids(request) for request in asked]
    sampling = Sampling(temperature=0)
    count = 0

    def direct() -> float:
        return len(asked) / seconds(lambda: engine.generate(prompts, sampling))

    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        client, results = Client(server.url), Results(folder)
        worker = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("chatjobs")), "work", "--model", "demo", "-q"),
                *("--redis", server.url, "--results", folder),
                *("--device", device, "--max-batch", str(max_batch)),
            ]
        )
        try:
            warm = ChatRequest(model="demo", messages=[{"role": "user", "content": "Hello!"}])
            client.submit(warm).result(timeout=SECONDS)

            def queued() -> float:
                nonlocal count
                count += 1
                run = f"round-{count}"
                options = [one.job.model_copy(update={"run": run, "id": None}) for one in asked]
                batch = [
                    one.model_copy(update={"job": job, "stream": True})
                    for one, job in zip(asked, options, strict=True)
                ]
                start = time.perf_counter()
                client.submit_many(batch)[-1].result(timeout=SECONDS)
                while time.perf_counter() - start < SECONDS:
                    there = results.dataset(run).count_rows() if run in results.runs() else 0
                    if there == len(asked):
                        return len(asked) / (time.perf_counter() - start)
                    time.sleep(0.02)
                raise click.ClickException(f"{run} did not end within {SECONDS} s")

            found = turn_about({"in-process": direct, "queue": queued}, rounds)
        finally:
            worker.terminate()
            worker.wait()
    best = {name: median(figures) for name, figures in found.items()}
    row = {
        "rows": len(asked),
        "batch": max_batch,
        "in-process rows/s": best["in-process"],
        "queue rows/s": best["queue"],
        "queue / in-process": best["queue"] / best["in-process"],
    }
    report("500 demo rows, in-process and through the queue", [row], str(engine.info.device), out)


if __name__ == "__main__":
    main()

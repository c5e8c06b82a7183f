"""Overhead of the queue: the demo rows in-process, and through queue, streams and Parquet.

    python -m bench.overhead [--rounds 5]

In-process: `Engine.generate` on the rendered prompts. Queue: one worker process on a private Redis,
from the first submit until the last row is in a Parquet file, with every token stream published.
Rows per second, in alternating rounds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.demo import demo_requests
from bench.harness import alternate, report_queue, seconds, wait_for_worker
from jobs import ChatRequest, Client, Results, Sampling
from jobs.embedded import EmbeddedRedis
from worker import Engine
from worker.processes.tuning import freeze_gc_heap

SECONDS = 120.0  # time limit of a round


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--max-batch", default=16, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(rounds: int, device: str, max_batch: int, out: Path | None) -> None:
    """Measure rows per second in-process and through the queue."""
    requests = demo_requests()
    engine = Engine.load("demo", device=device, max_batch=max_batch)
    prompts = [engine.prompt_ids(request) for request in requests]
    sampling = Sampling(temperature=0)
    freeze_gc_heap()  # as in a worker; the client shares this process
    count = 0

    def in_process() -> float:
        return len(requests) / seconds(lambda: engine.generate(prompts, sampling))

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
            wait_for_worker(client, worker, SECONDS)
            warm_up = ChatRequest(model="demo", messages=[{"role": "user", "content": "Hello!"}])
            client.submit(warm_up).result(timeout=SECONDS)

            def queued() -> float:
                nonlocal count
                count += 1
                run = f"round-{count}"
                batch = []
                for request in requests:
                    job = request.job.model_copy(update={"run": run, "id": None})
                    batch.append(request.model_copy(update={"job": job, "stream": True}))
                start = time.perf_counter()
                client.wait_for_rows(client.submit_many(batch), timeout=SECONDS)
                taken = time.perf_counter() - start
                written = results.dataset(run).count_rows()
                if written != len(requests):
                    raise click.ClickException(f"{run} has {written} rows of {len(requests)}")
                return len(requests) / taken

            figures = alternate({"in-process": in_process, "queue": queued}, rounds)
        finally:
            worker.terminate()
            worker.wait()
    report_queue(
        "500 demo rows, in-process and through the queue",
        len(requests),
        max_batch,
        figures,
        str(engine.info.device),
        out,
    )


if __name__ == "__main__":
    main()

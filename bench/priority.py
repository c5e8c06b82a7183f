"""Wait of interactive jobs behind bulk jobs that fill the batch.

    python -m bench.priority [--jobs 20] [--setting="--no-preempt"]...

One worker process with the demo model on a private Redis. Bulk jobs fill its batch and its queue;
then interactive jobs are submitted one after the other. Seconds from submit to the first token
and to the end, alone and behind bulk jobs, and the tokens per second meanwhile, for each setting of
`chatjobs work`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click

from bench.harness import report, wait_for_worker
from jobs import ChatRequest, Client
from jobs.embedded import EmbeddedRedis
from worker.device import choose_device

SECONDS = 120.0  # time limit of a job
SETTINGS = ("", "--no-preempt", "--no-preempt --interactive-slots 0")
BULK_JOBS, BULK_TOKENS = 400, 200
CHAT_TOKENS = 16


@click.command()
@click.option("--jobs", default=20, show_default=True, help="Interactive jobs per setting.")
@click.option("--device", default="auto", show_default=True)
@click.option("--max-batch", default=16, show_default=True)
@click.option("--setting", "settings", multiple=True, default=SETTINGS, help="Worker options.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(
    jobs: int, device: str, max_batch: int, settings: tuple[str, ...], out: Path | None
) -> None:
    """Measure the wait of interactive jobs behind bulk jobs."""
    rows: list[dict[str, Any]] = []
    for setting in settings:
        options = ["--device", device, "--max-batch", str(max_batch), *shlex.split(setting)]
        with served(options) as client:
            alone = [wait_of(client) for _ in range(jobs)]
            bulk = client.submit_many(
                request(f"Tell a story, number {n}.", BULK_TOKENS, "bulk") for n in range(BULK_JOBS)
            )
            time.sleep(2.0)  # the batch is full
            tokens, started = tokens_of(client), time.monotonic()
            behind = [wait_of(client) for _ in range(jobs)]
            speed = (tokens_of(client) - tokens) / (time.monotonic() - started)
            for job in bulk:
                job.cancel()
        rows.append(
            {
                "options": setting or "default",
                **summary("alone", alone),
                **summary("behind bulk", behind),
                "tokens/s": speed,
            }
        )
    report(
        "Seconds of interactive jobs, alone and behind bulk jobs",
        rows,
        str(choose_device(device)),
        out,
    )


@contextmanager
def served(options: list[str]) -> Iterator[Client]:
    """A client of a worker that has answered once."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        command = [str(Path(sys.executable).with_name("chatjobs")), "work", "--model", "demo", "-q"]
        worker = subprocess.Popen(
            [*command, "--redis", server.url, "--results", folder, "--grace", "0", *options]
        )
        client = Client(server.url)
        try:
            wait_for_worker(client, worker, SECONDS)
            client.submit(request("Hello!", CHAT_TOKENS, "interactive")).result(timeout=SECONDS)
            yield client
        finally:
            client.close()
            worker.terminate()
            worker.wait(timeout=60)


def request(text: str, tokens: int, priority: Any) -> ChatRequest:
    return ChatRequest(
        model="demo",
        messages=[{"role": "user", "content": text}],
        max_tokens=tokens,
        ignore_eos=True,
        job={"priority": priority},
    )


def wait_of(client: Client) -> tuple[float, float]:
    """Seconds to the first token and to the end of one interactive job."""
    started = time.monotonic()
    job = client.submit(request("What is 2+3?", CHAT_TOKENS, "interactive"))
    first = 0.0
    for chunk in job.stream():
        deltas = [choice.delta for choice in chunk.choices]
        if not first and any(delta.content or delta.reasoning_content for delta in deltas):
            first = time.monotonic() - started
    return first, time.monotonic() - started


def tokens_of(client: Client) -> int:
    from jobs.store.worker_status import read_workers

    time.sleep(4.5)  # workers publish three times per lease of 12 s
    return sum(worker["tokens"] for worker in read_workers(client.redis))


def summary(name: str, waits: list[tuple[float, float]]) -> dict[str, float]:
    firsts, ends = zip(*waits, strict=True)
    return {
        f"{name}: first token": median(firsts),
        f"{name}: p95": quantiles(firsts, n=20)[-1],
        f"{name}: end": median(ends),
    }


if __name__ == "__main__":
    main()

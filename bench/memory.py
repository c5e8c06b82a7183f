"""Memory of a worker process: while loading, at rest, and at rest after jobs.

    python -m bench.memory [--device cpu]

One worker serves a Qwen3-0.6B shape with random weights in bf16 and runs one job; another serves
the demo model and runs the 500 jobs of the demo. The figures are the resident set of the process
(VmRSS and VmHWM), including pages of the mapped weight files.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.demo import demo_requests
from bench.harness import MIB, report, resident_bytes, wait_for_worker
from bench.shapes import QWEN3_06B, random_checkpoint
from jobs import ChatRequest, Client
from jobs.embedded import EmbeddedRedis
from worker.demo import MODEL_DIR

SECONDS = 300.0  # time limit of each step
REST = 5.0  # seconds of idle time before a measurement


def measure(model: str, requests: list[ChatRequest], device: str) -> dict[str, int]:
    """Resident bytes of a worker: peak while loading, at rest, and at rest after the requests."""
    with tempfile.TemporaryDirectory() as results, EmbeddedRedis() as server:
        worker = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("chatjobs")), "work", "--model", model),
                *("--redis", server.url, "--results", results, "--device", device, "-q"),
            ]
        )
        try:
            with Client(server.url) as client:
                wait_for_worker(client, worker, SECONDS)
                time.sleep(REST)
                rest = resident_bytes(worker.pid)
                for job in client.submit_many(requests):
                    job.result(timeout=SECONDS)
                time.sleep(REST)
                after = resident_bytes(worker.pid)
        finally:
            worker.terminate()
            worker.wait()
    return {"peak": rest["VmHWM"], "rest": rest["VmRSS"], "after": after["VmRSS"]}


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(device: str, out: Path | None) -> None:
    """Measure the resident memory of a worker with a large model and with the demo model."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = random_checkpoint(Path(folder) / "shape", "qwen3", QWEN3_06B)
        hi = ChatRequest(
            model=str(path), messages=[{"role": "user", "content": "Hi"}], max_tokens=8
        )
        for model, weights, requests in (
            (str(path), path, [hi]),
            ("demo", MODEL_DIR, demo_requests()),
        ):
            size = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
            figures = measure(model, requests, device)
            rows.append(
                {
                    "model": "demo" if model == "demo" else "Qwen3-0.6B shape",
                    "weights MiB": size / MIB,
                    "peak while loading MiB": figures["peak"] / MIB,
                    "at rest MiB": figures["rest"] / MIB,
                    "jobs": len(requests),
                    "at rest after them MiB": figures["after"] / MIB,
                    "beyond the weights MiB": (figures["after"] - size) / MIB,
                }
            )
    report("Worker memory, bf16", rows, device, out)


if __name__ == "__main__":
    main()

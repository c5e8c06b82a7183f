"""Memory of a worker process: while it loads, at rest, and at rest after work.

    python -m bench.memory [--device cpu]

A worker serves a random Qwen3-0.6B shape in bf16 on a private Redis and answers one job; another
serves the demo model and answers the demo's 500. The figures are the process's resident set (the
kernel's VmRSS and VmHWM), pages of the mapped weight files included.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.harness import report
from bench.overhead import requests
from bench.shapes import QWEN3_06B, random_checkpoint
from jobs import ChatRequest, Client
from jobs.cli.status import workers
from jobs.embedded import EmbeddedRedis
from worker.demo import MODEL_DIR

MIB = 2**20
SECONDS = 300.0
REST = 5.0  # seconds that a worker has to settle


def resident(pid: int) -> dict[str, int]:
    """VmRSS and VmHWM of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    pairs = (line.split() for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in pairs}


def measure(model: str, asked: list[ChatRequest], device: str) -> dict[str, int]:
    """Resident bytes of a worker of `model`: peak while loading, at rest, and after requests."""
    with tempfile.TemporaryDirectory() as results, EmbeddedRedis() as server:
        worker = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("chatjobs")), "work", "--model", model),
                *("--redis", server.url, "--results", results, "--device", device, "-q"),
            ]
        )
        try:
            with Client(server.url) as client:
                deadline = time.monotonic() + SECONDS
                while not workers(client.redis) and time.monotonic() < deadline:
                    time.sleep(0.2)
                time.sleep(REST)
                rest = resident(worker.pid)
                for job in client.submit_many(asked):
                    job.result(timeout=SECONDS)
                time.sleep(REST)
                after = resident(worker.pid)
        finally:
            worker.terminate()
            worker.wait()
    return {"peak": rest["VmHWM"], "rest": rest["VmRSS"], "after": after["VmRSS"]}


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(device: str, out: Path | None) -> None:
    """Resident memory of a worker, with a large model and with a small one that works hard."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = random_checkpoint(Path(folder) / "shape", "qwen3", QWEN3_06B)
        hi = ChatRequest(
            model=str(path), messages=[{"role": "user", "content": "Hi"}], max_tokens=8
        )
        for model, weights, asked in (
            (str(path), path, [hi]),
            ("demo", MODEL_DIR, requests()),
        ):
            size = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
            found = measure(model, asked, device)
            rows.append(
                {
                    "model": "demo" if model == "demo" else "Qwen3-0.6B shape",
                    "weights MiB": size / MIB,
                    "peak while loading MiB": found["peak"] / MIB,
                    "at rest MiB": found["rest"] / MIB,
                    "jobs": len(asked),
                    "at rest after them MiB": found["after"] / MIB,
                    "beyond the weights MiB": (found["after"] - size) / MIB,
                }
            )
    report("Worker memory, bf16", rows, device, out)


if __name__ == "__main__":
    main()

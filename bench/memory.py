"""Memory of a worker process: while it loads, and at rest beside the bytes of its weights.

    python -m bench.memory [--device cpu]

A worker serves a random Qwen3-0.6B shape in bf16 on a private Redis; the figures are the process's
resident set (the kernel's VmRSS and VmHWM), pages of the mapped weight files included.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.harness import report
from bench.shapes import QWEN3_06B, random_checkpoint
from jobs import ChatRequest, Client
from jobs.cli.status import workers
from worker.embedded import EmbeddedRedis

MIB = 2**20
SECONDS = 300.0


def resident(pid: int) -> dict[str, int]:
    """VmRSS and VmHWM of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    pairs = (line.split() for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in pairs}


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(device: str, out: Path | None) -> None:
    """Resident memory of a worker at rest and at its peak while loading."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as server:
        path = random_checkpoint(Path(folder) / "shape", "qwen3", QWEN3_06B)
        weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        worker = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("chatjobs")), "work", "--model", str(path)),
                *("--redis", server.url, "--results", folder, "--device", device, "-q"),
            ]
        )
        try:
            with Client(server.url) as client:
                deadline = time.monotonic() + SECONDS
                while not workers(client.redis) and time.monotonic() < deadline:
                    time.sleep(0.2)
                time.sleep(2)
                rest = resident(worker.pid)
                ask = ChatRequest(
                    model="shape", messages=[{"role": "user", "content": "Hi"}], max_tokens=8
                )
                client.submit(ask).result(timeout=SECONDS)
                time.sleep(2)
                after = resident(worker.pid)
        finally:
            worker.terminate()
            worker.wait()
    row = {
        "weights MiB": weights / MIB,
        "peak while loading MiB": rest["VmHWM"] / MIB,
        "at rest MiB": rest["VmRSS"] / MIB,
        "at rest after a job MiB": after["VmRSS"] / MIB,
        "beyond the weights MiB": (after["VmRSS"] - weights) / MIB,
    }
    report("Worker memory, Qwen3-0.6B shape, bf16", [row], device, out)


if __name__ == "__main__":
    main()

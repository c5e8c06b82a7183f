"""The memory of a worker whose two models do not fit together, from outside, and its loads.

    python -m bench.residency_memory MODEL MODEL --memory 2GiB [--jobs 400] [--host-memory 2GiB]

Jobs of the models alternate. Memory is the sum of Pss (pages of mapped files included, shared ones
in part) of the worker and its helper processes, above what they took before the first load. The
first load of a model and those after it are printed as the worker's log has them, with the median
of the later ones beside the first: with --host-memory, that is a swap back.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from jobs import ChatRequest, Client
from jobs.embedded import EmbeddedRedis
from jobs.store.worker_status import read_workers
from worker.memory_amount import MemoryAmount

COMMAND = str(Path(sys.executable).with_name("chatjobs"))
SAMPLE_SECONDS = 0.05
REPORT_SECONDS = 5.0  # a worker's status is not older
START_SECONDS = 300.0
LOADED = re.compile(r"loaded (\S+) in ([\d.]+) s\b")


def pss(pid: int) -> int:
    """The bytes of a process and its children."""
    total = 0
    for process in (pid, *_children(pid)):
        with suppress(OSError):
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            found = re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)
            total += int(found[1]) * 1024 if found else 0
    return total


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


class Peak:
    """The largest memory of a process while this is entered."""

    def __init__(self, pid: int) -> None:
        self.nbytes, self._pid = 0, pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.nbytes = max(self.nbytes, pss(self._pid))


def config(options: argparse.Namespace) -> str:
    entries = [
        f"[[models]]\nmodel = {json.dumps(model)}\npreload = false\nmax_batch = 8\ncontext = 512"
        for model in options.models
    ]
    general = [f'memory = "{options.memory}"', f"max_wait = {options.max_wait}"]
    if options.host_memory is not None:
        general.append(f'host_memory = "{options.host_memory}"')
    return "\n".join([*general, *entries])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs=2, metavar="MODEL")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--host-memory")
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--max-wait", type=float, default=10.0)
    options = parser.parse_args()
    budget = MemoryAmount.parse(options.memory).nbytes
    if budget is None:
        parser.error("--memory is a size here")
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(port=0) as server:
        file, log = Path(folder) / "worker.toml", Path(folder) / "log"
        file.write_text(config(options))
        words = ["work", "--config", str(file), "--redis", server.url, "--device", "cpu"]
        command = [COMMAND, *words, "--results", f"{folder}/results"]
        with log.open("w") as stderr, Client(server.url) as client:
            worker = subprocess.Popen(command, stderr=stderr)
            try:
                wait_for(client, worker, log)
                run(client, worker.pid, options, budget)
            finally:
                worker.terminate()
                worker.wait()
        seconds: dict[str, list[str]] = {}
        for name, taken in LOADED.findall(log.read_text()):
            seconds.setdefault(name, []).append(taken)
        for name, loads in seconds.items():
            print(f"{name}: first load {loads[0]} s; later ones {', '.join(loads[1:]) or 'none'}")
            if later := [float(one) for one in loads[1:]]:
                print(f"{name}: swap back / first load {median(later) / float(loads[0]):.2f}")


def wait_for(client: Client, worker: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the worker serves; ends the process with its log if it does not."""
    deadline = time.monotonic() + START_SECONDS
    while not read_workers(client.redis):
        if worker.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the worker has not started:\n{log.read_text()}")
        time.sleep(0.1)


def run(client: Client, pid: int, options: argparse.Namespace, budget: int) -> None:
    client.serving = None
    names, before = options.models, pss(pid)
    with Peak(pid) as peak:
        begin = time.monotonic()
        jobs = [
            client.submit(
                ChatRequest(
                    model=names[number % 2],
                    messages=[{"role": "user", "content": f"Count to {number}."}],
                    max_tokens=8,
                )
            )
            for number in range(options.jobs)
        ]
        for job in jobs:
            job.result(timeout=3600)
        seconds = time.monotonic() - begin
    time.sleep(REPORT_SECONDS)
    (worker,) = read_workers(client.redis)
    mib = 2**20
    print(
        f"{len(jobs)} jobs in {seconds:.1f} s, {worker['loads']} loads, {worker['evictions']} "
        f"unloads; before the first load {before / mib:.0f} MiB, peak above it "
        f"{(peak.nbytes - before) / mib:.0f} MiB, budget {budget / mib:.0f} MiB"
    )


if __name__ == "__main__":
    main()

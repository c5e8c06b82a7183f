"""Measures the load of a large fleet on Redis: 200 workers of 192 jobs each, and 10,000 runs.

    python -m bench.fleet [--workers 200] [--batch 192] [--runs 10000]

The workers are those of `chatjobs work`, 50 in a process, without an engine: their jobs end when
the benchmark says so. Redis's own CPU time (INFO) is measured while the workers are idle, while all
of them are full, for jobs from submit to settlement, and while every run has a row that waits.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import redis

from bench.fleet_workers import Orders, serve_many
from jobs import Client, keys
from jobs.embedded import EmbeddedRedis
from jobs.store.rq_layout import registry_key, wip_key

MODELS = 8
PER_PROCESS = 50
CHUNKS = 20  # entries in the stream of an interactive job
REST_SECONDS = 10.0  # in which a phase is measured while nothing happens
PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Spent:
    """The work of Redis in some seconds. `calls`: commands, with those of scripts."""

    seconds: float
    cpu: float
    commands: int
    calls: int

    def since(self, before: Spent) -> Spent:
        return Spent(
            self.seconds - before.seconds,
            self.cpu - before.cpu,
            self.commands - before.commands,
            self.calls - before.calls,
        )

    @property
    def cores(self) -> float:
        return self.cpu / self.seconds


class Meter:
    """Measures from one reading to the next."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._before = self._now()

    def read(self) -> Spent:
        """Since the last reading."""
        before, self._before = self._before, self._now()
        return self._before.since(before)

    def _now(self) -> Spent:
        cpu, calls = self._server.info("cpu"), self._server.info("commandstats")
        return Spent(
            seconds=time.monotonic(),
            cpu=cpu["used_cpu_user"] + cpu["used_cpu_sys"],
            commands=self._server.info("stats")["total_commands_processed"],
            calls=sum(one["calls"] for one in calls.values()),
        )


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise click.ClickException(f"{what}: not after {PATIENCE:g} s")
        time.sleep(0.1)


def requests(
    name: str, count: int, models: int, runs: int = 1, priority: str = "bulk"
) -> Iterable[Any]:
    """`count` requests, in runs `name`-0, `name`-1, …"""
    for number in range(count):
        yield {
            "model": f"m{number % models}",
            "messages": [{"role": "user", "content": f"What is {number} + {number}?" + " x" * 100}],
            "job": {
                "run": f"{name}-{number % runs}",
                "row": number // runs,
                "priority": priority,
            },
        }


class Fleet:
    """The measurement, phase by phase. `figures`: by name, as text."""

    def __init__(self, url: str, workers: int, batch: int, runs: int, orders: Orders) -> None:
        self._server: Any = redis.Redis.from_url(url)
        self._client = Client(url)
        self._workers, self._held, self._runs = workers, workers * batch, runs
        self._models = min(MODELS, workers)
        self._orders = orders
        self.figures: dict[str, str] = {}
        found = self._server.info("server")
        self.version = found.get("valkey_version") or found["redis_version"]

    def measure(self) -> None:
        wait_until(lambda: self._server.zcard(keys.WORKERS) == self._workers, "all workers serve")
        time.sleep(5.0)
        idle = self._rest()
        self._note("idle: % of a core, per worker", 100 * idle.cores / self._workers)
        self._note("idle: commands/s, per worker", idle.commands / idle.seconds / self._workers)
        empty = int(self._server.info("memory")["used_memory"])
        self._fill()
        self._end()
        self._write("bulk-0")
        used = int(self._server.info("memory")["used_memory"]) - empty
        self._note("ended bulk job: bytes in Redis", used / self._held)
        self._stream()
        self._write("chat-0")
        self._wait_for_runs()

    def _fill(self) -> None:
        meter = Meter(self._server)
        self._client.submit_many(requests("bulk", self._held, self._models))
        wait_until(lambda: self._started() == self._held, "all jobs are started")
        filled = meter.read()
        self._note("submit and claim: µs of CPU per job", 1e6 * filled.cpu / self._held)
        time.sleep(5.0)
        full = self._rest()
        self._note("full workers: % of a core, all", 100 * full.cores)
        self._note("full workers: commands/s, each", full.commands / full.seconds / self._workers)

    def _end(self) -> None:
        meter = Meter(self._server)
        self._orders.release.set()
        wait_until(lambda: self._started() == 0, "all jobs have ended")
        self._note("settle: µs of CPU per job", 1e6 * meter.read().cpu / self._held)

    def _stream(self) -> None:
        count = self._held // 8
        meter = Meter(self._server)
        self._client.submit_many(requests("chat", count, self._models, priority="interactive"))
        self._wait_for_ends(count, "chat")
        name = f"interactive job, {CHUNKS} chunks: µs of CPU per job"
        self._note(name, 1e6 * meter.read().cpu / count)

    def _wait_for_runs(self) -> None:
        """One row in each run, which waits for its part: no file is written."""
        self._client.submit_many(requests("many", self._runs, self._models, self._runs))
        self._wait_for_ends(self._held + self._runs, "bulk")
        time.sleep(5.0)
        waiting = self._rest()
        self._note(f"{self._runs} runs with rows: % of a core, all workers", 100 * waiting.cores)
        self._note(f"{self._runs} runs with rows: calls/s, all", waiting.calls / waiting.seconds)

    def _rest(self) -> Spent:
        """The cost of idle workers."""
        meter = Meter(self._server)
        time.sleep(REST_SECONDS)
        return meter.read()

    def _queues(self, kind: str) -> list[str]:
        make = keys.bulk_queue if kind == "bulk" else keys.chat_queue
        return [make(f"m{number}") for number in range(self._models)]

    def _started(self) -> int:
        wips = [wip_key(queue) for queue in self._queues("bulk")]
        return sum(self._server.zcard(wip) for wip in wips)

    def _wait_for_ends(self, count: int, kind: str) -> None:
        registries = [registry_key(queue, "finished") for queue in self._queues(kind)]
        done = lambda: sum(self._server.zcard(one) for one in registries) == count  # noqa: E731
        wait_until(done, f"{count} {kind} jobs have ended")

    def _write(self, run: str) -> None:
        """Have the rows of a run written, so that Redis holds no more of them."""
        self._server.sadd(keys.WANTED, run)
        wait_until(lambda: not self._server.exists(keys.outbox(run)), f"{run} is written")

    def _note(self, name: str, value: float) -> None:
        self.figures[name] = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        print(f"  {name}: {self.figures[name]}", file=sys.stderr, flush=True)


@click.command()
@click.option("--workers", default=200, show_default=True)
@click.option("--batch", default=192, show_default=True, help="Jobs that a worker runs at a time.")
@click.option("--runs", default=10_000, show_default=True)
def main(workers: int, batch: int, runs: int) -> None:
    """Measure the CPU time, commands and memory of Redis that a fleet takes."""
    context = multiprocessing.get_context("spawn")
    orders = Orders(release=context.Event(), stop=context.Event())
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(append_only=True) as server:
        names = [f"m{number % MODELS}" for number in range(workers)]
        groups = [names[at : at + PER_PROCESS] for at in range(0, workers, PER_PROCESS)]
        processes = [
            context.Process(
                target=serve_many, args=(group, batch, server.url, Path(folder), orders)
            )
            for group in groups
        ]
        for process in processes:
            process.start()
        try:
            fleet = Fleet(server.url, workers, batch, runs, orders)
            fleet.measure()
        finally:
            orders.stop.set()
            for process in processes:
                process.join(10.0)
                process.kill()
    print(f"{workers} workers, {batch} jobs each, {MODELS} models, Redis {fleet.version}")
    for name, figure in fleet.figures.items():
        print(f"{name}: {figure}")


if __name__ == "__main__":
    main()

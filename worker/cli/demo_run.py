"""`chatjobs demo`: the whole way of 500 jobs and a live one, with the model that ships here.

A private Redis, a worker process of its own, bulk jobs, their rows in Parquet, a table made from
those rows, and one answer as it is generated. A worker that dies is replaced, as an operator would.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
import pyarrow as pa
import pyarrow.compute as pc
from rich import box, progress
from rich.console import Console
from rich.table import Table

from jobs import ChatRequest, Client, Results
from jobs.child import ChildProcess
from jobs.cli import answer, lines
from jobs.cli.failures import Infrastructure
from jobs.cli.status import queues, workers
from jobs.embedded import EmbeddedRedis
from jobs.results.files import SAMPLES
from worker.demo import DATASET

MODEL = "demo"
QUESTION = "What is 17 + 25?"
TICK_SECONDS = 0.1
PLAIN_LINE_SECONDS = 2.0
STOP_SECONDS = 20.0
STALL_SECONDS = 120.0
MAX_WORKERS = 10  # that many don't die by chance


def run(count: int, run_id: str, folder: Path) -> None:
    """Run the first `count` questions as run `run_id` and show what came of it."""
    requests = _requests(count, run_id)
    if run_id in Results(folder).runs():
        raise click.UsageError(f"run {run_id} is in {folder} already: give another --run")
    with EmbeddedRedis() as server, Client(server.url) as client:
        client.submit_many(requests)
        click.echo(f"{count} jobs are in the queue of run {run_id}", err=True)
        with WorkerProcess(server.url, folder) as worker:
            _wait_until_ready(client, worker)
            table = _wait_for_rows(client, worker, Results(folder), run_id, count)
            _show_scores(table)
            _show_speed(table, folder / run_id)
            _ask(client)


def _alive(client: Client, worker: WorkerProcess) -> list[dict[str, Any]]:
    """What the worker says about itself; nothing while it loads its model."""
    return [one for one in workers(client.redis) if one["pid"] == worker.pid]


def _wait_until_ready(client: Client, worker: WorkerProcess) -> None:
    while not (ready := _alive(client, worker)):
        worker.check()
        time.sleep(TICK_SECONDS)
    click.echo(f"worker {ready[0]['name']} serves {MODEL} on {ready[0]['device']}", err=True)


def _wait_for_rows(
    client: Client, worker: WorkerProcess, results: Results, run_id: str, count: int
) -> pa.Table:
    """The run's rows, once all of them are in Parquet."""
    best, deadline = 0, time.monotonic() + STALL_SECONDS
    with Progress(count) as shown:
        while True:
            worker.check()
            ended = count - sum(
                queue["queued"] + queue["running"] for queue in queues(client.redis)
            )
            shown.show(ended, sum(one["tokens_per_second"] for one in _alive(client, worker)))
            if ended == count and run_id in results.runs():
                table = results.table(run=run_id)
                if table.num_rows >= count:
                    return table
            if ended > best:
                best, deadline = ended, time.monotonic() + STALL_SECONDS
            if time.monotonic() > deadline:
                raise Infrastructure(f"{ended} of {count} rows, and no more for {STALL_SECONDS} s")
            time.sleep(TICK_SECONDS)


def _requests(count: int, run_id: str) -> list[ChatRequest]:
    with DATASET.open("rb") as file:
        found, bad = lines.read(file, lines.Defaults(model=MODEL, run=run_id))
    if bad:
        raise click.UsageError(str(bad[0]))
    return [row.request.model_copy(update={"temperature": 0.0}) for row in found[:count]]


class WorkerProcess:
    """A `chatjobs work` child process on the demo's Redis; `check` replaces it if it was killed."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self._command = [
            _chatjobs(),
            *("work", "--model", MODEL, "--redis", redis_url, "--results", str(folder), "--quiet"),
        ]
        self._started = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.stop(STOP_SECONDS)

    def check(self) -> None:
        """Start a new worker if the last one was killed. Raises if it exited by itself."""
        code = self._child.poll()
        if code is None:
            return
        if code >= 0 or self._started >= MAX_WORKERS:
            raise Infrastructure(f"the worker ended with exit code {code}; its output is above")
        name = signal.Signals(-code).name
        click.echo(f"the worker was killed ({name}): starting another one", err=True)
        self._child.stop(STOP_SECONDS)
        self._start()

    def _start(self) -> None:
        self._child = ChildProcess(self._command)
        self._started += 1
        click.echo(f"worker: process {self._child.pid}", err=True)


class Progress:
    """How far the run is: a bar on a terminal, else a plain line now and then; on stderr."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._console = Console(stderr=True)
        self._bar = progress.Progress(
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("rows{task.fields[speed]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, speed="")
        self._started = self._said = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done: int, tokens_per_second: float) -> None:
        speed = f", {tokens_per_second:,.0f} tokens/s" if tokens_per_second else ""
        self._bar.update(self._task, completed=done, speed=speed)
        now = time.monotonic()
        if self._console.is_terminal or not done or now - self._said < PLAIN_LINE_SECONDS:
            return
        self._said = now
        left = (self._total - done) * (now - self._started) / done
        click.echo(f"{done}/{self._total} rows{speed}, {left:.0f} s to go", err=True)


def _chatjobs() -> str:
    """The command of this environment, on PATH or not."""
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which("chatjobs", path=places)
    if found is None:
        raise Infrastructure("the command chatjobs isn't installed: pip install 'chatjobs[worker]'")
    return found


def _show_scores(table: pa.Table) -> None:
    """Accuracy by task: the answer is exactly the target."""
    by_task: dict[str, list[bool]] = {}
    for row in table.select(["metadata", "text", "target"]).to_pylist():
        task = json.loads(row["metadata"])["task"]
        by_task.setdefault(task, []).append((row["text"] or "").strip() == row["target"])
    shown = Table("task", box=box.SIMPLE)
    for name in ("rows", "right", "accuracy"):
        shown.add_column(name, justify="right")
    for task, right in sorted(by_task.items()):
        shown.add_row(task, *_score(right))
    shown.add_section()
    shown.add_row("all", *_score([is_right for right in by_task.values() for is_right in right]))
    Console().print(shown)


def _show_speed(table: pa.Table, folder: Path) -> None:
    """What the rows say about the time they took, and where they are."""
    tokens = pc.sum(table.column("output_tokens")).as_py()
    started = pc.min(table.column("started_at")).as_py()
    seconds = (pc.max(table.column("finished_at")).as_py() - started).total_seconds()
    files = len(list((folder / SAMPLES).glob("*.parquet")))
    click.echo(f"{tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s")
    click.echo(f"{table.num_rows} rows in {files} files: {folder / SAMPLES}\n")


def _score(right: list[bool]) -> tuple[str, str, str]:
    return str(len(right)), str(sum(right)), f"{sum(right) / len(right):.1%}"


def _ask(client: Client) -> None:
    """One question that somebody waits for, answered live."""
    click.echo(f"> {QUESTION}")
    job = client.submit(
        ChatRequest(model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0)
    )
    answer.show(job.stream())

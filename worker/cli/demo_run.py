"""The demo: bulk jobs and one streamed job on a private Redis, with the bundled model.

A child process runs the worker; it is replaced if it is killed, as a supervisor would do.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

from jobs import ChatRequest, Client, JobError, Results
from jobs.cli.failures import Unavailable
from jobs.cli.output import echo, print_json
from jobs.cli.printing import print_stream
from jobs.cli.progress import RowProgress
from jobs.cli.requests import InvalidLine, Overrides, read_requests
from jobs.cli.row_files import json_rows
from jobs.embedded import EmbeddedRedis
from jobs.sizes import counted
from jobs.store.backlog import recording_faults
from jobs.store.connection.protocol import run_sync
from jobs.store.part_plans import want_rows
from jobs.store.queue_depths import read_queues
from jobs.store.worker_status import read_workers
from worker.cli.demo_report import print_report, report_of
from worker.cli.demo_worker import WorkerProcess
from worker.cli.options import refusal
from worker.cli.private_redis import ends_with
from worker.demo import DATASET

MODEL = "demo"
QUESTION = "What is 17 + 25?"
PROGRESS_POLL_SECONDS = 0.1
DEMO_STALL_SECONDS = 120.0  # the demo fails after this long without a finished job


def run_demo(
    count: int, run_id: str, folder: Path, kind: str | None = None, *, as_json: bool = False
) -> None:
    """Run the first `count` questions as run `run_id`, print the results, stream one answer. With
    `kind`, the model is quantised first. With `as_json`, the results alone are printed."""
    name = MODEL if kind is None else f"{MODEL}-{kind}"
    requests = demo_requests(count, run_id, name)
    results = Results(folder)
    if run_id in results.runs():
        raise click.UsageError(f"run {run_id} already exists in {folder}: choose another --run")
    with (
        _model(name, kind) as model,
        EmbeddedRedis() as server,
        ends_with(server, _lost),
        Client(server.url) as client,
    ):
        client.serving = None  # its worker starts after the jobs are enqueued
        client.submit_many(requests)
        echo(f"{counted(count, 'job')} enqueued for run {run_id}", err=True)
        with WorkerProcess(model, server.url, folder) as worker:
            _wait_until_ready(client, worker, name)
            table = _wait_for_rows(client, worker, results, run_id, count)
            report = report_of(table, folder / run_id)
            if as_json:
                print_json({"run": run_id, **report.facts()})
            else:
                print_report(report)
                _stream_answer(client, name)


def _lost(how: str) -> str:
    return (
        f"the demo's private Redis has ended ({how}), and the answers that it held are lost: run "
        "the demo again"
    )


def demo_requests(count: int = 500, run_id: str = "demo", model: str = MODEL) -> list[ChatRequest]:
    """The first `count` rows of the demo data set as greedy requests."""
    options = Overrides(model=model, run=run_id, fields={"temperature": 0})
    requests = []
    with DATASET.open("rb") as file:
        for line in islice(read_requests(json_rows(file), options), count):
            if isinstance(line, InvalidLine):
                raise line.error
            requests.append(line.request)
    return requests


@contextmanager
def _model(name: str, kind: str | None) -> Iterator[str]:
    """The model that the worker loads: the bundled one, or a file that is made from it."""
    if kind is None:
        yield MODEL
        return
    from worker.gguf.write.model import quantise_model
    from worker.loading.find import find

    with tempfile.TemporaryDirectory(prefix="chatjobs-demo-") as temporary:
        file = Path(temporary) / f"{name}.gguf"
        try:
            written = quantise_model(find(MODEL), kind, file, lambda done, total: None)
        except JobError as error:
            raise refusal(error) from None
        bits = 8 * written.bytes / written.parameters
        echo(f"{file.name}: {bits:.1f} bits per weight", err=True)
        yield str(file)


def _wait_until_ready(client: Client, worker: WorkerProcess, model: str) -> None:
    while not (ready := _status(client, worker)):
        worker.check()
        time.sleep(PROGRESS_POLL_SECONDS)
    echo(f"worker {ready[0]['name']} serves {model} on {ready[0]['device']}", err=True)


def _wait_for_rows(
    client: Client, worker: WorkerProcess, results: Results, run_id: str, count: int
) -> pa.Table:
    """Return the run's rows, once all of them are in Parquet."""
    best, deadline = 0, time.monotonic() + DEMO_STALL_SECONDS
    with RowProgress(count) as progress:
        while True:
            worker.check()
            ended = count - sum(
                queue["queued"] + queue["running"] for queue in read_queues(client.redis)
            )
            speed = sum(status["tokens_per_second"] for status in _status(client, worker))
            progress.update(ended, speed)
            if ended == count:
                # The worker writes the last rows now.
                run_sync(want_rows(run_id), client.connection)
                faults = recording_faults(_status(client, worker))
                if faults:
                    raise Unavailable(
                        "the answers are lost with the demo's private Redis, because their rows "
                        f"can't be written: {'; '.join(faults.values())}; run the demo again when "
                        "they can, or with another --results DIR"
                    )
            if ended == count and run_id in results.runs():
                table = results.table(run=run_id)
                if table.num_rows >= count:
                    return table
            if ended > best:
                best, deadline = ended, time.monotonic() + DEMO_STALL_SECONDS
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"stalled: {ended} of {counted(count, 'job')} ended, none in the last "
                    f"{DEMO_STALL_SECONDS:g} s"
                )
            time.sleep(PROGRESS_POLL_SECONDS)


def _status(client: Client, worker: WorkerProcess) -> list[dict[str, Any]]:
    """Return the worker's published status; empty while it loads its model."""
    return [status for status in read_workers(client.redis) if status["pid"] == worker.pid]


def _stream_answer(client: Client, model: str) -> None:
    echo(f"> {QUESTION}")
    job = client.submit(
        ChatRequest(model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0)
    )
    print_stream(job.stream())

"""The demo: a run of a data set, its scores, and one streamed job, on a private Redis.

The run and the scores are made as `chatjobs run` and `chatjobs score` make them. A child process
runs the worker; it is replaced if it is killed, as a supervisor would do.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from jobs import ChatRequest, Client, JobError, Results
from jobs.cli.failures import Unavailable
from jobs.cli.output import echo, print_json
from jobs.cli.printing import print_stream
from jobs.cli.progress import RunProgress
from jobs.data_sets.data_set import DataSet
from jobs.data_sets.requests import Overrides
from jobs.embedded import EmbeddedRedis
from jobs.runs.audit import Audit
from jobs.runs.data_set_run import DataSetRun
from jobs.runs.producer import Progress
from jobs.scores.process import Limits
from jobs.scores.scoring import score_run
from jobs.scores.spec import parse_spec
from jobs.sizes import counted
from jobs.store.backlog import recording_faults
from jobs.store.producer_lease import Holder
from jobs.store.worker_status import WorkerStatus, read_workers
from worker.cli.demo_report import print_report, report_of
from worker.cli.demo_worker import WorkerProcess
from worker.cli.options import refusal
from worker.cli.private_redis import ends_with
from worker.demo import DATASET

MODEL = "demo"
METRIC = parse_spec("exact")
QUESTION = "What is 17 + 25?"
START_POLL_SECONDS = 0.1
DEMO_STALL_SECONDS = 120.0  # the demo fails after this long without a finished job


def run_demo(
    count: int, run_id: str, folder: Path, kind: str | None = None, *, as_json: bool = False
) -> None:
    """Run the first `count` questions as run `run_id`, score and print the results, stream one
    answer. With `kind`, the model is quantised first. With `as_json`, the results alone are
    printed."""
    name = MODEL if kind is None else f"{MODEL}-{kind}"
    results = Results(folder)
    if run_id in results.runs():
        raise click.UsageError(f"run {run_id} already exists in {folder}: choose another --run")
    with (
        _model(name, kind) as model,
        EmbeddedRedis() as server,
        Client(server.url) as client,
        WorkerProcess(model, server.url, folder) as worker,
        ends_with(server, _lost, worker.kill),
    ):
        _wait_until_ready(client, worker, name)
        found = _answer(client, worker, results, run_id, name, count)
        if not as_json:
            echo(f"{run_id}: {found}\n")
        score_run(results, run_id, METRIC, Limits(), processes=1)
        report = report_of(results, run_id, METRIC)
        if as_json:
            print_json({"run": run_id, **report.facts(), "audit": found.to_dict()})
        else:
            print_report(report)
            _stream_answer(client, name)


def _lost(how: str) -> str:
    return (
        f"the demo's private Redis has ended ({how}), and the answers that it held are lost: run "
        "the demo again"
    )


def questions(count: int = 500, run_id: str = "demo", model: str = MODEL) -> DataSet:
    """The first `count` rows of the demo data set as greedy requests. Closes its file as a
    context."""
    overrides = Overrides(model, run_id, fields={"temperature": 0}, own_ids=True)
    return DataSet([DATASET], overrides, limit=count)


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
        time.sleep(START_POLL_SECONDS)
    echo(f"worker {ready[0]['name']} serves {model} on {ready[0]['device']}", err=True)


def _answer(
    client: Client, worker: WorkerProcess, results: Results, run_id: str, model: str, count: int
) -> Audit:
    """Return when each row is in Parquet."""
    with questions(count, run_id, model) as source, RunProgress(quiet=False) as progress:
        content, _ = source.content()
        configuration = source.configuration(content)
        run = DataSetRun(
            client.redis, results, run_id, source, configuration, window=count, expected=count
        )
        found = run.execute(_Watcher(client, worker, progress, count))
    assert isinstance(found, Audit)  # the watcher stops nothing
    return found


class _Watcher:
    """Shows the progress, replaces a worker that was killed, and raises Unavailable if the demo can
    have no end."""

    def __init__(
        self, client: Client, worker: WorkerProcess, progress: RunProgress, count: int
    ) -> None:
        self._client, self._worker = client, worker
        self._progress, self._count = progress, count
        self._done, self._deadline = -1, 0.0

    def update(self, progress: Progress) -> bool:
        self._worker.check()
        self._progress.update(progress.done, self._count, progress.tokens, progress.failed)
        if progress.unwritten:
            self._check_files()
        if progress.done != self._done:
            self._done, self._deadline = progress.done, time.monotonic() + DEMO_STALL_SECONDS
        if time.monotonic() > self._deadline:
            raise Unavailable(
                f"stalled: {progress.done} of {counted(self._count, 'job')} ended, none in the "
                f"last {DEMO_STALL_SECONDS:g} s"
            )
        return True

    def waits_for(self, holder: Holder) -> None:
        """Nobody else knows this Redis."""

    def _check_files(self) -> None:
        faults = recording_faults(_status(self._client, self._worker))
        if faults:
            raise Unavailable(
                "the answers are lost with the demo's private Redis, because their rows can't be "
                f"written: {'; '.join(faults.values())}; run the demo again when they can, or with "
                "another --results DIR"
            )


def _status(client: Client, worker: WorkerProcess) -> list[WorkerStatus]:
    """Return the worker's published status; empty while it loads its model."""
    return [status for status in read_workers(client.redis) if status.get("pid") == worker.pid]


def _stream_answer(client: Client, model: str) -> None:
    echo(f"> {QUESTION}")
    job = client.submit(
        ChatRequest(model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0)
    )
    print_stream(job.stream())

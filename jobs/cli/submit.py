"""`chatjobs submit`: enqueue the requests in a file; print the job ids, or wait for the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

import click

from jobs.cli.failures import Failure, Interrupted, WrongInput
from jobs.cli.field_options import fields_option
from jobs.cli.map_option import map_option
from jobs.cli.options import Seconds, check_run, client, json_option, quiet_option, redis_option
from jobs.cli.output import echo, print_json
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs import Client, JobError
    from jobs.cli.outcomes import Submitted
    from jobs.data_sets.requests import InvalidLine, Overrides, RequestLine
    from jobs.data_sets.row_files import RowFile

MAX_REPORTED = 20  # different errors
MAX_NUMBERS = 5  # rows that are named for an error
MAX_COLUMNS = 20  # that are named for a wrong --map
REQUESTS_AT_ONCE = 500  # requests in memory at once
CHUNK_BYTES = 8 * 2**20  # and their size as JSON


class _Places:
    """The rows that have the same error."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self.count = 0

    def add(self, number: int) -> None:
        self.count += 1
        if len(self._first) < MAX_NUMBERS:
            self._first.append(number)

    def describe(self, unit: str, total: int) -> str:
        """Return "line 2", "lines 2 and 5" or "all 20 lines"."""
        if self.count == 1:
            return f"{unit} {self._first[0]}"
        if self.count == total:
            return f"all {total} {unit}s"
        more = self.count - len(self._first)
        *named, last = [*map(str, self._first), *([f"{more} more"] if more else [])]
        return f"{unit}s {', '.join(named)} and {last}"


class _Errors:
    """The errors of rows; each of them once, however many rows have it."""

    def __init__(self) -> None:
        self._places: dict[str, _Places] = {}
        self.count = 0  # of rows

    def add(self, line: InvalidLine) -> None:
        self.count += 1
        if line.sentence in self._places or len(self._places) < MAX_REPORTED:
            self._places.setdefault(line.sentence, _Places()).add(line.number)

    def lines(self, rows: RowFile, total: int) -> list[str]:
        """One line per error, with its rows. `total`: rows of the file."""
        found = [
            f"{rows.name}: {places.describe(rows.unit, total)}: {sentence}"
            for sentence, places in self._places.items()
        ]
        others = self.count - sum(places.count for places in self._places.values())
        return [*found, f"… and {others} more"] if others else found


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option(
    "-m", "--model", metavar="M", help="Model of all requests, instead of the model in each line."
)
@click.option(
    "--run",
    metavar="ID",
    callback=check_run,
    help="Run of all requests; their default priority is then bulk.",
)
@click.option(
    "--priority",
    type=click.Choice(["interactive", "bulk"]),
    help="Priority of all requests. [default: bulk with --run, else interactive]",
)
@click.option("--tenant", metavar="T", help="Tenant of all requests: tenants take turns.")
@click.option(
    "--delay", type=Seconds(min=0), metavar="S", help="Seconds until the requests are queued."
)
@fields_option(
    {
        "model": "--model",
        "messages": "FILE",
        "job": "--run, --priority, --tenant, --delay and FILE",
        **{f"job.{name}": f"--{name}" for name in ("run", "priority", "tenant", "delay")},
        "priority": "--priority",
    }
)
@click.option(
    "--keep",
    multiple=True,
    metavar="COLUMN",
    help="Unknown column to keep: it is written to the metadata of the results; repeatable, '*' "
    "keeps all.",
)
@map_option
@click.option(
    "--wait",
    is_flag=True,
    help="Wait for the answers and print them as a table; with a run, wait for its rows as well.",
)
@click.option(
    "--durable",
    is_flag=True,
    help="Return when the jobs are on the disk of Redis and on its replicas.",
)
@json_option
@quiet_option
@redis_option
def submit(
    file: IO[bytes],
    model: str | None,
    run: str | None,
    priority: str | None,
    tenant: str | None,
    delay: float | None,
    fields: dict[str, Any],
    keep: tuple[str, ...],
    names: dict[str, str],
    wait: bool,
    durable: bool,
    as_json: bool,
    quiet: bool,
    redis_url: str,
) -> None:
    """Enqueue the requests in FILE and print the job ids.

    FILE is .csv, .tsv, Parquet or else JSONL, one object per line, plain or compressed with gzip or
    zstd; - is JSONL or Parquet on stdin. A row is a chat request, or has messages, prompt or text
    (and optionally custom_id, target and task), or is a line of an OpenAI batch file. If any row is
    invalid, or its custom_id, id or row is taken, nothing is enqueued. The same file may be sent
    again: a custom_id identifies its row.

    With --wait: exit code 1 if a job failed; jobs of a run are waited for until their rows are in
    Parquet. With --json: one object per job, with --wait including
    its completion or error.
    """
    from jobs.data_sets.requests import Overrides
    from jobs.data_sets.row_files import RowFile
    from jobs.errors import InvalidRequest
    from jobs.results.outbox import DEFAULT_RUN
    from jobs.store.durable import DurableSubmit

    name = getattr(file, "name", "<stdin>")
    try:
        rows = click.get_current_context().with_resource(RowFile(file, name, names))
    except InvalidRequest as error:
        raise WrongInput(f"{name}: {error.message}") from None
    overrides = Overrides(model, run, priority, fields, keep, tenant, delay, names)
    count = _check(rows, overrides)
    with client(redis_url, quiet=quiet) as connected:
        last = ""
        waiting = DurableSubmit(connected.redis) if durable else None
        if wait or quiet:
            connected.serving = None  # with --wait, the notice says it
        submitted: list[Submitted] = []  # with --wait
        done = existed = ended = 0
        runs: set[str] = set()
        try:
            _check_taken(connected, rows, overrides)
            for one in _submit_rows(connected, rows, overrides, count):
                done += 1
                existed += one.existed_before
                if one.ended_before:
                    ended += 1
                    runs.add(one.run)
                last = one.job.id
                if wait:
                    submitted.append(one)
                else:
                    _print_id(one, rows.unit, as_json)
        except BaseException as error:
            for one in submitted:  # nobody will wait for them
                _print_id(one, rows.unit, as_json)
            if not isinstance(error, KeyboardInterrupt):
                raise
            are = "is enqueued and goes on" if done == 1 else "are enqueued and go on"
            raise Interrupted(f"interrupted; {done} of {counted(count, 'job')} {are}") from None
        if waiting is not None:
            waiting.wait([last])
        if not quiet:
            on_disk = " and on disk" if durable else ""
            before = f"; {counted(existed, 'job')} existed before" if existed else ""
            before += _done_before(ended, runs) if ended else ""
            new = counted(count - existed - ended, "job")
            echo(f"{new} enqueued{on_disk}{before}", err=True)
        if wait:
            failed = _wait(connected, submitted, rows.unit, as_json, quiet)
            # Rows without a run are in the run `default`, which goes on.
            named = {one.run for one in submitted if one.run != DEFAULT_RUN or run == DEFAULT_RUN}
            _wait_for_rows(connected, sorted(named), quiet)
            if failed is not None:
                raise failed


def _print_id(one: Submitted, unit: str, as_json: bool) -> None:
    if as_json:
        print_json(one.facts(unit))
    else:
        echo(one.job.id)


def _done_before(count: int, runs: set[str]) -> str:
    where = f"run {min(runs)}" if len(runs) == 1 else "the results"
    were, rows = ("was", "its row is") if count == 1 else ("were", "their rows are")
    return f"; {count} {were} done before: {rows} in {where}"


def _check(rows: RowFile, overrides: Overrides) -> int:
    """Return the number of requests in the file. Raises WrongInput, which names the first invalid
    rows."""
    from jobs.data_sets.requests import KEEP_ALL, InvalidLine, read_requests
    from jobs.errors import InvalidRequest

    valid = 0
    errors = _Errors()
    absent = set(overrides.keep) - {KEEP_ALL}
    try:
        for line in read_requests(rows, overrides, rows.unit, rows.part):
            if isinstance(line, InvalidLine):
                errors.add(line)
                continue
            valid += 1
            absent -= (line.request.metadata or {}).keys()
    except InvalidRequest as error:
        raise WrongInput(f"{rows.name}: {error.message}") from None
    unmapped = [name for name in overrides.names if name not in rows.columns]
    if unmapped and rows.columns:
        raise _without_column(rows, unmapped[0])
    if errors.count:
        raise _invalid_rows(rows, errors, valid + errors.count)
    if not valid:
        raise WrongInput(f"{rows.name} contains no rows")
    if absent:
        raise WrongInput(
            f"{rows.name}: no row has a value in the column {min(absent)!r} to keep; nothing was "
            "enqueued"
        )
    return valid


def _without_column(rows: RowFile, name: str) -> WrongInput:
    found = list(rows.columns)
    named = [*map(repr, found[:MAX_COLUMNS]), *(["…"] if len(found) > MAX_COLUMNS else [])]
    return WrongInput(
        f"{rows.name}: no {rows.part} {name!r} for --map; the file has: {', '.join(named)}; "
        "nothing was enqueued"
    )


def _check_taken(connected: Client, rows: RowFile, overrides: Overrides) -> None:
    """Raises WrongInput if another request has the id, the row or the custom_id of a row: nothing
    is enqueued then."""
    from jobs.data_sets.requests import InvalidLine
    from jobs.errors import invalid
    from jobs.store.custom_ids import FileRows

    total = 0
    errors = _Errors()
    places = FileRows(connected.redis)
    for chunk in _chunks(_valid(rows, overrides)):
        total += len(chunk)
        named = [line for line in chunk if line.request.job.id or line.request.job.row is not None]
        refused = places.give([line.request for line in named])
        for line, error in zip(named, refused, strict=True):
            if error is not None:
                errors.add(InvalidLine(line.number, invalid(error.message, error.param)))
    if errors.count:
        raise _invalid_rows(rows, errors, total, "refused")


def _submit_rows(
    connected: Client, rows: RowFile, overrides: Overrides, count: int
) -> Iterator[Submitted]:
    """Enqueue the rows, and yield the job of each. Raises Failure or JobError with the first row
    that is refused, after the jobs of the others that are read with it."""
    from jobs.cli.outcomes import Submitted
    from jobs.errors import JobError
    from jobs.results.outbox import DEFAULT_RUN
    from jobs.store.custom_ids import enqueue_rows

    try_submit = partial(connected.try_submit, by_custom_id=True)
    done = 0
    for chunk in _chunks(islice(_valid(rows, overrides), count)):
        try:
            found = enqueue_rows(connected.redis, try_submit, [line.request for line in chunk])
        except JobError as error:
            raise _stopped(rows, chunk[0].number, error, done, count) from None
        refused: list[tuple[int, JobError]] = []
        for line, job in zip(chunk, found, strict=True):
            if isinstance(job, JobError):
                refused.append((line.number, job))
                continue
            done += 1
            options = line.request.job
            run = options.run or DEFAULT_RUN
            yield Submitted(
                line.number,
                connected.job(job.id),
                options.custom_id,
                run,
                job.existed_before,
                job.ended_before,
            )
        if refused:
            raise _stopped(rows, *refused[0], done, count)
    if done < count:
        raise _changed(rows)


def _stopped(rows: RowFile, number: int, error: JobError, done: int, count: int) -> Exception:
    """The error of the first row that is refused, with how many are enqueued."""
    from jobs.errors import JobError

    enqueued = "nothing was enqueued"
    if done:
        are, ids = ("is", "its id is") if done == 1 else ("are", "their ids are")
        enqueued = (
            f"{done} of {counted(count, 'job')} {are} enqueued, and {ids} on stdout; submitting "
            "the same file again enqueues the rest if its rows have a custom_id, an id or a run"
        )
    message = f"{rows.name}: {rows.unit} {number}: {error.message}; {enqueued}"
    if error.code == "invalid_request":
        return WrongInput(message)
    return JobError(error.code, message, error.param)


def _chunks(lines: Iterator[RequestLine]) -> Iterator[list[RequestLine]]:
    chunk: list[RequestLine] = []
    size = 0
    for line in lines:
        chunk.append(line)
        size += line.size
        if len(chunk) == REQUESTS_AT_ONCE or size > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _valid(rows: RowFile, overrides: Overrides) -> Iterator[RequestLine]:
    """Yield the requests of a file that was checked."""
    from jobs.data_sets.requests import InvalidLine, read_requests

    for line in read_requests(rows, overrides, rows.unit, rows.part):
        if isinstance(line, InvalidLine):
            raise _changed(rows)
        yield line


def _changed(rows: RowFile) -> Failure:
    return Failure(f"{rows.name} was changed while it was read: not all of its rows are enqueued")


def _wait(
    connected: Client, submitted: list[Submitted], unit: str, as_json: bool, quiet: bool
) -> Failure | None:
    """Wait for the jobs and print their outcomes. Returns the failure if not all have an answer."""
    from jobs.cli.outcomes import Outcomes

    outcomes = Outcomes(submitted, unit, as_json=as_json)
    try:
        failed = outcomes.wait(connected.connection, quiet=quiet)
    except KeyboardInterrupt:
        left = outcomes.print_rest()
        go = "goes on, its id is" if left == 1 else "go on, their ids are"
        raise Interrupted(
            f"interrupted; {left} of {counted(len(submitted), 'job')} {go} on stdout: "
            "chatjobs follow JOB shows an answer, chatjobs cancel JOB... stops them"
        ) from None
    if not failed:
        return None
    jobs = counted(len(submitted), "job")
    were = "was" if failed == 1 else "were"
    return Failure(f"{failed} of {jobs} failed or {were} cancelled")


def _wait_for_rows(connected: Client, runs: Sequence[str], quiet: bool) -> None:
    """Return when the rows that the runs have now are in Parquet."""
    from jobs.cli.waiting import Rows, WaitNotice
    from jobs.client.wait_many import wait_for_outbox
    from jobs.store.connection.protocol import run_sync

    with WaitNotice(connected.connection, quiet=quiet) as notice:
        notice.watch(Rows(tuple(runs)))
        try:
            for run in runs:
                run_sync(wait_for_outbox(run), connected.connection)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; all jobs have ended, but rows of {', '.join(runs)} are not written "
                "yet: chatjobs status says why they wait"
            ) from None


def _invalid_rows(rows: RowFile, errors: _Errors, total: int, what: str = "invalid") -> WrongInput:
    lines, invalid = errors.lines(rows, total), errors.count
    return WrongInput(
        f"{invalid} of {counted(total, rows.unit)} {'is' if invalid == 1 else 'are'} {what}; "
        "nothing was enqueued",
        lines=lines,
    )

"""`chatjobs results`: list the runs on disk; summarise, export, query or delete one, or make one
file of its files."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.export import all_columns_option, export, format_option, order_option, output_option
from jobs.cli.failures import Failure
from jobs.cli.options import (
    client,
    connection,
    is_embedded,
    json_option,
    make_redis_option,
    quiet_option,
    redis_option,
    results_option,
)
from jobs.cli.output import echo, is_terminal, print_json
from jobs.cli.query import query
from jobs.cli.runs import open_results
from jobs.results.export.formats import Format, Order
from jobs.sizes import counted

if TYPE_CHECKING:
    from redis import Redis

    from jobs import Results
    from jobs.store.backlog import Unwritten

ASK_SECONDS = 1.0  # how long Redis may take to say what is not written yet
STATES = ("ok", "error", "cancelled")


class ShowByDefault(click.Group):
    """A group whose command `show` needs not be named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["show", *args])


@click.group(
    cls=ShowByDefault,
    subcommand_metavar="[RUN] | COMMAND",
)
def results() -> None:
    """List the runs, or summarise, export, query or delete one, or make one file of its files.

    chatjobs results [RUN] is short for chatjobs results show [RUN], and takes its options.
    """


results.add_command(query)


@results.command(short_help="List the runs, summarise RUN or write it to a file.")
@click.argument("run", required=False)
@format_option
@output_option
@order_option
@all_columns_option
@quiet_option
@json_option
@results_option
@make_redis_option("Redis server that is asked for rows which are not written yet.")
def show(
    run: str | None,
    form: Format | None,
    output: str | None,
    order: Order | None,
    all_columns: bool,
    quiet: bool,
    as_json: bool,
    results: str,
    redis_url: str,
) -> None:
    """List the runs, the one that was written last first, or summarise RUN, or write its rows to a
    file.

    With --json: one JSON object per run, or per row of RUN. Rows that are still in
    Redis are counted, if the folder is that of the workers on --redis.
    """
    if form is None and (output is not None or order is not None or all_columns):
        raise click.UsageError("-o, --order and --all-columns need --format")
    if form is not None and (run is None or as_json):
        raise click.UsageError("--format needs a RUN, and excludes --json")
    store = open_results(results)
    unwritten = _unwritten(store, redis_url)
    waiting = unwritten.runs if unwritten is not None else {}
    if run is not None and run in waiting and run not in store.runs():
        raise Failure(f"no row of run {run} is written yet: {_wait(waiting[run])}")
    if run is None:
        _list_runs(store, as_json, unwritten)
    elif form is not None:
        export(store, run, form, output, order=order, all_columns=all_columns, quiet=quiet)
    elif as_json:
        for batch in store.dataset(run).to_batches():
            for row in batch.to_pylist():
                print_json(row)
    else:
        _print_summary(store, run)
    if run is not None and waiting.get(run) and not quiet:
        echo(f"not written yet: {_wait(waiting[run])}", err=True)
    broken = sum(len(store.broken(name)) for name in (store.runs() if run is None else [run]))
    if broken:
        raise Failure(
            f"{counted(broken, 'file')} can't be read, and the rows there are missing above"
        )


@results.command(short_help="Make one file of the files of a run that has ended.")
@click.argument("run")
@json_option
@results_option
@redis_option
def compact(run: str, as_json: bool, results: str, redis_url: str) -> None:
    """Write the rows of a run that has ended to one file.

    It refuses while rows of the run are in --redis, or a chatjobs run enqueues them. Read the run
    with jobs.Results meanwhile, which reads each row once; other readers see rows twice for a
    moment.
    """
    from jobs.results.compact import compact
    from jobs.store.backlog import has_unwritten
    from jobs.store.producer_lease import LeaseLost, ProducerLease

    store = open_results(results)
    store.path(run)  # raises if there is no such run
    with connection(redis_url) as redis, ProducerLease(redis, run) as lease:
        holder = lease.acquire()
        if holder is not None:
            raise Failure(f"{holder} runs {run} (chatjobs run): end it first")
        if has_unwritten(redis, run):
            raise Failure(
                f"rows of run {run} are still in Redis: wait until the run has ended and a worker "
                "has written them"
            )
        try:
            replaced = compact(store, run, confirm=lease.renew)
        except LeaseLost as error:
            raise Failure(f"nothing was changed: {error}") from None
    if as_json:
        print_json({"run": run, "replaced_files": replaced})
    elif replaced:
        echo(f"{run}: {counted(replaced, 'file')} replaced by one", err=True)
    else:
        echo(f"{run}: nothing to do, its rows are in one file", err=True)


@results.command(name="rm", short_help="Delete a run that has ended: rows, scores and jobs.")
@click.argument("run")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@results_option
@redis_option
def remove(run: str, yes: bool, as_json: bool, results: str, redis_url: str) -> None:
    """Delete a run that has ended, for good: its rows and scores, and its jobs in --redis.

    It refuses while jobs or rows of the run are on their way. Its rows may be submitted anew
    afterwards.
    """
    from jobs import JobError
    from jobs.results.remove import remove_run
    from jobs.store.connection.protocol import collect, run_sync
    from jobs.store.find_jobs import Selection, find_jobs
    from jobs.store.job_state import Status
    from jobs.store.producer_lease import ProducerLease
    from jobs.store.purge import purge
    from jobs.store.run_rows import forget_reservations

    store = open_results(results)
    folder = store.path(run)  # raises if there is no such run
    files = len(store.files(run))
    table = store.table(run, ["row_index", "choice_index"])
    rows = table.num_rows
    if not yes:
        if as_json or not is_terminal(sys.stdin):
            raise click.UsageError("--yes is needed where nobody can be asked")
        about = f"{counted(rows, 'row')} in {counted(files, 'file')}, {folder.absolute()}"
        click.confirm(f"delete run {run} ({about})?", abort=True, err=True)
    with client(redis_url) as connected:
        _check_folder(connected.redis, store)
        with ProducerLease(connected.redis, run) as lease:
            holder = lease.acquire()
            if holder is not None:
                raise Failure(f"{holder} runs {run} (chatjobs run): end it first")
            state = connected.run(run, store.root).status()
            if waiting := state.queued + state.running:
                raise Failure(
                    f"{counted(waiting, 'job')} of run {run} {_have(waiting)} not ended: wait for "
                    f"them, or cancel them (chatjobs jobs cancel --run {run})"
                )
            if state.unwritten:
                raise Failure(f"run {run} is being written: {_wait(state.unwritten)}")
            remove_run(store, run)
            ended = Selection((Status.FINISHED, Status.FAILED, Status.CANCELLED), run)
            jobs = run_sync(
                collect(find_jobs(ended), lambda one: one.state.id), connected.connection
            )
            for job_id in jobs:
                with suppress(JobError):  # it has expired meanwhile
                    run_sync(purge(job_id), connected.connection)
            forget_reservations(connected.redis, run, set(table["row_index"].to_pylist()))
    if as_json:
        print_json({"run": run, "rows": rows, "files": files})
    else:
        echo(f"{run}: {counted(rows, 'row')} deleted", err=True)


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _check_folder(redis: Redis, store: Results) -> None:
    """Refuse to delete in a folder to which the workers of another Redis write."""
    from jobs.store.results_folder import read_id, read_record

    record, own = read_record(redis), read_id(store.root)
    if record is not None and own is not None and record.id != own:
        raise Failure(
            f"the workers of this Redis write to another folder, {record.path}: give --redis the "
            f"server whose workers write to {store.root.absolute()}"
        )


def _unwritten(store: Results, url: str) -> Unwritten | None:
    """The rows of this folder that are still in Redis; None if that is not known: Redis can't be
    reached, or its workers write to another folder."""
    from redis import RedisError

    from jobs.errors import JobError
    from jobs.store.backlog import read_unwritten
    from jobs.store.connection.connect import connect, limit_waits
    from jobs.store.results_folder import read_id, read_record

    if is_embedded(url):
        return None
    with connect(url) as redis, suppress(RedisError, JobError, OSError):
        limit_waits(redis, ASK_SECONDS)
        record = read_record(redis)
        if record is not None and record.id == read_id(store.root):
            return read_unwritten(redis)
    return None


def _wait(count: int) -> str:
    rows = f"{counted(count, 'row')} {'is' if count == 1 else 'are'}"
    return f"{rows} in Redis (chatjobs status says why if they wait for more than a minute)"


def _list_runs(store: Results, as_json: bool, unwritten: Unwritten | None) -> None:
    """`unwritten`: None if it is not known."""
    from jobs.results.newest import newest_runs

    waiting = {} if unwritten is None else unwritten.runs
    names = newest_runs(store)
    written = {run: store.dataset(run).count_rows() for run in names}
    runs: list[dict[str, Any]] = [
        {
            "run": run,
            "rows": written.get(run, 0),
            "unwritten": None if unwritten is None else waiting.get(run, 0),
        }
        for run in [*sorted(waiting.keys() - written.keys()), *names]
    ]
    if as_json:
        for run in runs:
            print_json(run)
    elif not runs:
        echo(f"no runs in {store.root.absolute()}", err=True)
    else:
        width = max(len(str(run["run"])) for run in runs)
        for run in runs:
            unit = "row" if run["rows"] == 1 else "rows"
            left = f", {run['unwritten']} not written yet" if run["unwritten"] else ""
            echo(f"{run['run']:{width}}  {run['rows']:>8} {unit}{left}")


def _print_summary(store: Results, run: str) -> None:
    import pyarrow.compute as pc

    from jobs.results.files import SAMPLES

    folder = store.path(run)
    columns = ["choice_index", "status", "model", "error_type", "input_tokens", "output_tokens"]
    table = store.table(run, columns)
    status = _counts(table.column("status"))
    errors = _counts(table.column("error_type"))
    first_choices = table.filter(pc.equal(table.column("choice_index"), 0))
    facts = {
        "rows": table.num_rows,
        **{state: status.get(state, 0) for state in STATES},
        "errors": ", ".join(f"{code} {errors[code]}" for code in sorted(errors)) or "none",
        "models": ", ".join(sorted(_counts(table.column("model")))),
        "tokens in": _sum(first_choices.column("input_tokens")),
        "tokens out": _sum(table.column("output_tokens")),
        "files": len(list((folder / SAMPLES).glob("*.parquet"))),
        "folder": folder,
    }
    for name, value in facts.items():
        echo(f"{name:<10}  {value}")


def _counts(column: Any) -> dict[str, int]:
    return {
        entry["values"]: entry["counts"]
        for entry in column.value_counts().to_pylist()
        if entry["values"] is not None
    }


def _sum(column: Any) -> int:
    import pyarrow.compute as pc

    return pc.sum(column).as_py() or 0

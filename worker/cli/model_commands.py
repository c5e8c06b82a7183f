"""`chatjobs models list`: the models of the running workers; `load|unload|pin|unpin` and `pull
--worker`: command one worker, and wait for its answer.

The commands need an operator's rights in Redis, as `chatjobs workers` does; none needs torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.failures import Interrupted
from jobs.cli.options import Seconds, client, connection, json_option, quiet_option, redis_option
from jobs.cli.output import echo, print_json
from jobs.cli.table import number, print_table
from jobs.errors import JobError, invalid

if TYPE_CHECKING:
    from redis import Redis

    from jobs.store.operator import Call
    from jobs.store.served_models import ServedModel


def _commands_models(command: Callable[[], None]) -> Callable[..., Any]:
    """The argument and options of a command about a model, which is sent by its name."""

    @click.argument("model")
    @click.option(
        "--worker",
        metavar="NAME",
        help="The worker, or the beginning of its name. [default: the only one that serves MODEL]",
    )
    @click.option("--timeout", type=Seconds(min=0), metavar="S", help="Fail after S seconds.")
    @json_option
    @quiet_option
    @redis_option
    @functools.wraps(command)
    def run(
        model: str,
        worker: str | None,
        timeout: float | None,
        as_json: bool,
        quiet: bool,
        redis_url: str,
    ) -> None:
        from jobs.store.operator import send

        with client(redis_url, quiet=quiet) as connected:
            name = _worker_of(connected.redis, model, worker)
            facts: Mapping[str, Any] = {}
            for answer in send(connected.redis, name, command.__name__, {"model": model}).answers(
                timeout
            ):
                facts = answer.facts
                if not (as_json or quiet):
                    pinned = ", pinned" if facts.get("pinned") else ""
                    state = facts.get("state", "in an unknown state")
                    echo(f"{name}: {facts.get('model', model)} is {state}{pinned}", err=True)
        if as_json:
            print_json({"worker": name, **facts})

    return run


@click.command()
@_commands_models
def load() -> None:
    """Bring MODEL into the memory of a worker with --memory, and wait until it takes jobs.

    Others make room, as for a job that has waited for too long.
    """


@click.command()
@_commands_models
def unload() -> None:
    """Free the memory of MODEL in a worker with --memory. One with jobs, or a pinned one, stays."""


@click.command()
@_commands_models
def pin() -> None:
    """Keep MODEL in the memory of a worker with --memory until it is unpinned, or the worker ends.

    It is loaded first, if it is not in memory.
    """


@click.command()
@_commands_models
def unpin() -> None:
    """Let MODEL make room for others again."""


@click.command(name="list")
@json_option
@redis_option
def list_models(as_json: bool, redis_url: str) -> None:
    """List the models that jobs can name: those of the running workers, with their state, memory
    and queued jobs.

    A model that is "kept" is in --host-memory. MEMORY is a model's share of --memory; for a worker
    without --memory, its weights. A model in the download cache of a machine is not listed, unless
    a worker serves it.
    """
    from jobs.store.served_models import read_models

    with connection(redis_url) as redis:
        found = read_models(redis)
    if as_json:
        for one in found:
            print_json(one._asdict())
    elif found:
        print_table(
            ("model", "state", number("queued"), number("memory"), "device", "worker"),
            [_cells(one) for one in found],
        )
    else:
        echo("no running worker serves a model", err=True)


def _cells(one: ServedModel) -> tuple[object, ...]:
    """The row of a model in the table."""
    kept = one.kept_bytes and one.state in ("cold", "unloaded")
    state = one.state + ", pinned" * one.pinned + ", kept" * bool(kept)
    used = one.weight_bytes if one.share_bytes is None else one.share_bytes
    memory = "-" if used is None else f"{used / 2**20:,.0f} MiB"
    return one.model, state, one.queued, memory, one.device, one.worker


def pull_there(model: str, worker: str, redis_url: str, *, as_json: bool, quiet: bool) -> None:
    """Have a worker download a model, and show the progress. The worker goes on if this command is
    interrupted."""
    from jobs.store.operator import send

    with client(redis_url, quiet=quiet) as connected:
        name = _worker_of(connected.redis, model, worker)
        call = send(connected.redis, name, "pull", {"model": model})
        try:
            facts = _follow_pull(name, model, call, shows=not (as_json or quiet))
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {name} goes on with the download") from None
    if as_json:
        print_json({"worker": name, **facts})
    elif not quiet:
        how = "downloaded to" if facts.get("downloaded") else "is in"
        place = facts.get("folder", "a folder that the worker does not name")
        echo(f"{name}: {facts.get('model', model)} {how} {place}", err=True)


def _follow_pull(name: str, model: str, call: Call, *, shows: bool) -> Mapping[str, Any]:
    """The facts of the last answer; `shows` the others."""
    from jobs.cli.progress import TaskProgress
    from jobs.sizes import size_text

    facts: Mapping[str, Any] = {}
    progress: TaskProgress | None = None
    comparing = False
    with ExitStack() as bar:
        for answer in call.answers():
            facts, before = answer.facts, comparing
            done, total = facts.get("done_bytes"), facts.get("total_bytes")
            if answer.final or not shows or done is None or total is None:
                continue
            called, comparing = facts.get("model", model), bool(facts.get("comparing"))
            if progress is None and not comparing:
                echo(f"{name}: downloads {called}, {size_text(total)}", err=True)
                progress = bar.enter_context(TaskProgress(called))
            if progress is not None:
                progress.update(done, total)
            if comparing and not before:
                bar.close()
                progress = None
                echo(f"{name}: compares the files of {called} with their hashes", err=True)
    return facts


MODEL_COMMANDS = (list_models, load, unload, pin, unpin)


def _worker_of(redis: Redis, model: str, given: str | None) -> str:
    """The name of the worker that is meant. Raises JobError."""
    from jobs.store.worker_status import read_statuses

    workers = read_statuses(redis)
    if given == "":
        raise invalid("the name of the worker is empty: chatjobs status lists them", "worker")
    if given is None:
        found = [one["name"] for one in workers.running if model in one["names"]]
    else:
        found = workers.called(given)
    if len(found) == 1:
        return str(found[0])
    if found:
        which = f"'{given}' is the beginning of {len(found)} names"
        if given is None:
            which = f"{len(found)} workers serve '{model}'"
        raise JobError("not_found", f"{which}: {', '.join(found)}; select one with --worker")
    nobody = f"no running worker serves model '{model}'" if given is None else f"no worker {given}"
    raise JobError("not_found", f"{nobody}: chatjobs status lists those that are running")

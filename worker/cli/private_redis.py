"""The private Redis of `--redis embedded`: its start, its end, and what is kept of its data.

`embedded:DIR` keeps its data in DIR, so that the next command with it goes on. Without DIR the data
are in memory: what is left is saved in the server's temporary folder, which is then kept.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING

import click

from jobs.cli.failures import AS_JSON, Unavailable, end_process
from jobs.cli.options import EMBEDDED
from jobs.cli.output import echo
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs.embedded import EmbeddedRedis

IN = f"{EMBEDDED}:"  # before the folder


@contextmanager
def private_redis(url: str, *, records: bool) -> Iterator[str]:
    """Yield the URL of a private server for the duration. `records`: whether its rows are to be
    written.

    Raises Unavailable if rows are left, or if anything is lost.
    """
    from jobs import JobError

    folder = url.removeprefix(IN) if url.startswith(IN) else None
    (plugin,) = entry_points(group="chatjobs.servers", name=EMBEDDED)
    kind: type[EmbeddedRedis] = plugin.load()
    server = kind(Path(folder), append_only=True) if folder else kind()
    try:
        server.start()
    except JobError as error:  # no server binary found, or DIR is in use
        raise Unavailable(error.message) from None
    failed = True
    try:
        try:
            with ends_with(server, lambda how: _lost(how, folder)):
                yield server.url
            failed = False
        finally:
            fault = _keep_what_is_left(server, folder, records)
            if fault and failed:
                echo(fault, err=True)  # beside the error that ended the command
    finally:
        server.stop()
    if fault:
        raise Unavailable(fault)


@contextmanager
def ends_with(
    server: EmbeddedRedis, fault: Callable[[str], str], kill: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """End the process at once, with exit code 3 and `fault`, if the server ends in this context.
    `fault` makes its message of how the server has ended. Nothing that the process could still do
    would save data. `kill` ends its children before: the message is the last one."""
    from jobs.cli.progress import show_cursor

    as_json, over = bool(click.get_current_context().meta.get(AS_JSON)), threading.Event()

    def watch() -> None:
        how = server.wait_for_end()
        if not over.is_set():
            kill()
            show_cursor()  # a progress bar may have hidden it
            end_process(Unavailable(fault(how)), as_json=as_json)

    threading.Thread(target=watch, name="private Redis", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _lost(how: str, folder: str | None) -> str:
    """The consequence of the end of the server. `folder`: the one that was given."""
    if folder is None:
        return (
            f"the private Redis has ended ({how}): the jobs and rows that it held are lost; start "
            "the command again, with --redis embedded:DIR to keep them on the disk"
        )
    return (
        f"the private Redis has ended ({how}): the jobs and rows that it has written to {folder} "
        f"are kept; go on with: {_again(f'{IN}{folder}')}"
    )


def private_redis_hint() -> str:
    """The remedy for a missing server, for an error; empty if no private one can be started."""
    from jobs import JobError
    from jobs.embedded import server_binary

    try:
        server_binary()
    except JobError:
        return ""
    return f"start a private one with --redis {EMBEDDED}"


def _keep_what_is_left(server: EmbeddedRedis, folder: str | None, records: bool) -> str:
    """Keep the rows and jobs that are left in the server, and say how to go on. Returns what is
    wrong, "" if nothing is lost or delayed."""
    from jobs import JobError
    from jobs.store.backlog import read_unwritten
    from jobs.store.connection.connect import connect
    from jobs.store.queue_depths import read_queues
    from jobs.store.results_folder import delete_record

    if not server.replies:
        return _lost(server.wait_for_end(), folder)
    with connect(server.url) as redis:
        rows = read_unwritten(redis).count
        jobs = sum(
            queue[state]
            for queue in read_queues(redis)
            for state in ("queued", "deferred", "scheduled", "running")
        )
        if rows and not records:
            echo(f"{counted(rows, 'row')} not written (--no-record)", err=True)
            rows = 0
        if not rows and not jobs:
            return ""
        parts = [counted(rows, "row") + " not written"] if rows else []
        parts += [counted(jobs, "job") + " not ended"] if jobs else []
        left = " and ".join(parts)
        try:
            if folder is None:
                # No other worker uses this server: the next command may choose another folder.
                delete_record(redis)
                folder = str(server.keep())
        except JobError as error:
            return f"{left}: lost with the private Redis, which can't be kept: {error.message}"
    kept = f"{left}: kept in {folder}; go on with: {_again(f'{IN}{folder}')}"
    if rows:
        return kept
    echo(kept, err=True)
    return ""


def _again(url: str) -> str:
    """The command line of this process with another `--redis`."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word == "--redis":
            next(words, None)
        elif not word.startswith("--redis="):
            kept.append(word)
    return join(["chatjobs", *kept, "--redis", url])

"""`chatjobs submit`: enqueue a file of requests and print the job ids."""

from __future__ import annotations

from typing import BinaryIO

import click

from jobs.cli.answer import print_json
from jobs.cli.options import check_run, client, json_option, quiet_option, redis_option

SHOWN_BAD_LINES = 20


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("-m", "--model", metavar="M", help="Model for all rows; else each names its own.")
@click.option(
    "--run",
    metavar="ID",
    callback=check_run,
    help="Run that the rows belong to; makes them bulk jobs.",
)
@click.option(
    "--priority",
    type=click.Choice(["interactive", "bulk"]),
    help="Priority of all rows. [default: bulk with --run, else interactive]",
)
@json_option
@quiet_option
@redis_option
def submit(
    file: BinaryIO,
    model: str | None,
    run: str | None,
    priority: str | None,
    as_json: bool,
    quiet: bool,
    redis_url: str,
) -> None:
    """Enqueue the requests in FILE (- for stdin), one JSON object per line, and print the job ids.

    A line is a chat request, or a row with messages, prompt or text (custom_id, target and task are
    kept beside), or a line of an OpenAI batch file. If any line is bad, nothing is enqueued.
    """
    from jobs.cli import lines

    good, bad = lines.read(file, lines.Defaults(model, run, priority))
    name = getattr(file, "name", "<stdin>")
    if bad:
        for line in bad[:SHOWN_BAD_LINES]:
            click.echo(f"{name}: {line}", err=True)
        if len(bad) > SHOWN_BAD_LINES:
            click.echo(f"… and {len(bad) - SHOWN_BAD_LINES} more", err=True)
        raise click.UsageError(
            f"{len(bad)} of {len(good) + len(bad)} lines can't be run; nothing was enqueued"
        )
    if not good:
        raise click.UsageError(f"{name} holds no rows")
    with client(redis_url) as connected:
        jobs = connected.submit_many([row.request for row in good])
    for row, job in zip(good, jobs, strict=True):
        if as_json:
            custom_id = row.request.job.custom_id
            print_json({"id": job.id, "line": row.line, "custom_id": custom_id})
        else:
            click.echo(job.id)
    if not quiet:
        click.echo(f"{len(good)} jobs enqueued", err=True)

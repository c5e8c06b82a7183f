"""`chatjobs submit`: enqueue the requests in a file and print the job ids."""

from __future__ import annotations

from typing import BinaryIO

import click

from jobs.cli.answer import print_json
from jobs.cli.options import check_run, client, json_option, quiet_option, redis_option

MAX_REPORTED_LINES = 20


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
    """Enqueue the requests in FILE and print the job ids.

    FILE has one JSON object per line; - is stdin. A line is a chat request, a row with messages,
    prompt or text (and optionally custom_id, target and task), or a line of an OpenAI batch file.
    If any line is invalid, nothing is enqueued.
    """
    from jobs.cli.jsonl import Overrides, read_requests

    valid, invalid = read_requests(file, Overrides(model, run, priority))
    name = getattr(file, "name", "<stdin>")
    if invalid:
        for error in invalid[:MAX_REPORTED_LINES]:
            click.echo(f"{name}: {error}", err=True)
        if len(invalid) > MAX_REPORTED_LINES:
            click.echo(f"… and {len(invalid) - MAX_REPORTED_LINES} more", err=True)
        raise click.UsageError(
            f"{len(invalid)} of {len(valid) + len(invalid)} lines are invalid; nothing was enqueued"
        )
    if not valid:
        raise click.UsageError(f"{name} contains no rows")
    with client(redis_url) as connected:
        jobs = connected.submit_many([line.request for line in valid])
    for line, job in zip(valid, jobs, strict=True):
        if as_json:
            custom_id = line.request.job.custom_id
            print_json({"id": job.id, "line": line.number, "custom_id": custom_id})
        else:
            click.echo(job.id)
    if not quiet:
        click.echo(f"{len(valid)} job{'s' * (len(valid) != 1)} enqueued", err=True)

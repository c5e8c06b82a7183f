"""`chatjobs follow`: print the answer of a job by its id."""

from __future__ import annotations

import click

from jobs.cli.answer import print_job
from jobs.cli.options import client, json_option, quiet_option, redis_option


@click.command()
@click.argument("job_id", metavar="JOB")
@json_option
@quiet_option
@redis_option
def follow(job_id: str, as_json: bool, quiet: bool, redis_url: str) -> None:
    """Print the answer of JOB, from its first token until it ends.

    With --json: the chunks and then the completion, one JSON object per line.
    """
    with client(redis_url) as connected:
        print_job(connected.job(job_id), as_json=as_json, reasoning=not quiet)

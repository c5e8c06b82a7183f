"""`chatjobs follow` and `chatjobs cancel`: jobs by their id, from any terminal."""

from __future__ import annotations

import click

from jobs.cli.chat import follow_job
from jobs.cli.options import client, json_option, quiet_option, redis_option


@click.command()
@click.argument("job_id", metavar="JOB")
@json_option
@quiet_option
@redis_option
def follow(job_id: str, as_json: bool, quiet: bool, redis_url: str) -> None:
    """Show the answer of JOB from its beginning, and go on live.

    With --json: the chunks and then the whole completion, one JSON object per line.
    """
    with client(redis_url) as connected:
        follow_job(connected.job(job_id), as_json=as_json, reasoning=not quiet)


@click.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@quiet_option
@redis_option
def cancel(job_ids: tuple[str, ...], quiet: bool, redis_url: str) -> None:
    """Stop jobs, waiting or running. What they had generated is kept in their rows."""
    with client(redis_url) as connected:
        for job_id in job_ids:
            job = connected.job(job_id)
            job.cancel()
            if not quiet:
                click.echo(f"{job_id} {job.status()}", err=True)

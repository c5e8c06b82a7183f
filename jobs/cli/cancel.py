"""`chatjobs cancel`: stop jobs by their ids."""

from __future__ import annotations

import click

from jobs.cli.options import client, quiet_option, redis_option


@click.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@quiet_option
@redis_option
def cancel(job_ids: tuple[str, ...], quiet: bool, redis_url: str) -> None:
    """Cancel queued or running jobs. Their rows keep the text generated so far."""
    with client(redis_url) as connected:
        for job_id in job_ids:
            job = connected.job(job_id)
            job.cancel()
            if not quiet:
                click.echo(f"{job_id} {job.status()}", err=True)

"""`chatjobs cancel`: stop jobs by their ids."""

from __future__ import annotations

import click

from jobs.cli.failures import Failure
from jobs.cli.options import client, quiet_option, redis_option


@click.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@quiet_option
@redis_option
def cancel(job_ids: tuple[str, ...], quiet: bool, redis_url: str) -> None:
    """Cancel queued or running jobs. Their rows keep the text generated so far."""
    from jobs import JobError

    failed = 0
    with client(redis_url) as connected:
        for job_id in job_ids:
            try:
                job = connected.job(job_id)
                stopped = job.cancel()
                status = job.status()
            except JobError as error:
                failed += 1
                click.echo(f"{job_id}: {error.message}", err=True)
                continue
            if not quiet:
                click.echo(f"{job_id}: {_outcome(stopped, status)}", err=True)
    if failed:
        raise Failure(f"{failed} of {len(job_ids)} jobs could not be cancelled")


def _outcome(stopped: bool, status: str) -> str:
    """Say what the cancellation of a job did; `status` is the one after it."""
    if stopped:
        return "cancelled" if status == "cancelled" else "will be cancelled by its worker"
    if status == "cancelled":
        return "was already cancelled"
    return f"had already {status}"  # finished or failed

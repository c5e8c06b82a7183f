"""`chatjobs follow`: print the answer of a job by its id."""

from __future__ import annotations

import click

from jobs.cli.failures import Interrupted
from jobs.cli.options import (
    JobId,
    client,
    json_option,
    quiet_option,
    redis_option,
    timeout_option,
)
from jobs.cli.printing import print_job
from jobs.cli.waiting import WaitNotice


@click.command()
@click.argument("job_id", metavar="JOB", type=JobId())
@timeout_option
@json_option
@quiet_option
@redis_option
def follow(job_id: str, timeout: float | None, as_json: bool, quiet: bool, redis_url: str) -> None:
    """Print the answer of JOB, from its first token until it ends.

    If its worker dies, the answer goes on with the next one. If that answers otherwise, the new
    answer follows on a terminal; in a pipe, that is an error.

    With --json: the chunks and then the completion, one JSON object per line.
    """
    with (
        client(redis_url, quiet=quiet) as connected,
        WaitNotice(connected.connection, quiet=quiet) as notice,
    ):
        try:
            print_job(connected.job(job_id), notice, as_json=as_json, quiet=quiet, timeout=timeout)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; job {job_id} goes on: chatjobs follow {job_id} shows its answer, "
                f"chatjobs cancel {job_id} stops it"
            ) from None

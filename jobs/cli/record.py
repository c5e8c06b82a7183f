"""`chatjobs record`: write rows to Parquet, on a host without a device, a model and torch.

redis and pyarrow are imported inside the command, so that `--help` stays fast.
"""

from __future__ import annotations

from pathlib import Path

import click

from jobs.cli.options import (
    check_server,
    log_format_option,
    quiet_option,
    redis_option,
    results_option,
)
from jobs.cli.stderr import keep_writing
from jobs.log_lines import log_to_stderr


@click.command()
@redis_option
@results_option
@click.option("--once", is_flag=True, help="Exit when the rows that are in Redis are written.")
@log_format_option
@quiet_option
def record(redis_url: str, results: str, once: bool, log_format: str, quiet: bool) -> None:
    """Write the rows of ended jobs to Parquet until stopped.

    Workers do so themselves, unless they run with --no-record: this command is for workers that
    have no results disk. It runs beside workers and other recorders, and each row is written once.
    After SIGTERM or Ctrl-C it writes the rows that are in Redis, for at most 25 seconds; a second
    signal stops it at once. No row is lost.
    """
    keep_writing()
    from jobs import JobError
    from jobs.cli.failures import Unavailable
    from jobs.record.process import record as run

    log_to_stderr(log_format, quiet=quiet)
    check_server(redis_url)
    try:
        run(redis_url=redis_url, results=Path(results), once=once)
    except JobError as error:
        raise Unavailable(error.message, error) from None

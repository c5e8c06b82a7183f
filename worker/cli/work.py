"""`chatjobs work`: load models and serve their queues.

torch, redis and pyarrow are imported inside the command, so that `--help` stays fast.
"""

from __future__ import annotations

import logging
from pathlib import Path

import click

from jobs.cli.options import EMBEDDED, Seconds, quiet_option, results_option
from worker.cli.options import (
    device_option,
    download_option,
    dtype_option,
    need_torch,
    redis_option,
    refusal,
    server,
)


@click.command()
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    required=True,
    metavar="M",
    help="Model to load and serve: 'demo', a folder or a repository id; repeatable.",
)
@redis_option
@results_option
@click.option(
    "--no-record",
    is_flag=True,
    help="Write no results: leave the rows to the other workers on this Redis.",
)
@device_option
@dtype_option
@download_option
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum tokens of prompt and answer together; beyond the model's, with a warning, if its "
    "config doesn't stretch the positions. [default: the model's]",
)
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of sequences in the batch. [default: depends on the device]",
)
@click.option(
    "--grace",
    type=Seconds(min=0),
    default=30,
    show_default=True,
    metavar="S",
    help="Seconds that running jobs may continue after SIGTERM.",
)
@click.option("--burst", is_flag=True, help="Exit when the queues are empty.")
@quiet_option
def work(
    models: tuple[str, ...],
    redis_url: str,
    results: str,
    no_record: bool,
    device: str,
    dtype: str,
    download_dir: Path | None,
    context: int | None,
    max_batch: int | None,
    grace: float,
    burst: bool,
    quiet: bool,
) -> None:
    """Load models and serve their queues until stopped.

    After SIGTERM or Ctrl-C the worker takes no new jobs; running jobs may continue for --grace
    seconds, then they are requeued. A second signal stops the worker at once. No job is lost.
    """
    need_torch()
    from jobs import JobError
    from worker.engine.host import EngineHost
    from worker.service import serve

    _configure_logging(quiet)
    with server(redis_url) as url:
        if redis_url == EMBEDDED:
            click.echo(f"private Redis: --redis {url}", err=True)
        try:
            backend = EngineHost(
                device=device,
                dtype=dtype,
                max_batch=max_batch,
                context=context,
                download_dir=download_dir,
            )
            if not quiet:
                click.echo(f"device: {backend.device}", err=True)
            folder = None if no_record else Path(results)
            serve(backend, models, redis_url=url, results=folder, grace=grace, burst=burst)
        except JobError as error:
            raise refusal(error) from None


def _configure_logging(quiet: bool) -> None:
    """Log to stderr: the worker from INFO, or with `quiet` from WARNING like all libraries."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if quiet:
        disable_progress_bars()
    else:
        logging.getLogger("worker").setLevel(logging.INFO)

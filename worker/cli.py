"""The commands that `worker` adds to `chatjobs`: `work` and `demo`.

Found by the command line through an entry point, so this file is imported for every `--help`:
torch, redis and pyarrow are imported inside the commands.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.cli.failures import Infrastructure
from jobs.cli.options import (
    EMBEDDED,
    Seconds,
    check_run,
    quiet_option,
    redis_option,
    results_option,
    server,
)

if TYPE_CHECKING:
    from jobs import JobError

device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="D",
    help="cpu, cuda or cuda:N; auto takes the first GPU, else the CPU.",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "bf16", "fp16", "fp32"]),
    default="auto",
    show_default=True,
    help="Type of weights and arithmetic.",
)

download_option = click.option(
    "--download-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where models of the hub are kept. [default: HF_HUB_CACHE, else below HF_HOME]",
)


def need_torch() -> None:
    if find_spec("torch") is None:
        raise Infrastructure(
            "this command generates and needs torch: pip install 'chatjobs[worker]'"
        )


def refusal(error: JobError) -> click.ClickException:
    """What the command line asked for can't be, or isn't there."""
    if error.code == "invalid_request" and error.param != "device":
        return click.UsageError(error.message)
    return Infrastructure(str(error))


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
@device_option
@dtype_option
@download_option
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Longest prompt and answer together, in tokens. [default: the model's own]",
)
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Sequences generated together; 1 runs one job after the other. [default: by device]",
)
@click.option(
    "--grace",
    type=Seconds(min=0),
    default=30,
    show_default=True,
    metavar="S",
    help="Seconds that running jobs get after SIGTERM.",
)
@click.option("--burst", is_flag=True, help="End when the queues are empty.")
@quiet_option
def work(
    models: tuple[str, ...],
    redis_url: str,
    results: str,
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

    SIGTERM or Ctrl-C: no new jobs, running ones get --grace seconds, the rest goes back to its
    queue. A second one stops at once; nothing is lost either way.
    """
    need_torch()
    import logging

    from huggingface_hub.utils.tqdm import disable_progress_bars

    from jobs import JobError
    from worker.engine.host import EngineHost
    from worker.service import serve

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")  # of others, warnings only
    if quiet:
        disable_progress_bars()
    else:
        logging.getLogger("worker").setLevel(logging.INFO)
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
            serve(backend, models, redis_url=url, results=Path(results), grace=grace, burst=burst)
        except JobError as error:
            raise refusal(error) from None


@click.command()
@click.option("--rows", type=click.IntRange(1, 500), default=500, show_default=True, metavar="N")
@click.option("--run", metavar="ID", callback=check_run, help="Run id. [default: demo-<time>]")
@results_option
def demo(rows: int, run: str | None, results: str) -> None:
    """Run 500 questions and a live one through a private Redis and a worker, with a tiny model.

    The model was trained for this and comes with the package: nothing is downloaded.
    """
    need_torch()
    from worker.demo_run import run as run_demo

    run_demo(rows, run or time.strftime("demo-%Y%m%d-%H%M%S"), Path(results))

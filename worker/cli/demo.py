"""`chatjobs demo`: the command; demo_run.py implements it.

torch, redis and pyarrow are imported inside the command, so that `--help` stays fast.
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from jobs.cli.interrupts import interrupts_raise
from jobs.cli.options import check_run, json_option, results_option
from worker.cli.options import need_torch
from worker.option_values import GGUF_KINDS


def _kind(context: click.Context, option: click.Parameter, value: str) -> str | None:
    """The type in `demo:TYPE`, None for `demo`."""
    name, _, kind = value.partition(":")
    if name != "demo" or (kind.upper() not in GGUF_KINDS and value != "demo"):
        possible = ", ".join(GGUF_KINDS)
        raise click.BadParameter(f"give demo, or demo: and one of {possible}", context, option)
    return kind.upper() or None


@click.command()
@click.option(
    "--rows",
    type=click.IntRange(1, 500),
    default=500,
    show_default=True,
    metavar="N",
    help="Number of questions.",
)
@click.option(
    "--model",
    default="demo",
    show_default=True,
    metavar="M",
    callback=_kind,
    help="demo, or demo:TYPE to quantise it first, as 'chatjobs models quantize' does.",
)
@click.option("--run", metavar="ID", callback=check_run, help="Run id. [default: demo-<time>]")
@json_option
@results_option
def demo(rows: int, model: str | None, run: str | None, as_json: bool, results: str) -> None:
    """Answer 500 questions with a small model and score the answers.

    Starts a private Redis and a worker, prints the accuracy per task from the Parquet rows, then
    streams one more answer, without --json. The model is part of the package: nothing is
    downloaded.
    """
    need_torch()
    from worker.cli.demo_run import run_demo

    with interrupts_raise():
        name = run or time.strftime("demo-%Y%m%d-%H%M%S")
        run_demo(rows, name, Path(results), kind=model, as_json=as_json)

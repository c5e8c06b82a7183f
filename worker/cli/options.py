"""Options and checks that the worker's commands share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.cli.failures import Infrastructure

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

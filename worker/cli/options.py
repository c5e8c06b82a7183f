"""Options and checks shared by the worker's commands."""

from __future__ import annotations

import gc
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.failures import Failure, Unavailable, WrongInput, sentence
from jobs.cli.options import make_redis_option
from worker import advice
from worker.cli.start_limits import start_fault
from worker.option_values import DTYPES

if TYPE_CHECKING:
    from jobs import JobError

DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]*))?")


class Address(click.ParamType[tuple[str, int]]):
    """Where to listen: [HOST:]PORT, with an IPv6 address in brackets."""

    name = "address"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        host, _, port = value.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        brackets = host == f"[{bare}]" if ":" in host else host == bare
        if not (brackets and re.fullmatch("[0-9]{1,5}", port) and int(port) < 2**16):
            self.fail(
                f"{value!r} is not an address: a port up to 65535, such as 9100, or a host and a "
                "port, such as 0.0.0.0:9100 or [::]:9100",
                param,
                ctx,
            )
        return bare or "127.0.0.1", int(port)


def _check_device(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not DEVICE.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not a device: auto, cpu, cuda or cuda:N")
    return value


device_option = click.option(
    "--device",
    callback=_check_device,
    default="auto",
    show_default=True,
    metavar="D",
    help="cpu, cuda or cuda:N; auto selects the first GPU if there is one, else the CPU.",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", *DTYPES]),
    default="auto",
    show_default=True,
    metavar="T",
    help="Data type of weights and activations: bf16, fp16 or fp32, also by torch's names such as "
    "bfloat16 and half; auto takes the checkpoint's.",
)
template_option = click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Jinja chat template to use instead of the model's own.",
)
trust_template_option = click.option(
    "--trust-request-chat-template",
    is_flag=True,
    help="Let requests bring a chat template of their own (chat_template). It is rendered in a "
    "sandbox, as each template is.",
)
bos_option = click.option(
    "--add-bos/--no-add-bos",
    default=None,
    help="Begin each prompt with the BOS token if the chat template does not write it. [default: "
    "as a GGUF file says; not for others]",
)
quantize_option = click.option(
    "--quantize",
    type=click.Choice(["q8"]),
    help="Quantise the weights while they are loaded: q8 stores them with 8 bits, which halves the "
    "memory of bf16 weights. Weights of GGUF files stay as they are.",
)

keep_option = click.option(
    "--keep-quantised",
    is_flag=True,
    help="Keep types of GGUF files that no kernel multiplies with (such as IQ3_S) as they are, "
    "instead of encoding them again as Q8_0: takes less memory, and many times as long.",
)

parallel_option = click.option(
    "--tensor-parallel",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Compute the model in N processes together, each with a part of the weights and the "
    "cache: on the CPU, or with a GPU each.",
)

download_option = click.option(
    "--download-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Cache folder for models of the hub. [default: HF_HUB_CACHE, else a folder in HF_HOME]",
)


redis_option = make_redis_option(
    "Redis server; 'embedded' starts a private one that stops with the command, and 'embedded:DIR' "
    "one that keeps its data in DIR."
)


def need_torch() -> None:
    """Import torch. Raises if it is missing, or if a limit of this process is too low for it."""
    if find_spec("torch") is None:
        raise Unavailable(f"this command needs torch: {advice()}")
    if fault := start_fault():
        raise Unavailable(fault)
    gc.disable()  # the import makes 170 000 objects that stay: to search them takes long
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def refusal(error: JobError) -> Failure:
    """Return the exit for a JobError at startup: wrong usage, or something is unavailable."""
    if error.code == "invalid_request" and error.param != "device":
        return WrongInput(error.message, error)
    return Unavailable(sentence(error), error)

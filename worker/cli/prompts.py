"""`chatjobs prompts`: saves the state of prompts that many requests begin with."""

from __future__ import annotations

from pathlib import Path

import click

from jobs.cli.failures import WrongInput
from jobs.cli.options import json_option
from jobs.cli.output import echo, print_json
from jobs.sizes import counted
from worker.cli.options import (
    bos_option,
    device_option,
    download_option,
    dtype_option,
    keep_option,
    need_torch,
    quantize_option,
    refusal,
    template_option,
)


@click.group()
def prompts() -> None:
    """Save the state of prompts for `chatjobs work --prompt-cache`."""


@prompts.command()
@click.option("-m", "--model", required=True, metavar="M", help="As for `chatjobs work`.")
@click.option(
    "--system",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Text of the system message with which the requests begin.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Safetensors file to write.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@device_option
@dtype_option
@quantize_option
@keep_option
@download_option
@template_option
@bos_option
@json_option
def save(
    model: str,
    system: Path,
    output: Path,
    force: bool,
    device: str,
    dtype: str,
    quantize: str | None,
    keep_quantised: bool,
    download_dir: Path | None,
    chat_template: Path | None,
    add_bos: bool | None,
    as_json: bool,
) -> None:
    """Compute the system message in FILE once, and save its state.

    The file belongs to this model, dtype and kind of quantisation. It holds the tokens that all
    conversations with this system message begin with, at least 16.
    """
    if output.exists() and not force:
        raise WrongInput(f"{output} exists already; give another name, or --force")
    if not output.parent.is_dir():
        raise WrongInput(f"there is no folder {output.parent}; create it first")
    try:
        text = system.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise WrongInput(f"{system} is not UTF-8 text") from None
    except OSError as error:
        raise WrongInput(f"{system} cannot be read: {error.strerror}") from None
    need_torch()
    from jobs import JobError
    from worker import Engine

    try:
        engine = Engine.load(
            model,
            device=device,
            dtype=dtype,
            quantize=quantize,
            keep_quantised=keep_quantised,
            max_batch=1,
            download_dir=download_dir,
            chat_template=chat_template,
            add_bos=add_bos,
        )
        messages = [{"role": "system", "content": text}]
        count = engine.save_prompt_cache(messages, output)
    except JobError as error:
        raise refusal(error) from None
    size = output.stat().st_size
    if as_json:
        print_json({"model": engine.info.name, "file": str(output), "tokens": count, "bytes": size})
    else:
        echo(f"{output}: {counted(count, 'token')}, {size / 2**20:.1f} MiB")

"""`chatjobs models`: what a model is, and whether it runs here, before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.answer import print_json
from jobs.cli.failures import Failure
from jobs.cli.options import json_option
from worker.cli.options import device_option, download_option, dtype_option, need_torch, refusal

if TYPE_CHECKING:
    from worker.resident.preflight import Preflight


@click.group()
def models() -> None:
    """Look at models before they are loaded."""


@models.command()
@click.argument("reference", metavar="MODEL")
@device_option
@dtype_option
@download_option
@json_option
def check(
    reference: str, device: str, dtype: str, download_dir: Path | None, as_json: bool
) -> None:
    """Tell what MODEL is and whether it fits: a folder, a repository id or 'demo'.

    Reads config, tokenizer and the headers of the weight files; of a repository on the hub, only
    the small files are downloaded. Exit code 1 if it doesn't fit, 3 if it can't run at all.
    """
    need_torch()
    from jobs import JobError
    from worker.loading.checkpoint import is_there
    from worker.loading.source import find
    from worker.resident.device import choose_device
    from worker.resident.preflight import preflight

    try:
        files = find(reference, download_dir)
        headers = files.repo is None or is_there(files.folder)
        found = preflight(files, choose_device(device), dtype, headers=headers)
    except JobError as error:
        raise refusal(error) from None
    if as_json:
        print_json(_facts(found))
    else:
        _show(found)
    if found.obstacle is not None:
        raise Failure(found.obstacle)


def _facts(found: Preflight) -> dict[str, Any]:
    return {
        "model": found.files.name,
        "revision": found.files.revision,
        "folder": str(found.files.folder),
        "downloaded": found.headers,
        "family": found.config.model_type,
        "parameters": found.parameters,
        "dtype": found.dtype_name,
        "weight_bytes": found.weight_bytes,
        "context_length": found.context_length,
        "longest_sequence": found.longest,
        "chat_template": found.template is not None,
        "device": str(found.device),
        "free_bytes": found.free_bytes,
        "fits": found.obstacle is None,
        "obstacle": found.obstacle,
    }


def _show(found: Preflight) -> None:
    from worker.resident.device import device_name

    files, device = found.files, found.device
    revision = f" at {files.revision}" if files.revision else ""
    context = f"{found.context_length:,} tokens"
    if found.longest < found.context_length:
        context += f", of which {found.longest:,} fit beside the weights"
    lines = {
        "model": f"{files.name}{revision}",
        "family": found.config.model_type,
        "parameters": f"{found.parameters:,}",
        "weights": f"{_size(found.weight_bytes)} in {found.dtype_name}"
        + ("" if found.headers else ", not downloaded yet"),
        "context": context,
        "template": "yes" if found.template else "none: chat requests will be refused",
        "device": f"{device} ({device_name(device)}), {_size(found.free_bytes)} free",
        "fits": "yes" if found.obstacle is None else "no",
    }
    for name, text in lines.items():
        click.echo(f"{name:<11} {text}")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

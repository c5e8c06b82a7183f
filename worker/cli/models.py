"""`chatjobs models`: checks whether a model runs here without its weights; quantises models.

The commands to running workers are in model_commands.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.cli.failures import Failure
from jobs.cli.options import json_option, quiet_option, redis_option
from jobs.cli.output import echo, print_json
from worker.cli.model_commands import MODEL_COMMANDS, pull_there
from worker.cli.model_facts import facts_of, kernels, obstacle_of
from worker.cli.options import (
    device_option,
    download_option,
    dtype_option,
    keep_option,
    need_torch,
    parallel_option,
    refusal,
    template_option,
)
from worker.option_values import GGUF_KINDS

if TYPE_CHECKING:
    from worker.loading.preflight import Preflight
    from worker.model_spec import ModelSpec


@click.group()
def models() -> None:
    """Inspect and convert models without loading them; bring them into the memory of workers."""


for _command in MODEL_COMMANDS:
    models.add_command(_command)


@models.command()
@click.argument("reference", metavar="MODEL")
@device_option
@dtype_option
@keep_option
@download_option
@template_option
@parallel_option
@json_option
def check(
    reference: str,
    device: str,
    dtype: str,
    keep_quantised: bool,
    download_dir: Path | None,
    chat_template: Path | None,
    tensor_parallel: int,
    as_json: bool,
) -> None:
    """Describe MODEL (a folder, a GGUF file, a hub repo id or 'demo') and check whether it fits.

    Reads the configuration, the tokenizer, the chat template and the headers of the weight files.
    Of a model on the hub, only the small files and these headers are downloaded. Exit code 1 if it
    doesn't fit or has no chat template, 2 if it can't be used with an option, 3 if it can't run.
    """
    need_torch()
    from jobs import JobError
    from worker.device import Device, choose_device
    from worker.loading.description import describe
    from worker.loading.find import find
    from worker.loading.preflight import preflight
    from worker.model_spec import ModelSpec
    from worker.ranks.limits import place_ranks

    spec = ModelSpec(
        reference=reference,
        dtype=dtype,
        keep_quantised=keep_quantised,
        download_dir=download_dir,
        chat_template=chat_template,
        tensor_parallel=tensor_parallel,
    )
    try:
        place = Device(choose_device(device))
        place_ranks(spec, place)
        source = find(spec.reference, spec.download_dir)
        model = describe(source, spec.chat_template)
        downloaded = not source.needs_download
        with source.weights() if downloaded else nullcontext(source.headers()) as headers:
            found = preflight(model, spec, place, headers)
    except JobError as error:
        raise refusal(error) from None
    if as_json:
        print_json(facts_of(found, spec, downloaded))
    else:
        _show(found, spec, downloaded)
    if (obstacle := obstacle_of(found)) is not None:
        raise Failure(obstacle)


@models.command()
@click.argument("reference", metavar="MODEL")
@click.option(
    "--worker",
    metavar="NAME",
    help="The running worker, or the beginning of its name, that downloads it.",
)
@download_option
@json_option
@quiet_option
@redis_option
def pull(
    reference: str,
    worker: str | None,
    download_dir: Path | None,
    as_json: bool,
    quiet: bool,
    redis_url: str,
) -> None:
    """Download MODEL (a hub repo id) to this machine, so that a worker here only reads files.

    With --worker, that worker downloads it where it runs; it must be one of the models that it was
    started to serve. Files that an earlier download has completed are kept, also if it was killed.
    """
    if worker is not None:
        if download_dir is not None:
            raise click.UsageError("--download-dir is for this machine: a worker uses its own")
        pull_there(reference, worker, redis_url, as_json=as_json, quiet=quiet)
        return
    need_torch()
    from jobs import JobError
    from worker.loading.find import find

    if quiet or as_json:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    try:
        source = find(reference, download_dir)
        downloads = source.needs_download
        if downloads:
            source.download_weights()
    except JobError as error:
        raise refusal(error) from None
    if as_json:
        facts = {"model": source.name, "folder": str(source.path), "downloaded": downloads}
        print_json({"worker": None, **facts})
    elif not quiet:
        echo(f"{source.name}: {'downloaded to' if downloads else 'is in'} {source.path}", err=True)


@models.command()
@click.argument("reference", metavar="MODEL")
@click.option(
    "--type",
    "kind",
    type=click.Choice(GGUF_KINDS, case_sensitive=False),
    default="Q4_K_M",
    show_default=True,
    metavar=f"[{'|'.join(GGUF_KINDS)}]",
    help="As llama.cpp names them: Q8_0 loses least, Q4_0 takes least memory.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="[default: MODEL-TYPE.gguf in this folder]",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@download_option
@json_option
def quantize(
    reference: str,
    kind: str,
    output: Path | None,
    force: bool,
    download_dir: Path | None,
    as_json: bool,
) -> None:
    """Write MODEL (a folder, a hub repo id or 'demo') as a GGUF file with quantised weights.

    MODEL has unquantised weights in safetensors files. llama.cpp reads the file as well.
    """
    need_torch()
    from jobs import JobError
    from jobs.cli.progress import TaskProgress
    from worker.gguf.write.model import quantise_model
    from worker.loading.find import find

    with TaskProgress("quantising") as progress:
        try:
            source = find(reference, download_dir)
            target = output or Path(f"{Path(source.name).name}-{kind}.gguf")
            written = quantise_model(source, kind, target, progress.update, replace=force)
        except JobError as error:
            raise refusal(error) from None
    if as_json:
        print_json(
            {
                "model": source.name,
                "file": str(written.path),
                "type": written.kind,
                "parameters": written.parameters,
                "bytes": written.bytes,
            }
        )
    else:
        size, bits = _size(written.bytes), 8 * written.bytes / written.parameters
        echo(f"{written.path}: {size}, {written.kind}, {bits:.2f} bits per weight")


def _show(found: Preflight, spec: ModelSpec, downloaded: bool) -> None:
    from worker.device import device_name
    from worker.engine.activations import activations_of
    from worker.prompt.template import chat_obstacle

    template = found.model.template
    source, device = found.model.source, found.device
    quantization = found.model.config.quantization
    revision = f" at {source.revision}" if source.revision else ""
    context = f"{found.context_length:,} tokens"
    if found.longest < found.context_length:
        context += f", of which {found.longest:,} fit beside the weights"
    activations = activations_of(found, spec)
    how = "measured on this machine" if activations.measured else "estimated"
    lines = {
        "model": f"{source.name}{revision}",
        "family": found.model.config.model_type,
        "parameters": f"{found.parameters:,}",
        "weights": f"{_size(found.weight_bytes)} in {found.formats}"
        + (f", dequantised from {quantization.name}" if quantization else "")
        + ("" if downloaded else ", not downloaded yet"),
        **({"products": found.how} if found.how else {}),
        **({"slow": found.slow} if found.slow else {}),
        "activations": f"{_size(activations.nbytes)} in a step, {how}",
        "context": context,
        "template": "none: chat requests fail" if chat_obstacle(template) else "yes",
        **({"ranks": _ranks(found, spec.tensor_parallel)} if spec.tensor_parallel > 1 else {}),
        "device": f"{device} ({device_name(device)}), {_size(found.free_bytes)} free",
        **({"kernels": kernels()} if device.type == "cpu" else {}),
        "fits": "yes" if found.obstacle is None else "no",
    }
    for name, text in lines.items():
        echo(f"{name:<11} {text}")


def _ranks(found: Preflight, ranks: int) -> str:
    """`found.caches` are those of one rank."""
    from worker.layers.cache import sequence_size

    cache = sum(one.bytes_for(sequence_size(found.context_length)) for one in found.caches)
    return (
        f"{ranks}, each with about {_size(found.weight_bytes // ranks)} of the weights and "
        f"{_size(cache)} of the cache of {found.context_length:,} tokens"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

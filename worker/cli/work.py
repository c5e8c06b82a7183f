"""`chatjobs work`: load models and serve their queues.

torch, redis and pyarrow are imported inside the command, so that `--help` stays fast.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from jobs.cli.options import (
    Seconds,
    check_server,
    is_embedded,
    log_format_option,
    quiet_option,
    results_option,
)
from jobs.cli.output import echo
from jobs.cli.stderr import keep_writing
from jobs.errors import JobError
from jobs.log_lines import log_form, log_to_stderr
from worker.cli.device_commands import worker_commands
from worker.cli.options import (
    Address,
    bos_option,
    device_option,
    download_option,
    dtype_option,
    keep_option,
    need_torch,
    parallel_option,
    quantize_option,
    redis_option,
    refusal,
    template_option,
    trust_template_option,
)
from worker.cli.private_redis import private_redis, private_redis_hint
from worker.memory_amount import MemoryAmount
from worker.model_spec import NGRAM, ModelSpec
from worker.named_device import NamedDevice, check_ranks, parse_devices
from worker.option_values import GRACE_SECONDS, MOST_DRAFT_TOKENS, STATE_BYTES, TOOL_PARSERS
from worker.residency.policy import ResidencyPolicy

if TYPE_CHECKING:
    from worker.backend import Backend


def _check_memory(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> MemoryAmount | None:
    try:
        return None if value is None else MemoryAmount.parse(value)
    except JobError as error:
        raise click.BadParameter(error.message) from None


def _check_devices(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[NamedDevice, ...]:
    try:
        return () if value is None else parse_devices(value)
    except JobError as error:
        raise click.BadParameter(error.message) from None


@click.command()
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    metavar="M",
    help="Model to load and serve: 'demo', a folder, a GGUF file or a repository id; repeatable. "
    "Required without --config. With --upstream: its name there, or QUEUE=NAME.",
)
@click.option(
    "--upstream",
    metavar="URL",
    help="Send the jobs to the OpenAI-compatible server at this base URL, such as "
    "http://localhost:8000/v1, instead of loading models; its key is in "
    "CHATJOBS_UPSTREAM_API_KEY.",
)
@click.option(
    "--config",
    envvar="CHATJOBS_CONFIG",
    show_envvar=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="TOML file with the models and an option set for each; other options are their defaults.",
)
@redis_option
@results_option
@click.option(
    "--no-record",
    is_flag=True,
    help="Write no results: leave the rows to the other workers on this Redis.",
)
@device_option
@click.option(
    "--devices",
    callback=_check_devices,
    metavar="D,D",
    help="Run a worker for each device, and start it again when it dies: cuda:N, cpu, or cpu:A-B "
    "for the cores A to B, separated by commas. With --tensor-parallel: one worker on all of them.",
)
@parallel_option
@click.option(
    "--memory",
    envvar="CHATJOBS_MEMORY",
    show_envvar=True,
    callback=_check_memory,
    metavar="AMOUNT",
    help="Memory that all models together may take, with their caches: a percentage of the device "
    "or of the container's limit, or a size such as 12GiB. [default: what is free]",
)
@click.option(
    "--host-memory",
    envvar="CHATJOBS_HOST_MEMORY",
    show_envvar=True,
    callback=_check_memory,
    metavar="AMOUNT",
    help="With --memory: host memory in which unloaded models stay, so that they come back without "
    "their files; a percentage of the machine or a size. On the CPU it is in addition to --memory. "
    "[default: none]",
)
@click.option(
    "--max-wait",
    type=Seconds(min=0),
    default=30,
    show_default=True,
    metavar="S",
    help="With --memory and models that do not fit together: seconds that a job waits for its "
    "model before models with waiting jobs make room.",
)
@dtype_option
@quantize_option
@keep_option
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
    help="Maximum number of sequences in the batch. [default: depends on the device; 64 with "
    "--upstream]",
)
@click.option(
    "--prefix-cache",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Compute what prompts have in common at their beginning only once.",
)
@click.option(
    "--draft",
    "--draft-model",
    "draft",
    metavar="D",
    help="Propose the next tokens and check several in one pass; answers stay the same, up to near "
    "ties in bf16. D: a smaller model with the same vocabulary, or 'ngram', which looks them up in "
    "the prompt and the answer.",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(1, MOST_DRAFT_TOKENS),
    metavar="N",
    help="Most tokens of a proposal; fewer where proposals are often wrong. [default: 4]",
)
@click.option(
    "--interactive-slots",
    type=click.IntRange(min=0),
    metavar="N",
    help="Sequences of the batch that bulk jobs leave to interactive ones. [default: 0; with "
    "--no-preempt a sixteenth of the batch, at least 1]",
)
@click.option(
    "--preempt/--no-preempt",
    default=True,
    show_default=True,
    help="Pause bulk jobs while interactive ones find the batch full.",
)
@click.option(
    "--grace",
    type=Seconds(min=0),
    default=GRACE_SECONDS,
    show_default=True,
    metavar="S",
    help="Seconds that running jobs may continue after SIGTERM. Their rows then get 3 seconds.",
)
@template_option
@trust_template_option
@bos_option
@click.option(
    "--tool-parser",
    type=click.Choice(TOOL_PARSERS),
    metavar="NAME",
    help="Syntax of tool calls in answers: hermes, llama3_json, pythonic or qwen3_coder. [default: "
    "the one that the chat template writes]",
)
@click.option(
    "--prompt-cache",
    "prompt_caches",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of `chatjobs prompts save` to load: requests that begin with its prompt begin with "
    "its state; repeatable.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the state of sessions that memory has no room for, and of all when the worker "
    "stops.",
)
@click.option(
    "--state-bytes",
    type=click.IntRange(min=1),
    default=STATE_BYTES,
    show_default=True,
    metavar="N",
    help="Maximum size of the files in --state-dir; the least recently used are deleted.",
)
@click.option("--burst", is_flag=True, help="Exit when the queues are empty.")
@click.option(
    "--http",
    type=Address(),
    metavar="[HOST:]PORT",
    help="Answer probes and Prometheus there: /healthz, /readyz, /metrics. HOST is 127.0.0.1 if it "
    "is not given.",
)
@log_format_option
@quiet_option
def work(
    models: tuple[str, ...],
    upstream: str | None,
    config: Path | None,
    redis_url: str,
    results: str,
    no_record: bool,
    device: str,
    devices: tuple[NamedDevice, ...],
    tensor_parallel: int,
    memory: MemoryAmount | None,
    host_memory: MemoryAmount | None,
    max_wait: float,
    dtype: str,
    quantize: str | None,
    keep_quantised: bool,
    download_dir: Path | None,
    context: int | None,
    max_batch: int | None,
    prefix_cache: str,
    draft: str | None,
    draft_tokens: int | None,
    interactive_slots: int | None,
    preempt: bool,
    chat_template: Path | None,
    trust_request_chat_template: bool,
    add_bos: bool | None,
    tool_parser: str | None,
    prompt_caches: tuple[Path, ...],
    state_dir: Path | None,
    state_bytes: int,
    grace: float,
    burst: bool,
    http: tuple[str, int] | None,
    log_format: str,
    quiet: bool,
) -> None:
    """Load models and serve their queues until stopped.

    After SIGTERM or Ctrl-C the worker takes no new jobs; running jobs may continue for --grace
    seconds, then they are requeued, and rows have 3 more seconds to be written. A second signal
    stops the worker at once. No job and no row is lost.

    With --devices and without --tensor-parallel this process has a worker process for each device,
    with the other options: it starts one again that dies, hands signals down, and says with its
    exit code how they ended. A percentage of --memory is for all workers on the CPU together, one
    of --host-memory for all workers, and a size for each worker; the first worker takes the port of
    --http, each further one the next.
    """
    upstream_models: list[ModelSpec] | None = None
    if upstream is not None:
        from worker.cli.upstream import open_upstream, upstream_specs

        upstream_models = upstream_specs(models, max_batch)
    if not models and config is None:
        raise click.MissingParameter(param_hint="'-m' / '--model'", param_type="option")
    for option, given in (
        ("--chat-template", chat_template),
        (f"--draft {draft}", draft not in (None, NGRAM)),
        ("--prompt-cache", prompt_caches),
    ):
        if given and (len(models) > 1 or config is not None):
            instead = ", or use --draft ngram" if option.startswith("--draft") else ""
            raise click.UsageError(
                f"{option} is for one model: start a worker for each, or give each its own in the "
                f"file of --config{instead}"
            )
    if devices and _is_given("device"):
        raise click.UsageError("--device is for one worker and --devices for several: give one")
    if draft is None and draft_tokens is not None and config is None:
        raise click.UsageError("--draft-tokens needs --draft: a model, or ngram")
    if state_dir is None and _is_given("state_bytes"):
        raise click.UsageError("--state-bytes needs --state-dir: it limits the files there")
    for option, given in (("--prompt-cache", prompt_caches), ("--state-dir", state_dir)):
        if given and prefix_cache == "off":
            raise click.UsageError(f"{option} needs --prefix-cache on: it feeds that cache")
    rank_devices: tuple[NamedDevice, ...] = ()
    if tensor_parallel > 1:
        rank_devices, devices = devices, ()
        if rank_devices:
            try:
                check_ranks(rank_devices, tensor_parallel)
            except JobError as error:
                raise click.UsageError(f"--tensor-parallel: {error.message}") from None
            device = rank_devices[0].option
        for option, given in (
            ("several models", len(models) > 1),
            ("--config", config is not None),
            ("--memory", memory is not None),
            ("--state-dir", state_dir is not None),
            ("--prompt-cache", prompt_caches),
            ("--draft other than ngram", draft not in (None, NGRAM)),
            ("--quantize", quantize is not None),
        ):
            if given:
                raise click.UsageError(
                    f"--tensor-parallel can't be used with {option}: leave one of them out"
                )
    options = ModelSpec(
        reference="",
        dtype=dtype,
        quantize=quantize,
        keep_quantised=keep_quantised,
        context=context,
        max_batch=max_batch,
        prefix_cache=prefix_cache == "on",
        draft=draft,
        draft_tokens=draft_tokens,
        download_dir=download_dir,
        chat_template=chat_template,
        trust_request_chat_template=trust_request_chat_template,
        add_bos=add_bos,
        tool_parser=tool_parser,
        prompt_caches=prompt_caches,
        tensor_parallel=tensor_parallel,
        rank_devices=rank_devices,
    )
    specs = [replace(options, reference=reference) for reference in models]
    policies: dict[str, ResidencyPolicy] = {}
    if config is not None:
        from worker.cli.worker_config import read_config

        try:
            found = read_config(config)
            specs += [entry.spec(options, config.parent) for entry in found.models]
        except JobError as error:
            raise refusal(error) from None
        policies = {entry.model: entry.policy for entry in found.models}
        if found.max_wait is not None and not _is_given("max_wait"):
            max_wait = found.max_wait
        if found.device is not None and not _is_given("device"):
            device = found.device
        if found.memory is not None and not _is_given("memory"):
            memory = MemoryAmount.parse(found.memory)
        if found.host_memory is not None and not _is_given("host_memory"):
            host_memory = MemoryAmount.parse(found.host_memory)
    if memory is None and _is_given("max_wait"):
        raise click.UsageError("--max-wait needs --memory: without it, all models stay in memory")
    if memory is None and host_memory is not None:
        raise click.UsageError(
            "--host-memory needs --memory: without it, all models stay in memory"
        )
    form = log_form(log_format)
    try:
        commands = worker_commands(
            click.get_current_context(),
            devices,
            memory=memory,
            host_memory=host_memory,
            http=http,
            log_format=form,
        )
    except JobError as error:
        raise refusal(error) from None
    keep_writing()
    if tensor_parallel > 1:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # all ranks are on this machine
    if rank_devices and rank_devices[0].cores is not None:
        os.sched_setaffinity(0, rank_devices[0].cores)  # before torch starts threads
    if not commands and upstream is None:
        need_torch()
    from jobs.store.connection.connect import URL_VARIABLE

    log_to_stderr(form, quiet=quiet)
    with ExitStack() as stack:
        if is_embedded(redis_url):
            url = stack.enter_context(private_redis(redis_url, records=not no_record))
            echo(f"private Redis: --redis {url}, or in other shells:", err=True)
            echo(f"export {URL_VARIABLE}={quote(url)}", err=True)
        else:
            check_server(redis_url, private_redis_hint())
            url = redis_url
        if commands:
            from worker.cli.supervisor import supervise

            supervise(commands, redis_url=url, grace=grace, as_json=form == "json")
            return
        from worker.service import serve

        try:
            backend: Backend
            if upstream is not None:
                backend = open_upstream(upstream, url, interactive_slots)
            else:
                from worker.host.engine_host import EngineHost

                if quiet:
                    from huggingface_hub.utils.tqdm import disable_progress_bars

                    disable_progress_bars()
                backend = EngineHost(
                    device=device,
                    memory=memory,
                    host_memory=host_memory,
                    interactive_slots=interactive_slots,
                    preempt=preempt,
                    state_dir=state_dir,
                    state_bytes=state_bytes,
                )
                if not quiet:
                    echo(f"device: {backend.device.torch}", err=True)
            folder = None if no_record else Path(results)
            serve(
                backend,
                specs if upstream_models is None else upstream_models,
                redis_url=url,
                results=folder,
                grace=grace,
                burst=burst,
                http=http,
                policies=policies,
                max_wait=max_wait,
            )
        except JobError as error:
            raise refusal(error) from None


def _is_given(option: str) -> bool:
    """True if an option is given, on the command line or in the environment."""
    source = click.get_current_context().get_parameter_source(option)
    return source not in (None, click.core.ParameterSource.DEFAULT)

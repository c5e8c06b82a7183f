"""`chatjobs chat`: submit one request and print the answer while it is generated."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.answer import print_job
from jobs.cli.options import Seconds, client, json_option, quiet_option, redis_option

if TYPE_CHECKING:
    from jobs import ChatCompletion, ChatRequest, Client, Job

RESERVED_FIELDS = {"model": "--model", "messages": "TEXT and --system"}


def parse_fields(
    _context: click.Context, _parameter: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, Any]:
    """Parse `key=value` pairs; a value that is not valid JSON is taken as a string."""
    fields: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE")
        if key in RESERVED_FIELDS:
            raise click.BadParameter(f"{key} is set by {RESERVED_FIELDS[key]}")
        try:
            fields[key] = json.loads(value)
        except ValueError:
            fields[key] = value
    return fields


@click.command()
@click.argument("text")
@click.option("-m", "--model", required=True, metavar="M", help="Model that answers.")
@click.option("-s", "--system", metavar="TEXT", help="System message.")
@click.option(
    "-o",
    "--option",
    "fields",
    multiple=True,
    callback=parse_fields,
    metavar="KEY=VALUE",
    help="Field of the chat request, such as temperature=0 or max_tokens=64; repeatable.",
)
@click.option(
    "--wait",
    type=Seconds(min=0),
    default=30,
    show_default=True,
    metavar="S",
    help="Seconds to wait for a worker that serves the model.",
)
@click.option("--verbose", is_flag=True, help="Print token counts and speed on stderr.")
@json_option
@quiet_option
@redis_option
def chat(
    text: str,
    model: str,
    system: str | None,
    fields: dict[str, Any],
    wait: float,
    verbose: bool,
    as_json: bool,
    quiet: bool,
    redis_url: str,
) -> None:
    """Submit one question and print the answer while it is generated.

    TEXT is the user message; - reads it from stdin.

    With --json: the chunks and then the completion, one JSON object per line.
    """
    if text == "-":
        text = sys.stdin.read()
    request = _request(model, system, text, fields)
    with client(redis_url) as connected:
        started = time.monotonic()
        job = connected.submit(request)
        try:
            _wait_for_worker(connected, job, model, wait)
            completion = print_job(job, as_json=as_json, reasoning=not quiet)
        except BaseException:
            with suppress(Exception):  # report what ended the wait, not a failed cancel
                job.cancel()
            raise
        if verbose:
            _print_timings(completion, time.monotonic() - started)


def _request(model: str, system: str | None, text: str, fields: dict[str, Any]) -> ChatRequest:
    from jobs import ChatRequest, JobError

    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    try:
        return ChatRequest(**fields, model=model, messages=messages)
    except JobError as error:
        raise click.UsageError(error.message) from None


def _wait_for_worker(connected: Client, job: Job, model: str, seconds: float) -> None:
    """Return once a worker serves `model` or the job has started; raise after `seconds`."""
    from jobs import JobError
    from jobs.cli.status import workers

    deadline = time.monotonic() + seconds
    while job.status() == "queued":
        served = sorted({name for worker in workers(connected.redis) for name in worker["names"]})
        if model in served:
            return
        if time.monotonic() >= deadline:
            raise JobError(
                "model_not_found",
                f"no worker served {model!r} within {seconds:g} s "
                f"(models served now: {', '.join(served) or 'none'}); "
                f"start a worker: chatjobs work --model {model}",
                "model",
            )
        time.sleep(0.1)


def _print_timings(completion: ChatCompletion, seconds: float) -> None:
    usage = completion.usage
    if usage is None:
        click.echo(f"{seconds:.2f} s", err=True)
        return
    click.echo(
        f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out, {seconds:.2f} s, "
        f"{usage.completion_tokens / seconds:.1f} tokens/s",
        err=True,
    )

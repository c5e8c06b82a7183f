"""`chatjobs chat`: print the answer to a question while it is generated, or hold a conversation."""

from __future__ import annotations

import codecs
import io
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click

from jobs.cli.dialogue import QueuedDialogue, load_local
from jobs.cli.failures import Interrupted, WrongField, WrongInput
from jobs.cli.field_options import fields_option
from jobs.cli.interrupts import interrupts_raise
from jobs.cli.options import (
    Seconds,
    client,
    json_option,
    patience_of,
    quiet_option,
    redis_option,
    timeout_option,
)
from jobs.cli.output import echo
from jobs.cli.printing import print_answer, print_job
from jobs.cli.terminal_chat import Conversation, is_terminal
from jobs.cli.waiting import WaitNotice
from jobs.errors import StreamRestarted, WaitTimeout
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs import ChatCompletion, ChatRequest, Client, Job
    from jobs.api.answer import Usage
    from jobs.cli.dialogue import LocalModel

WITHOUT_REDIS = "answer in this process with --local"  # what chat can do then
UNUSED_SECONDS = 86_400  # a conversation that nobody ends expires after this time


@click.command()
@click.argument("text", required=False)
@click.option("-m", "--model", required=True, metavar="M", help="Model that answers.")
@click.option("-s", "--system", metavar="TEXT", help="System message.")
@fields_option(
    {
        "model": "--model",
        "messages": "TEXT and --system",
        "priority": """-o 'job={"priority": "bulk"}'""",
    }
)
@click.option(
    "--local",
    is_flag=True,
    help="Load the model in this process: M is 'demo', a folder, a GGUF file or a repository id. "
    "No Redis and no worker are needed.",
)
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --local: Jinja chat template to use instead of the model's own.",
)
@click.option(
    "--add-bos/--no-add-bos",
    default=None,
    help="With --local: begin each prompt with the BOS token if the chat template does not write "
    "it. [default: as a GGUF file says; not for others]",
)
@click.option(
    "--keep-quantised",
    is_flag=True,
    help="With --local: keep types of GGUF files that no kernel multiplies with as they are: takes "
    "less memory, and many times as long.",
)
@click.option(
    "--wait",
    type=Seconds(min=0),
    default=30,
    show_default=True,
    metavar="S",
    help="Seconds to wait for a worker that serves the model; a worker loads its models first.",
)
@timeout_option
@click.option("--verbose", is_flag=True, help="Print token counts and speed on stderr.")
@json_option
@quiet_option
@redis_option
def chat(
    text: str | None,
    model: str,
    system: str | None,
    fields: dict[str, Any],
    local: bool,
    chat_template: Path | None,
    add_bos: bool | None,
    keep_quantised: bool,
    wait: float,
    timeout: float | None,
    verbose: bool,
    as_json: bool,
    quiet: bool,
    redis_url: str,
) -> None:
    """Ask one question and print the answer while it is generated.

    TEXT is the user message; - reads it from stdin. Without TEXT, in a terminal: a conversation.
    A worker answers, or with --local this process.

    With --json: the chunks and then the completion, one JSON object per line.
    """
    from jobs import JobError
    from jobs.client.wait import GOES_ON

    _check_options(local, chat_template, add_bos, keep_quantised)
    load = partial(load_local, model, chat_template, add_bos, keep_quantised)
    if text is None:
        if as_json or not is_terminal():
            raise click.UsageError(
                "the question is missing: give TEXT, or - to read it from stdin (a conversation "
                "needs a terminal, without --json)"
            )
        if local:
            _converse_locally(load(quiet=False), system, fields)
        else:
            _converse(redis_url, model, system, fields, wait)
        return
    if text == "-":
        text = _stdin()
    if not text.strip():
        raise click.UsageError("the question is empty: give TEXT, or - to read it from stdin")
    if local:
        _request(model, system, text, fields)  # a wrong field is refused before the load
        loaded = load(quiet=quiet)
        _answer_locally(
            loaded,
            _request(loaded.name, system, text, fields),
            verbose=verbose,
            as_json=as_json,
            quiet=quiet,
        )
        return
    request = _request(model, system, text, fields)
    with (
        client(redis_url, WITHOUT_REDIS, quiet=quiet) as connected,
        WaitNotice(connected.connection, quiet=quiet) as notice,
    ):
        started = time.monotonic()
        connected.serving = None  # the notice says it
        job = _submit(connected, request)
        try:
            notice.watch(job)
            _wait_for_worker(connected, job, model, wait)
            completion = print_job(job, notice, as_json=as_json, quiet=quiet, timeout=timeout)
        except KeyboardInterrupt:
            raise _interrupted(connected, job) from None
        except StreamRestarted:
            raise
        except WaitTimeout as error:
            if not _cancel(connected, job):
                raise
            raise WaitTimeout(f"{error.message.removesuffix(GOES_ON)}; it is cancelled") from None
        except BaseException as error:
            cancelled = _cancel(connected, job)
            if not cancelled and isinstance(error, JobError) and error.code == "unavailable":
                raise JobError("unavailable", f"{error.message}; {_may_go_on(job)}") from error
            raise
        if verbose:
            _print_timings(completion, time.monotonic() - started)


def _check_options(
    local: bool, chat_template: Path | None, add_bos: bool | None, keep_quantised: bool
) -> None:
    """Refuse options that belong to the other way of answering."""
    context = click.get_current_context()
    given = [
        option
        for option, name in (
            ("--redis", "redis_url"),
            ("--wait", "wait"),
            ("--timeout", "timeout"),
        )
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if local and given:
        raise click.UsageError(
            f"{given[0]} is for a worker's answers, and --local answers in this process: give one "
            "of them"
        )
    if chat_template is not None and not local:
        raise click.UsageError(
            "--chat-template needs --local; workers take theirs from chatjobs work --chat-template"
        )
    if add_bos is not None and not local:
        option = "--add-bos" if add_bos else "--no-add-bos"
        raise click.UsageError(f"{option} needs --local; for workers give it to chatjobs work")
    if keep_quantised and not local:
        raise click.UsageError(
            "--keep-quantised needs --local; for workers give it to chatjobs work"
        )


def _answer_locally(
    model: LocalModel, request: ChatRequest, *, verbose: bool, as_json: bool, quiet: bool
) -> None:
    started = time.monotonic()
    with interrupts_raise():
        chunks, result = model.answer(request)
        completion = print_answer(chunks, result, request.n, as_json=as_json, quiet=quiet)
    if verbose:
        _print_timings(completion, time.monotonic() - started)


def _converse_locally(model: LocalModel, system: str | None, fields: dict[str, Any]) -> None:
    from jobs.errors import InvalidRequest

    try:
        dialogue = model.dialogue(system, fields)
    except InvalidRequest as error:
        raise WrongField(error) from None
    with interrupts_raise():
        Conversation(dialogue).run()


def _converse(
    redis_url: str, model: str, system: str | None, fields: dict[str, Any], wait: float
) -> None:
    from jobs.errors import InvalidRequest

    with client(redis_url, WITHOUT_REDIS) as connected:
        connected.serving = None  # the notice says it
        try:
            session = connected.session(model=model, system=system, ttl=UNUSED_SECONDS, **fields)
        except InvalidRequest as error:
            raise WrongField(error) from None
        Conversation(
            QueuedDialogue(
                connected, session, lambda job: _wait_for_worker(connected, job, model, wait)
            )
        ).run()


def _stdin() -> str:
    ascii_only = codecs.lookup(sys.stdin.encoding).name == "ascii"  # the locale C
    encoding = "utf-8" if ascii_only else sys.stdin.encoding
    try:
        return io.TextIOWrapper(sys.stdin.buffer, encoding).read()
    except UnicodeDecodeError as error:
        raise WrongInput(
            f"stdin is not text in {encoding}: {error.reason} at byte {error.start}; "
            "convert it, or set PYTHONIOENCODING to its encoding"
        ) from None


def _submit(connected: Client, request: ChatRequest) -> Job:
    """Enqueue a request. Ctrl-C meanwhile cancels its job, which Redis may have received already,
    but not another one that has the same id."""
    job = connected.job(request.job.id or uuid4().hex)
    taken = request.job.id is not None and job.status() != "unknown"
    options = request.job.model_copy(update={"id": job.id})
    try:
        return connected.submit(request.model_copy(update={"job": options}))
    except KeyboardInterrupt:
        if taken:
            raise
        raise _interrupted(connected, job) from None


def _interrupted(connected: Client, job: Job) -> Interrupted:
    """Cancels the job, and says whether that succeeded."""
    if _cancel(connected, job):
        return Interrupted(f"interrupted; job {job.id} is cancelled")
    return Interrupted(f"interrupted; {_may_go_on(job)}")


def _may_go_on(job: Job) -> str:
    return f"job {job.id} may go on: chatjobs cancel {job.id} stops it"


def _cancel(connected: Client, job: Job) -> bool:
    """Cancel the job. False if that fails, as when Redis does not answer soon: what ended the wait
    is reported instead."""
    from jobs import JobError
    from jobs.store.connection.connect import limit_waits

    limit_waits(connected.redis, patience_of(connected.redis))
    connected.redis.connection_pool.disconnect(inuse_connections=False)
    try:
        job.cancel()
    except JobError:
        return False
    return True


def _request(model: str, system: str | None, text: str, fields: dict[str, Any]) -> ChatRequest:
    from jobs import ChatRequest, JobError

    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    try:
        return ChatRequest(**fields, model=model, messages=messages)
    except JobError as error:
        raise WrongField(error) from None


def _wait_for_worker(connected: Client, job: Job, model: str, seconds: float) -> None:
    """Return once a worker serves `model` or the job has started; raise after `seconds`."""
    from jobs import JobError
    from jobs.client.serving import nobody_serves
    from jobs.store.worker_status import read_statuses

    deadline = time.monotonic() + seconds
    while job.status() in ("deferred", "scheduled", "queued"):
        workers = read_statuses(connected.redis)
        if model in workers.served:
            return
        if time.monotonic() >= deadline:
            raise JobError(
                "model_not_found",
                f"{nobody_serves(model, workers)} after {seconds:g} s: wait longer for one that "
                "still loads its models (--wait S)",
                "model",
            )
        time.sleep(0.1)


def _print_timings(completion: ChatCompletion, seconds: float) -> None:
    usage = completion.usage
    if usage is None:
        echo(f"{seconds:.2f} s", err=True)
        return
    echo(
        f"{counted(usage.prompt_tokens, 'token')} in, {usage.completion_tokens} out, "
        f"{seconds:.2f} s, {usage.completion_tokens / seconds:.1f} tokens/s{_accepted(usage)}",
        err=True,
    )


def _accepted(usage: Usage) -> str:
    """The tokens per step with a draft, as text; empty if no draft proposed tokens."""
    details = usage.completion_tokens_details
    if details is None or not details.prediction_steps:
        return ""
    accepted = details.accepted_prediction_tokens or 0
    drafted = accepted + (details.rejected_prediction_tokens or 0)
    return (
        f", {accepted / drafted:.0%} of the draft accepted, "
        f"{accepted / details.prediction_steps:.1f} tokens a step"
    )

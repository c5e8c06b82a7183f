"""Print a job's answer: as text while it is generated, or as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from jobs.cli.output import echo, print_json
from jobs.errors import StreamRestarted

if TYPE_CHECKING:
    from jobs import ChatChunk, ChatCompletion, Job
    from jobs.api.message import ToolCall
    from jobs.cli.waiting import WaitNotice

RESTARTED = "\nthe job has started again, and its answer differs: it is printed from its start"
CUT = (
    "the answer was cut at its token limit: max_tokens, or the model's context "
    "(chatjobs chat -o max_tokens=N sets another limit)"
)


def print_job(
    job: Job, notice: WaitNotice, *, as_json: bool, quiet: bool, timeout: float | None = None
) -> ChatCompletion:
    """Print a job's stream until it ends and return its completion.

    `notice` says what the job waits for until its first chunk. `timeout`: see `Job.stream`. An
    answer that differs from the part that is printed, since its job has started again, is printed
    from its start on a terminal; elsewhere, where a program reads it, that is an error. Raises the
    JobError of a failed job.
    """
    notice.watch(job)
    may_reset = as_json or sys.stdout.isatty()
    stream = job.stream(timeout=timeout, on_restart="reset" if may_reset else "raise")
    chunks = notice.until_first(stream)
    try:
        return print_answer(chunks, job.result, job.request.n, as_json=as_json, quiet=quiet)
    except StreamRestarted:
        raise StreamRestarted(
            f"job {job.id} has started again, and its answer differs from the part that is "
            f"printed: discard that; chatjobs follow {job.id} prints the new answer",
            job.id,
        ) from None


def print_answer(
    chunks: Iterable[ChatChunk],
    result: Callable[[], ChatCompletion],
    n: int | None,
    *,
    as_json: bool,
    quiet: bool,
) -> ChatCompletion:
    """Print chunks until they end, and return the completion. With `as_json`: the chunks, then the
    completion. `result` returns it after the chunks, or raises the JobError of the request. Each
    of several choices (`n` of the request) has a line before it, on stdout as the choice is."""
    if as_json:
        for chunk in chunks:
            print_json(chunk.to_dict())
        completion = result()
        print_json(completion.to_dict())
    else:
        print_stream(_labelled(chunks, n or 1), quiet=quiet)
        completion = result()
        print_calls(completion.choices[0].message.tool_calls or ())
        print_other_choices(completion)
        if not quiet and any(choice.finish_reason == "length" for choice in completion.choices):
            echo(CUT, err=True)
    return completion


def print_stream(chunks: Iterable[ChatChunk], *, quiet: bool = False) -> None:
    """Print the first choice while it arrives.

    Content goes to stdout. Reasoning is dim; it goes to stdout on a terminal, else to stderr. With
    `quiet`, only the content is printed.
    """
    terminal = sys.stdout.isatty()
    printed = thought = False
    for chunk in chunks:
        if chunk.reset:
            echo("" if quiet else RESTARTED, err=not quiet)
            printed = thought = False
        for choice in chunk.choices:
            if choice.index != 0:
                continue
            if choice.delta.reasoning_content and not quiet:
                thought = True
                echo(choice.delta.reasoning_content, nl=False, err=not terminal, dim=True)
            if choice.delta.content:
                if thought and not printed:
                    echo("\n", err=not terminal)
                printed = True
                echo(choice.delta.content, nl=False)
    if printed:
        echo()


def print_calls(calls: Iterable[ToolCall | dict[str, Any]]) -> None:
    """Print tool calls, one per line."""
    for call in calls:
        echo(call_text(call))


def call_text(call: ToolCall | dict[str, Any]) -> str:
    """A tool call, or its dict in OpenAI's form, as text: its name and its arguments in JSON."""
    function = call["function"] if isinstance(call, dict) else call.function.to_dict()
    return f"{function['name']}({function['arguments']})"


def _labelled(chunks: Iterable[ChatChunk], count: int) -> Iterator[ChatChunk]:
    """The chunks; the label of the first of several choices is printed before them."""
    for number, chunk in enumerate(chunks):
        if number == 0 and count > 1:
            echo(_choice_label(1, count))
        yield chunk


def print_other_choices(completion: ChatCompletion) -> None:
    """Print all choices but the first, which `print_stream` prints."""
    for number, choice in enumerate(completion.choices[1:], start=2):
        echo()
        echo(_choice_label(number, len(completion.choices)))
        if choice.message.content or not choice.message.tool_calls:
            echo(choice.message.content or "")
        print_calls(choice.message.tool_calls or ())


def _choice_label(number: int, count: int) -> str:
    return f"choice {number} of {count}:"

"""Runs templates in a child process: the chat templates of models, and the prompt templates of data
sets. See renderer.py for the limits that it enforces.

The child is started with the first template, and again after a template has exceeded a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from jobs.errors import JobError, invalid
from jobs.install import command_for
from worker.prompt.limited_process import Ended, LimitedProcess

RENDER_SECONDS = 2.0  # CPU time of one rendering
RENDER_BYTES = 2 * 2**30  # address space of the child
KIND = "chat template"
WHOSE = f"the model's {KIND}"
REMEDY = "; put a valid chat_template.jinja into its folder, or start it with --chat-template FILE"
MAX_REASON = 300  # characters of a template's reason in an error message


class Sandbox:
    """Renders templates in a child process, one at a time. Thread-safe.

    `kind`, `whose`, `given` and `remedy`: for errors, what the templates are, whose they are, what
    they get, and what to do about a broken one. `strict`: a name that has no value is an error.
    `field`: of a request, which has the templates; a broken one is an invalid request then.
    """

    def __init__(
        self,
        kind: str = KIND,
        whose: str = WHOSE,
        given: str = "messages",
        remedy: str = REMEDY,
        *,
        strict: bool = False,
        field: str | None = None,
    ) -> None:
        self._field = field
        self._whose, self._given, self._remedy = whose, given, remedy
        self._strict = strict
        self._child = LimitedProcess(
            f"the process that renders {kind}s", "worker.prompt.renderer", RENDER_BYTES
        )

    def check(self, template: str) -> None:
        """Raises JobError("unsupported_model") if the template isn't valid Jinja."""
        try:
            template.encode()
        except UnicodeEncodeError:
            raise self._broken("contains half a character (a lone surrogate)") from None
        self._request(template, None)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Render a template with JSON values. Raises JobError: invalid_request if it rejects them,
        unsupported_model if it is broken, is blocked by the sandbox, or exceeds its limits."""
        return self._request(template, values)

    def _request(self, template: str, values: Mapping[str, Any] | None) -> str:
        request = {
            "template": template,
            "values": values,
            "seconds": RENDER_SECONDS,
            "strict": self._strict,
        }
        try:
            reply = self._child.exchange(request, last="endless")
        except Ended as ended:
            if not ended.overtime:
                raise JobError("internal", f"{ended}: try again") from None
            reply = {"endless": f"it was stopped after {RENDER_SECONDS:g} s"}
        if "text" in reply:
            return str(reply["text"])
        match {kind: _shortened(str(reason)) for kind, reason in reply.items()}:
            case {"invalid": reason}:
                raise self._broken(f"is not valid Jinja ({reason})")
            case {"refused": reason}:
                raise invalid(f"{self._whose} refuses: {reason}", self._given)
            case {"escaped": reason}:
                raise self._broken(f"is blocked by the sandbox: {reason}")
            case {"failed": reason}:
                raise invalid(f"{self._whose} fails on these {self._given}: {reason}", self._given)
            case {"endless": reason}:
                raise self._broken(f"exceeds the limits of the sandbox: {reason}")
        raise JobError("internal", f"the process that renders templates replied {reply!r}")

    def _broken(self, fact: str) -> JobError:
        message = f"{self._whose} {fact}{self._remedy}"
        if self._field is not None:
            return invalid(message, self._field)
        return JobError("unsupported_model", message)


def _shortened(reason: str) -> str:
    """One line of at most MAX_REASON characters: a template may quote whole messages."""
    line = " ".join(reason.split())
    if len(line) <= MAX_REASON:
        return line
    return f"{line[:MAX_REASON]}… ({len(line)} characters)"


@cache
def shared_sandbox() -> Sandbox:
    """The sandbox of this process: one child renders the templates of all models."""
    return Sandbox()


def for_rows(kind: str) -> Sandbox:
    """A sandbox for a template of a data set, which errors call `kind`; `chatjobs run` finds it
    through the entry-point group chatjobs.templates. Raises JobError without Jinja."""
    if find_spec("jinja2") is None:
        command = command_for("worker")
        raise JobError("unavailable", f"templates need Jinja, and it is not installed: {command}")
    return Sandbox(kind, f"the {kind}", "columns", "", strict=True)

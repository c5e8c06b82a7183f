"""Runs chat templates in a child process. See renderer.py for the limits that it enforces.

The child is started with the first template, and again after a template has exceeded a limit.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from jobs.errors import JobError, invalid

MAX_SECONDS = 2.0  # CPU time of one rendering
MAX_WAIT = 60.0  # wall-clock time of one rendering, in seconds
MAX_BYTES = 2 * 2**30  # address space of the child
MAX_REASON = 300  # characters of a template's reason in an error message
EXIT_SECONDS = 1.0  # how long a child that closed its output may take to exit


class Sandbox:
    """Renders templates in a child process, one at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, template: str) -> None:
        """Raises JobError("unsupported_model") if the template isn't valid Jinja."""
        self._request(template, None)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Render a template with JSON values. Raises JobError: invalid_request if it rejects them,
        unsupported_model if it is broken, leaves the sandbox or doesn't end."""
        return self._request(template, values)

    def _request(self, template: str, values: Mapping[str, Any] | None) -> str:
        request = {"template": template, "values": values, "seconds": MAX_SECONDS}
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            reply = self._exchange(line)
        if "text" in reply:
            return str(reply["text"])
        match {kind: _shortened(str(reason)) for kind, reason in reply.items()}:
            case {"invalid": reason}:
                raise _broken(f"is not valid Jinja ({reason})")
            case {"refused": reason}:
                raise invalid(f"the model's chat template refuses: {reason}", "messages")
            case {"escaped": reason}:
                raise _broken(f"leaves its sandbox: {reason}")
            case {"failed": reason}:
                fact = f"the model's chat template fails on these messages: {reason}"
                raise invalid(fact, "messages")
            case {"endless": reason}:
                raise _broken(f"doesn't seem to end: {reason}")
        raise JobError("internal", f"the process that renders chat templates replied {reply!r}")

    def _exchange(self, line: bytes) -> dict[str, Any]:
        """Send one request and read its reply. Ends the child if it exceeded a limit."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        reply = None
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
            reply = self._read_reply(process)
        if reply is not None and "endless" not in reply:
            return reply
        self._process = None
        with suppress(subprocess.TimeoutExpired):
            process.wait(0 if reply is not None else EXIT_SECONDS)
        status = process.returncode
        process.kill()
        process.wait()
        if reply is not None:
            return reply
        if status is None or status == -signal.SIGPROF:
            return {"endless": f"it was stopped after {MAX_SECONDS:g} s"}
        raise JobError(
            "internal", f"the process that renders chat templates ended ({status}): try again"
        )

    def _read_reply(self, process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
        """The reply; None if the child exits or exceeds MAX_WAIT."""
        assert process.stdout is not None
        deadline = time.monotonic() + MAX_WAIT
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            chunk = process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
            if not chunk:
                return None
            line += chunk
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        # The new session keeps the terminal's Ctrl-C from the child. It exits when stdin closes.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "worker.prompt.renderer", str(MAX_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )


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


def _broken(fact: str) -> JobError:
    return JobError(
        "unsupported_model",
        f"the model's chat template {fact}; put a valid chat_template.jinja into its folder",
    )

"""Where chat templates run: a process of their own, started when it is needed and again when a
template has ended it. See worker/renderer.py for what it keeps them from."""

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
from typing import Any

from jobs.errors import JobError, invalid

MAX_SECONDS = 2.0  # of one rendering, on a core
MAX_WAIT = 60.0  # seconds, however busy the machine is
MAX_BYTES = 2 * 2**30  # of the process
END_SECONDS = 1.0  # how long a process may take to end that has closed its output


class Sandbox:
    """Renders templates, one at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, template: str) -> None:
        """Raises JobError("unsupported_model") if it isn't Jinja."""
        self._ask(template, None)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """The text that a template makes of JSON values. Raises JobError: invalid_request where
        it says no, unsupported_model where it is broken, leaves the sandbox or doesn't end."""
        return self._ask(template, values)

    def _ask(self, template: str, values: Mapping[str, Any] | None) -> str:
        asked = {"template": template, "values": values, "seconds": MAX_SECONDS}
        line = json.dumps(asked).encode() + b"\n"
        with self._lock:
            said = self._talk(line)
        match said:
            case {"text": text}:
                return str(text)
            case {"invalid": why}:
                raise _broken(f"is not valid Jinja ({why})")
            case {"refused": why}:
                raise invalid(f"the model's chat template refuses: {why}", "messages")
            case {"escaped": why}:
                raise _broken(f"leaves its sandbox: {why}")
            case {"failed": why}:
                fact = f"the model's chat template fails on these messages: {why}"
                raise invalid(fact, "messages")
            case {"endless": why}:
                raise _broken(f"doesn't seem to end: {why}")
        raise JobError("internal", f"the process that renders chat templates says {said!r}")

    def _talk(self, line: bytes) -> dict[str, Any]:
        """One question, one answer. A process that a template has used up makes way for another."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        answer = None
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
            answer = self._read(process)
        if answer is not None and "endless" not in answer:
            return answer
        self._process = None
        with suppress(subprocess.TimeoutExpired):
            process.wait(0 if answer is not None else END_SECONDS)
        stopped = process.returncode
        process.kill()
        process.wait()
        if answer is not None:
            return answer
        if stopped is None or stopped == -signal.SIGPROF:
            return {"endless": f"it was stopped after {MAX_SECONDS:g} s"}
        raise JobError(
            "internal", f"the process that renders chat templates ended ({stopped}): try again"
        )

    def _read(self, process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
        """The answer; None if there is none because the process ended, or doesn't in MAX_WAIT."""
        assert process.stdout is not None
        deadline = time.monotonic() + MAX_WAIT
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        said = b""
        while not said.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            piece = process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
            if not piece:
                return None
            said += piece
        answer: dict[str, Any] = json.loads(said)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C at the terminal is for us. It ends when its input does.
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "worker.prompt.renderer", str(MAX_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )


SANDBOX = Sandbox()  # one process for the templates of all models


def _broken(fact: str) -> JobError:
    return JobError(
        "unsupported_model",
        f"the model's chat template {fact}; put a sound chat_template.jinja into its folder",
    )

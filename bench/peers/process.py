"""Runs a peer engine in its own environment and measures it over a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import IO, Any, Self

import click

from bench.harness import resident_bytes
from bench.peers.closed_loop import Request
from bench.serving import Served

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(".bench-peers")  # made by `make bench-peers`
PYTHON = ENVIRONMENT / "bin" / "python"
STOP_SECONDS = 30  # until one that does not end is killed
OTHERS = {"chatjobs_peer": Path(sys.executable), "vllm_peer": ENVIRONMENT / "vllm/bin/python"}


class PeerFailed(Exception):
    """A peer ended instead of answering, or was ended at its limit: what it was asked, it can't do
    on this machine."""


class PeerProcess:
    """Runs the module `name` of this package with a model; a context manager. protocol.py has the
    questions. The process is started when it is first asked, and again after it failed. `limit`:
    seconds after its start at which it is killed."""

    def __init__(self, name: str, model: Path, threads: int, limit: float | None = None) -> None:
        python = OTHERS.get(name, PYTHON)
        if not (ROOT / python).exists():
            raise click.ClickException(f"{python} is missing: run `make bench-peers` first")
        arguments = ["-m", f"bench.peers.{name}", str(model.absolute()), str(threads)]
        self._command = [str(ROOT / python), *arguments]
        self._threads = str(threads)
        self._limit, self._is_late, self._timer = limit, False, Timer(0, lambda: None)
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds to prefill all prompts and to generate `tokens` tokens for each of them. Raises
        PeerFailed."""
        found: float = self._ask({"prompts": prompts, "tokens": tokens})["seconds"]
        return found

    def turn(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        """Seconds to the first of `tokens` tokens after a prompt, of which the peer keeps what the
        prompt before it had in common, and these tokens. Raises PeerFailed."""
        reply = self._ask({"turn": prompt, "tokens": tokens})
        return reply["seconds"], reply["answer"]

    def load(self) -> float:
        """Seconds to read the model file once more. Raises PeerFailed."""
        found: float = self._ask({"load": True})["seconds"]
        return found

    def serve(self, requests: list[Request], at_once: int) -> Served:
        """Serve requests, of which `at_once` run at any time. Raises PeerFailed."""
        reply = self._ask({"serve": requests, "at_once": at_once})
        return Served(reply["submitted"], reply["arrivals"])

    def peak_bytes(self) -> int:
        """The largest resident set of the process so far, with pages of mapped files."""
        assert self._process is not None
        return resident_bytes(self._process.pid)["VmHWM"]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            variables = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **dict.fromkeys(variables, self._threads)},
                process_group=0,  # with its children, which may keep its pipes open
            )
            self._watch(self._process)
            self._read(self._process)  # "ready"
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as `_read` sees
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._read(self._process)

    def _watch(self, process: subprocess.Popen[str]) -> None:
        self._is_late = False
        if self._limit is not None:
            self._timer = Timer(self._limit, self._end_late, [process])
            self._timer.daemon = True
            self._timer.start()

    def _end_late(self, process: subprocess.Popen[str]) -> None:
        self._is_late = True
        _kill(process)

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.endswith("\n"):
            status = self._stop()
            if self._is_late:
                raise PeerFailed(f"did not end in {self._limit:g} s")
            raise PeerFailed(f"{self._last_words() or 'no output'} (exit status {status})")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _last_words(self) -> str:
        """The last line that the process wrote to stderr."""
        assert self._errors is not None
        with self._errors as errors:
            errors.seek(0)
            lines = [line.strip() for line in errors if line.strip()]
        return lines[-1] if lines else ""

    def _stop(self) -> int | None:
        if self._process is None:
            return None
        self._timer.cancel()
        process, self._process = self._process, None
        with suppress(BrokenPipeError), process:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                _kill(process)
        return process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if self._errors is not None:
            self._errors.close()


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def export_openvino(source: Path, weight_format: str, target: Path) -> Path:
    """A model folder in OpenVINO's format: fp16, int8 or int4 weights, by optimum-intel. An
    earlier export is used again."""
    if (target / "openvino_model.bin").exists():
        return target
    print(f"  exporting {target} for OpenVINO", file=sys.stderr)
    command = [str(ROOT / ENVIRONMENT / "bin" / "optimum-cli"), "export", "openvino"]
    options = ["--task", "text-generation-with-past", "--weight-format", weight_format]
    done = subprocess.run(
        [*command, "--model", str(source), *options, str(target)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise click.ClickException(f"optimum-cli failed: {done.stderr.strip().splitlines()[-1]}")
    return target

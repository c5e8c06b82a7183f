"""Runs a peer engine in its own environment and measures it over a pipe."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click

ENVIRONMENT = Path(".bench-peers")  # made by `make bench-peers`
PYTHON = ENVIRONMENT / "bin" / "python"
HERE = Path(__file__).parent


class PeerFailed(Exception):
    """A peer ended instead of answering: what it was asked, it can't do on this machine."""


class PeerProcess:
    """Runs `python <script> <model> <threads>`; a context manager. The protocol: llama_cpp_peer.
    The process is started when it is first asked, and again after it failed."""

    def __init__(self, script: str, model: Path, threads: int) -> None:
        if not PYTHON.exists():
            raise click.ClickException(f"{ENVIRONMENT} is missing: run `make bench-peers` first")
        self._command = [str(PYTHON), str(HERE / script), str(model), str(threads)]
        self._process: subprocess.Popen[str] | None = None

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

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._read(self._process)  # "ready"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read(self._process)

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("{"):
            self._stop()
            raise PeerFailed(line.strip() or "no output")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()


def export_openvino(source: Path, weight_format: str, target: Path) -> Path:
    """A model folder in OpenVINO's format: fp16, int8 or int4 weights, by optimum-intel. An
    earlier export is used again."""
    if (target / "openvino_model.bin").exists():
        return target
    command = [str(ENVIRONMENT / "bin" / "optimum-cli"), "export", "openvino"]
    options = ["--task", "text-generation-with-past", "--weight-format", weight_format]
    done = subprocess.run(
        [*command, "--model", str(source), *options, str(target)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise click.ClickException(f"optimum-cli failed: {done.stderr.strip().splitlines()[-1]}")
    return target

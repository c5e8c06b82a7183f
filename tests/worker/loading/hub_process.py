"""Runs code against the fake hub, each time in a fork of one process that has imported torch.

huggingface_hub reads its environment variables once, on import: a fork imports it after they are
set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from tests.hub import Hub

ROOT = Path(__file__).parents[3]
# What the forks use and what doesn't read these variables. The hub library's HTTP client differs
# between its versions.
IMPORTED = ("httpx", "httpx2", "jobs.cli", "worker.loading.source", "worker.engine.local")
OUTPUTS = ("stdout", "stderr")


class HubProcess:
    """A process whose forks run Python code or commands, one after the other."""

    def __init__(self, outputs: Path) -> None:
        """`outputs`: a folder for what the forks write."""
        self._outputs = outputs
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(outputs)],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(
        self, code: str, words: list[str], hub: Hub, home: Path, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the code with the words as its arguments. An empty setting removes the variable."""
        environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **settings,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([code, words, environment]) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        stdout, stderr = ((self._outputs / name).read_text("utf-8") for name in OUTPUTS)
        return subprocess.CompletedProcess(words, status, stdout, stderr)

    def command(
        self, *words: str, hub: Hub, home: Path, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `chatjobs WORDS`."""
        code = "from jobs.cli import main; main()"
        return self.run(code, ["chatjobs", *words], hub, home, **settings)


def serve(outputs: Path) -> None:
    for name in IMPORTED:
        if find_spec(name):
            import_module(name)
    assert "huggingface_hub" not in sys.modules
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code, words, environment = json.loads(line)
            _run(code, words, environment, outputs)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(code: str, words: list[str], environment: dict[str, str], outputs: Path) -> None:
    for number, name in enumerate(OUTPUTS, 1):
        file = os.open(outputs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value
    sys.argv = words
    status = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))

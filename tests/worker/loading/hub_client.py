"""Code and commands that use a fake hub, each in a process of its own.

huggingface_hub reads its environment variables once, on import: the processes are forked from one
that has not imported it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.forked import COMMAND
from tests.hub import Hub


def run_code(
    code: str, words: list[str], hub: Hub, home: Path, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run the code with the words as its arguments. An empty setting removes the variable."""
    return _run([sys.executable, "-m", "tests.run_code", code, *words], hub, home, settings)


def run_command(
    *words: str, hub: Hub, home: Path, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run `chatjobs WORDS`. An empty setting removes the variable."""
    return _run([COMMAND, *words], hub, home, settings)


def _run(
    command: list[str], hub: Hub, home: Path, settings: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **settings,
    }
    environment = {name: value for name, value in environment.items() if value}
    return subprocess.run(command, env=environment, capture_output=True, text=True)

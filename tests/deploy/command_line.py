"""Parses a command line of a shipped file with the parser of `chatjobs`, and runs nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from jobs.cli import build
from worker.cli.worker_config import WorkerConfig, read_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def options_of(words: Sequence[str], files: Mapping[str, Path] | None = None) -> dict[str, Any]:
    """The values of the options of `chatjobs WORDS`, by parameter; the name of the command is
    `command`. `files` says where in the repository the files lie that the line names. The
    environment of this process sets none."""
    places = {name: str(path) for name, path in (files or {}).items()}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("CHATJOBS_")]:
            patch.delenv(name)
        command: Any = build()
        name, context = "chatjobs", click.Context(command)
        rest = [places.get(word, word) for word in words]
        while isinstance(command, click.Group) and rest:  # such as `workers`, and then `drain`
            name, *rest = rest
            found = command.get_command(context, name)
            assert found is not None, f"chatjobs takes no {name} in: {' '.join(words)}"
            command = found
        options: dict[str, Any] = command.make_context(name, rest, parent=context).params
        return {**options, "command": name}


def config_of(path: Path) -> WorkerConfig:
    return read_config(path)

"""The path of `chatjobs`, for commands that start further ones."""

from __future__ import annotations

import os
import shutil
import sysconfig

from jobs.cli.failures import Unavailable
from jobs.install import command_for


def own_command() -> str:
    """Return the path of the `chatjobs` command of this environment."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which("chatjobs", path=path)
    if found is None:
        raise Unavailable(f"command not found: chatjobs; {command_for('worker')}")
    return found

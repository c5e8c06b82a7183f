"""The `chatjobs` command: this file puts the commands together; each command is a file beside it.

What needs redis, pyarrow or torch is imported inside the commands, so that help and completion stay
quick. The worker package adds its commands (`work`, `demo`) through an entry-point group.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import click

from jobs.cli.chat import chat
from jobs.cli.failures import Commands, context_settings
from jobs.cli.jobs import cancel, follow
from jobs.cli.results import results
from jobs.cli.status import status
from jobs.cli.submit import submit


def build() -> click.Group:
    """The command with everything that is installed."""
    group = Commands(
        name="chatjobs",
        help=(
            "Chat-completion jobs on Redis queues, run by workers that keep their models loaded."
            "\n\nstdout carries data, stderr everything else. Exit codes: 0 fine, 1 a job failed, "
            "2 wrong usage, 3 Redis, a model or the disk isn't there, 130 interrupted."
        ),
        context_settings=context_settings(),
    )
    for plugin in sorted(entry_points(group="chatjobs.commands"), reverse=True):
        group.add_command(plugin.load())
    for command in (chat, submit, follow, cancel, status, results):
        group.add_command(command)
    return click.version_option(package_name="chatjobs")(group)


def main() -> None:
    build()(prog_name="chatjobs")

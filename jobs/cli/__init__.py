"""The `chatjobs` command: this file puts the commands together; each command is a file beside it.

What needs redis, pyarrow or torch is imported inside the commands, so that help and completion stay
quick. The worker package adds its commands (`work`, `demo`) through an entry-point group.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import click

from jobs.cli.chat import chat
from jobs.cli.failures import INTERRUPTED, Commands, context_settings, nowhere
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
            "2 wrong usage, 3 Redis, a model, a device or the disk isn't there, 130 interrupted, "
            "141 nobody reads stdout any more."
        ),
        context_settings=context_settings(),
    )
    for plugin in sorted(entry_points(group="chatjobs.commands"), reverse=True):
        group.add_command(plugin.load())
    for command in (chat, submit, follow, cancel, status, results):
        group.add_command(command)
    return click.version_option(package_name="chatjobs")(group)


def main() -> None:
    if sys.stdout is None:  # it was closed before we began; the next file must not take its place
        sys.stdout = nowhere()
    try:
        build()(prog_name="chatjobs")
    except KeyboardInterrupt:  # while a command was still being imported
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)

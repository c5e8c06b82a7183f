"""The `chatjobs` command line: this file assembles the group; each command has its own file.

Commands import redis, pyarrow and torch inside their functions, so that help and completion stay
fast. The worker package adds `work`, `demo` and `models` through an entry-point group.
"""

from __future__ import annotations

from jobs.cli.interrupts import exit_on_interrupt, exit_on_termination

TYPE_CHECKING = False  # without `typing`: nothing is imported before Ctrl-C is handled
if TYPE_CHECKING:
    import click

HELP = """\
Chat-completion jobs on Redis queues, run by workers that keep their models loaded.

Data goes to stdout, everything else to stderr. Exit codes: 0 success, 1 a job or a check failed,
2 wrong usage or an invalid request, 3 Redis, a model, a device or the disk is unavailable, 130
interrupted, 141 the reader of stdout closed it.
"""


def build() -> click.Group:
    """Return the `chatjobs` group with the commands of all installed packages."""
    from importlib.metadata import entry_points

    import click

    from jobs.cli.bench import bench
    from jobs.cli.chat import chat
    from jobs.cli.diff import diff
    from jobs.cli.failures import CommandGroup, context_settings
    from jobs.cli.follow import follow
    from jobs.cli.jobs import cancel, jobs_group
    from jobs.cli.limits import limits
    from jobs.cli.lm_eval import lm_eval
    from jobs.cli.record import record
    from jobs.cli.report import report
    from jobs.cli.results import results
    from jobs.cli.run import run
    from jobs.cli.score import score
    from jobs.cli.serve import serve
    from jobs.cli.status import status
    from jobs.cli.submit import submit
    from jobs.cli.workers import workers

    group = CommandGroup(name="chatjobs", help=HELP, context_settings=context_settings())
    for plugin in sorted(entry_points(group="chatjobs.commands"), reverse=True):
        group.add_command(plugin.load())
    of_jobs = (
        *(chat, submit, run, follow, cancel, jobs_group, status, workers, limits, bench),
        serve,
    )
    of_results = (record, results, score, diff, report, lm_eval)
    for command in (*of_jobs, *of_results):
        group.add_command(command)
    return click.version_option(package_name="chatjobs")(group)


def main() -> None:
    """Run the command line; the console script `chatjobs` calls this."""
    exit_on_interrupt()
    exit_on_termination()
    import atexit
    import gc

    # Else the interpreter searches all of torch's objects for garbage before it ends: one second.
    atexit.register(gc.freeze)
    from jobs.cli.output import open_streams

    open_streams()
    build()(prog_name="chatjobs")

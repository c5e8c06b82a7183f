"""The options that select jobs: by state, run, model, tenant, session, error and age."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.options import Seconds
from jobs.errors import ERROR_CODES

if TYPE_CHECKING:
    from jobs import Client
    from jobs.store.find_jobs import FoundJob, Selection

STATES = ("deferred", "scheduled", "queued", "started", "finished", "failed", "cancelled")
MEANT = {"running": "started", "canceled": "cancelled", "done": "finished"}  # words for states
SELECTORS = ("states", "run", "model", "tenant", "session", "code", "older")


class _Known(click.Choice[str]):
    """One of some words; the error says which is meant."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            meant = [MEANT.get(value, "")] if MEANT.get(value) in self.choices else []
            meant += get_close_matches(value, self.choices, 1)
            hint = f"did you mean {meant[0]!r}?" if meant else f"known: {', '.join(self.choices)}"
            self.fail(f"{value!r} is not known; {hint}", param, ctx)
        return str(value)


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that select jobs; the command gets them as one dict, `chosen`."""

    @click.option("--state", "states", type=_Known(STATES), multiple=True, help="State.")
    @click.option("--run", metavar="ID", help="Run.")
    @click.option("-m", "--model", metavar="M", help="Model.")
    @click.option("--tenant", metavar="T", help="Tenant.")
    @click.option("--session", metavar="ID", help="Session.")
    @click.option(
        "--code",
        type=_Known(ERROR_CODES),
        metavar="CODE",
        help="Error code, such as worker_lost.",
    )
    @click.option(
        "--older",
        type=Seconds(min=0),
        metavar="S",
        help="Seconds since the job ended, or since it was enqueued.",
    )
    @functools.wraps(command)
    def with_selection(**given: Any) -> Any:
        chosen = {name: given.pop(name) for name in SELECTORS}
        chosen = {name: value for name, value in chosen.items() if value not in (None, ())}
        return command(chosen=chosen, **given)

    return with_selection


def find(connected: Client, chosen: dict[str, Any], default: tuple[str, ...]) -> Iterator[FoundJob]:
    """The jobs that are selected. `default`: their states if `chosen` has none."""
    from jobs.store.connection.protocol import iterate_sync
    from jobs.store.find_jobs import find_jobs

    return iterate_sync(find_jobs(_selection(chosen, default)), connected.connection)


def find_newest(
    connected: Client, chosen: dict[str, Any], default: tuple[str, ...], limit: int
) -> Iterator[FoundJob]:
    """The newest `limit` of the same jobs, newest first."""
    from jobs.store.connection.protocol import iterate_sync
    from jobs.store.find_jobs import newest_jobs

    return iterate_sync(newest_jobs(_selection(chosen, default), limit), connected.connection)


def _selection(chosen: dict[str, Any], default: tuple[str, ...]) -> Selection:
    from jobs.store.find_jobs import Selection
    from jobs.store.job_state import Status

    states = tuple(Status(name) for name in chosen.get("states") or default)
    return Selection(**{**chosen, "states": states})

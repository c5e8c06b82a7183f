"""`chatjobs limits`: show the limits of queues and requests, or set some for all programs."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

import click

from jobs import keys
from jobs.cli.failures import WrongInput, show_warning
from jobs.cli.options import client, json_option, redis_option
from jobs.cli.output import echo, print_json

if TYPE_CHECKING:
    from redis import Redis

DEFAULT = "default"
MAX_DIGITS = 30  # any number of more digits is above all limits


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    value: int | None  # None: back to the default


@click.command()
@click.argument("settings", metavar="[NAME=N]...", nargs=-1)
@click.option("-m", "--model", metavar="M", help="Limits of this model alone: jobs and bytes.")
@click.option("--tenant", metavar="T", help="Limits of this tenant alone: tenant_running.")
@json_option
@redis_option
def limits(
    settings: tuple[str, ...], model: str | None, tenant: str | None, as_json: bool, redis_url: str
) -> None:
    """Show all limits, or set some: jobs=5000, bytes=1000000000, jobs=default.

    They are kept in Redis. Producers and workers obey them at once.
    """
    from jobs.errors import InvalidRequest
    from jobs.store.limits import check_limit, read_limits, read_own_limits, set_limit

    parsed = [_parse(text) for text in settings]
    for setting in parsed:
        try:
            check_limit(setting.name, setting.value, model, tenant)
        except InvalidRequest as error:
            raise WrongInput(error.message) from None
    with client(redis_url) as connected:
        for setting in parsed:
            set_limit(connected.redis, setting.name, setting.value, model, tenant)
        if model is not None and parsed:
            _warn_if_unknown(connected.redis, model)
        values = read_limits(connected.redis)._asdict() | read_own_limits(connected.redis)
    if as_json:
        print_json(values)
        return
    width = max(map(len, values))
    for name, value in values.items():
        echo(f"{name:{width}}  {value}")


def _warn_if_unknown(redis: Redis, model: str) -> None:
    """Warn about a model that no worker serves and that has no queue: it may be a typing error."""
    from jobs.client.serving import nobody_serves, who_loads
    from jobs.store.rq_layout import queue_names
    from jobs.store.worker_status import read_statuses

    workers = read_statuses(redis)
    known = workers.served | set(map(keys.model_of, queue_names(redis)))
    if model in known or who_loads(model, workers.loading):
        return
    close = get_close_matches(model, sorted(known), 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    show_warning(f"{nobody_serves(model, workers)}, and it has no jobs{hint}")


def _parse(text: str) -> _Setting:
    name, equals, value = text.partition("=")
    if not equals or not ((value.isascii() and value.isdigit()) or value == DEFAULT):
        raise WrongInput(f"{text!r}: a limit is set as NAME=N or NAME={DEFAULT}, with N in digits")
    if value == DEFAULT:
        return _Setting(name, None)
    return _Setting(name, int(value) if len(value) < MAX_DIGITS else 10**MAX_DIGITS)

"""`chatjobs limits`: show the limits of queues and requests, or set some for all programs."""

from __future__ import annotations

from dataclasses import dataclass

import click

from jobs.cli.answer import print_json
from jobs.cli.failures import WrongInput
from jobs.cli.options import client, json_option, redis_option

DEFAULT = "default"


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
    from jobs.client.limits import read_limits, read_own_limits, set_limit
    from jobs.errors import InvalidRequest

    parsed = [_parse(text) for text in settings]
    with client(redis_url) as connected:
        for setting in parsed:
            try:
                set_limit(connected.redis, setting.name, setting.value, model, tenant)
            except InvalidRequest as error:
                raise WrongInput(error.message) from None
        values = read_limits(connected.redis)._asdict() | read_own_limits(connected.redis)
    if as_json:
        print_json(values)
        return
    width = max(map(len, values))
    for name, value in values.items():
        click.echo(f"{name:{width}}  {value}")


def _parse(text: str) -> _Setting:
    name, equals, value = text.partition("=")
    if not equals or not ((value.isascii() and value.isdigit()) or value == DEFAULT):
        raise WrongInput(f"{text!r}: a limit is set as NAME=N or NAME={DEFAULT}, with N in digits")
    return _Setting(name, None if value == DEFAULT else int(value))

"""`chatjobs work --upstream`: the models of an OpenAI-compatible server instead of own ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from jobs.cli.failures import Unavailable
from jobs.errors import JobError
from jobs.install import command_for
from worker.cli.options import refusal
from worker.model_spec import ModelSpec

if TYPE_CHECKING:
    from worker.upstream.host import UpstreamHost

# What such a worker takes; the other options are about models that it would load.
TAKEN = frozenset(
    (
        *("models", "upstream", "redis_url", "results", "no_record", "max_batch"),
        *("interactive_slots", "grace", "burst", "http", "log_format", "quiet"),
    )
)


def open_upstream(url: str, redis_url: str, interactive_slots: int | None) -> UpstreamHost:
    """The backend of an upstream, which it does not ask yet. `redis_url`: of the jobs."""
    if find_spec("httpx2") is None:
        raise Unavailable(f"--upstream needs httpx2: {command_for('upstream')}")
    from worker.upstream.address import Address
    from worker.upstream.host import UpstreamHost

    try:
        address = Address.parse(url, os.environ)
        name = _queue_id(redis_url)
    except JobError as error:
        raise refusal(error) from None
    return UpstreamHost(address, name, interactive_slots=interactive_slots)


def _queue_id(redis_url: str) -> str:
    import redis

    from jobs.store.connection.connect import connect, redis_failure
    from jobs.store.queue_id import read_queue_id

    client = connect(redis_url)
    try:
        return read_queue_id(client)
    except redis.RedisError as error:
        raise redis_failure(client, error) from None
    finally:
        client.close()


def upstream_specs(models: Sequence[str], max_batch: int | None) -> list[ModelSpec]:
    """The models of QUEUE=NAME, or of NAME alone. Raises click.UsageError for options of the
    command that an upstream decides."""
    _refuse_options(click.get_current_context())
    return [_spec(model, max_batch) for model in models]


def _refuse_options(ctx: click.Context) -> None:
    for option in ctx.command.params:
        name = str(option.name)
        source = ctx.get_parameter_source(name)
        if name in TAKEN or source in (None, click.core.ParameterSource.DEFAULT):
            continue
        in_environment = source is click.core.ParameterSource.ENVIRONMENT
        given = (
            option.envvar
            if in_environment
            else next(one for one in option.opts if one.startswith("--"))
        )
        raise click.UsageError(
            f"{given} has no effect with --upstream, whose server has the models: remove it, or "
            "set it there"
        )


def _spec(model: str, max_batch: int | None) -> ModelSpec:
    queue, equals, name = model.partition("=")
    if not equals:
        return ModelSpec(reference=model, max_batch=max_batch)
    if not queue or not name:
        raise click.BadParameter(
            f"{model!r} is not QUEUE=NAME: the name of the queue, and the name of the model there",
            param_hint="'-m' / '--model'",
        )
    return ModelSpec(reference=name, aliases=(queue,), max_batch=max_batch)

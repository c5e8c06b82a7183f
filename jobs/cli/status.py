"""`chatjobs status`: workers and queues at a glance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from jobs import keys
from jobs.cli.answer import print_json
from jobs.cli.failures import Failure
from jobs.cli.options import connection, json_option, redis_option

if TYPE_CHECKING:
    from redis import Redis


@click.command()
@click.option("--host", metavar="H", help="Only the workers of host H; fails if there is none.")
@json_option
@redis_option
def status(host: str | None, as_json: bool, redis_url: str) -> None:
    """Show the workers, what they have loaded, and how long the queues are."""
    with connection(redis_url) as redis:
        found = {"workers": workers(redis), "queues": queues(redis)}
    if host is not None:
        found["workers"] = [worker for worker in found["workers"] if worker["host"] == host]
    if as_json:
        print_json(found)
    else:
        _show(**found)
    if host is not None and not found["workers"]:
        raise Failure(f"no worker lives on {host}")


def _show(workers: list[dict[str, Any]], queues: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    shown = Table("worker", "models", "device", box=box.SIMPLE)
    for name in ("memory", "running", "tokens/s"):
        shown.add_column(name, justify="right")
    for one in workers:
        used = (one["memory"]["weights"] + one["memory"]["cache"]) / 2**20
        shown.add_row(
            one["name"],
            ", ".join(one["models"]),
            one["device"],
            f"{used:,.0f} MiB",
            str(one["running"]),
            f"{one['tokens_per_second']:,.0f}",
        )
    console.print(shown if workers else "no workers")
    shown = Table("queue", box=box.SIMPLE)
    for name in ("queued", "running", "failed"):
        shown.add_column(name, justify="right")
    for queue in queues:
        shown.add_row(
            queue["name"], *(str(queue[name]) for name in ("queued", "running", "failed"))
        )
    console.print(shown if queues else "no queues")


def workers(redis: Redis) -> list[dict[str, Any]]:
    """What the living workers say about themselves, by name."""
    names = sorted(redis.scan_iter(match=keys.worker("*"), count=1000))
    said = redis.mget(names) if names else []
    return [json.loads(text) for text in said if text is not None]


def queues(redis: Redis) -> list[dict[str, Any]]:
    """Depth of every chatjobs queue, by name.

    Reads the keys directly: asking RQ's registries for their length would run their clean-up.
    """
    from jobs.client.rq_format import queue_key, queue_names, registry_key, wip_key

    prefixes = (keys.chat_queue(""), keys.bulk_queue(""))
    names = [name for name in queue_names(redis) if name.startswith(prefixes)]
    with redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.llen(queue_key(name))
            pipe.zcard(wip_key(name))
            pipe.zcard(registry_key(name, "failed"))
        depths = iter(pipe.execute())
    return [
        {
            "name": name,
            "model": name.partition(":")[2],
            "queued": next(depths),
            "running": next(depths),
            "failed": next(depths),
        }
        for name in names
    ]

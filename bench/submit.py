"""Jobs per second that one producer enqueues, beside RQ's own bulk enqueue.

    python -m bench.submit [--jobs 20000] [--rounds 3]

`Client.submit_many` validates each request, packs it and enqueues it under all limits. RQ's
`enqueue_many` gets the same requests as arguments, 500 at a time, and validates nothing. Per second
of the producer's CPU time, which does not depend on other processes, and of the clock.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import redis
from rq import Queue
from rq.serializers import JSONSerializer

from bench.harness import median, report
from jobs import Client
from jobs.embedded import EmbeddedRedis
from jobs.operations import CHAT

BATCH = 500  # jobs of one call of `enqueue_many`


def request(number: int) -> Any:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"What is {number} + {number + 1}?"}],
        "temperature": 0,
        "max_tokens": 32,
        "seed": number,
        "job": {"priority": "bulk", "run": "r", "row": number},
    }


def by_chatjobs(url: str, requests: list[Any]) -> None:
    with Client(url) as client:
        client.submit_many(requests)


def by_rq(url: str, requests: list[Any]) -> None:
    with redis.Redis.from_url(url) as connection:
        queue = Queue("rq", connection=connection, serializer=JSONSerializer)
        for start in range(0, len(requests), BATCH):
            queue.enqueue_many(
                [
                    Queue.prepare_data(CHAT.func, args=(one,), timeout=100)
                    for one in requests[start : start + BATCH]
                ]
            )


def measure(enqueue: Callable[[str, list[Any]], None], requests: list[Any]) -> tuple[float, float]:
    """Jobs per second of CPU time of this process, and of the clock."""
    with EmbeddedRedis(port=0) as server:
        enqueue(server.url, [{**requests[0], "job": {"run": "other"}}])  # imports, connects
        spent, since = time.process_time(), time.perf_counter()
        enqueue(server.url, requests)
        spent, since = time.process_time() - spent, time.perf_counter() - since
    return len(requests) / spent, len(requests) / since


@click.command()
@click.option("--jobs", "count", default=20_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(count: int, rounds: int, out: Path | None) -> None:
    """Measure jobs per second."""
    warnings.simplefilter("ignore")  # NobodyServes
    requests = [request(number) for number in range(count)]
    contestants = {"chatjobs": by_chatjobs, "RQ": by_rq}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, enqueue in contestants.items():
            found[name].append(measure(enqueue, requests))
    rows = [
        {
            "producer": name,
            "jobs / s of CPU": median([one for one, _ in figures]),
            "jobs / s": median([one for _, one in figures]),
        }
        for name, figures in found.items()
    ]
    report(f"Enqueue {count} jobs", rows, "cpu", out)


if __name__ == "__main__":
    main()

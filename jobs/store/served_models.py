"""Reads the models of the running workers: their states, their memory, and the jobs that wait for
them.

Workers publish the first two (`about` and `states` of their status). Those of older versions, and
those that still load their models, do not say what a model takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from redis import Redis

from jobs.store.waiting import read_waiting
from jobs.store.worker_status import read_statuses


class ServedModel(NamedTuple):
    """A model of one worker."""

    model: str  # its own name; of a worker that still loads, the reference
    state: str
    worker: str
    host: str
    device: str
    pinned: bool
    weight_bytes: int | None
    share_bytes: int | None  # of the worker's budget; None without one
    kept_bytes: int  # in host memory, so that it comes back without its files
    queued: int  # jobs in the queues of its names, which all its workers share
    oldest_s: float  # for how long the first of them has waited


def read_models(redis: Redis) -> list[ServedModel]:
    """By model, then by worker. Raises redis.RedisError."""
    workers = read_statuses(redis)
    found = [entry for one in (*workers.running, *workers.loading) for entry in _entries(one)]
    waiting = read_waiting(
        redis, sorted({name for _, _, about in found for name in about["names"]})
    )
    models = []
    for worker, model, about in found:
        waits = [waiting[name] for name in about["names"] if name in waiting]
        models.append(
            ServedModel(
                model=model,
                state=about["state"],
                worker=worker["name"],
                host=worker["host"],
                device=worker["device"],
                pinned=about.get("pinned", False),
                weight_bytes=about.get("weight_bytes"),
                share_bytes=about.get("share_bytes"),
                kept_bytes=worker["memory"].get("kept", {}).get(model, 0),
                queued=sum(one.jobs for one in waits),
                oldest_s=round(max((one.oldest for one in waits), default=0.0), 1),
            )
        )
    return sorted(models)


def _entries(
    worker: Mapping[str, Any],
) -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
    """The worker, each model, and what the worker says about it, with `state` and `names`."""
    for reference, names in worker.get("loading", {}).items():
        yield worker, reference, {"state": "loading", "names": names}
    for model in worker["models"]:
        about = worker.get("about", {}).get(model, {"names": [model]})
        state = worker.get("states", {}).get(model, "ready")
        if state == "ready" and worker["paused"]:
            state = "paused"
        yield worker, model, {"state": state, **about}

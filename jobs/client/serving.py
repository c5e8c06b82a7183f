"""Sentences about models that no running worker serves, the warning about a job for one, and the
errors of requests that no worker of their model would take."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redis import Redis, RedisError

from jobs.api.caller import warn_caller
from jobs.api.chat_template import not_taken
from jobs.api.request import ChatRequest
from jobs.errors import JobError
from jobs.operations import Request
from jobs.store.worker_status import WorkerStatuses, funcs_of, read_statuses

NAMED = 10  # served models in a sentence
CHECK_SECONDS = 5.0  # between two reads of the workers, by one client


class NobodyServes(UserWarning):
    """A job was submitted for a model that no running worker serves: it waits until one does."""


def refused_templates(redis: Redis, requests: Sequence[Request]) -> dict[int, JobError]:
    """The errors of requests whose chat template the workers of their models do not take, by their
    numbers. Reads the workers only if one has a template."""
    models = {
        number: request.model
        for number, request in enumerate(requests)
        if isinstance(request, ChatRequest) and request.chat_template is not None
    }
    if not models:
        return {}
    workers = read_statuses(redis)
    return {
        number: not_taken(model)
        for number, model in models.items()
        if not workers.take_templates(model)
    }


def nobody_takes(model: str, func: str, workers: WorkerStatuses) -> str:
    """The clause about the jobs of a function for a model, which no running worker takes."""
    if model not in workers.served:
        return nobody_serves(model, workers)
    run = ", ".join(sorted({one for worker in workers.running for one in funcs_of(worker)}))
    return (
        f"no worker runs {func} for {model!r} (functions run now: {run or 'none'}; start a worker "
        "with the model's files, not --upstream, of a version of chatjobs that does, or end the "
        "jobs with chatjobs jobs cancel)"
    )


def nobody_serves(model: str, workers: WorkerStatuses) -> str:
    """The clause about a model that no running worker serves."""
    if loader := who_loads(model, workers.loading):
        return f"no worker serves {model!r} yet ({loader})"
    known = sorted(workers.served)
    served = ", ".join(known[:NAMED]) or "none"
    if len(known) > NAMED:
        served += f" and {len(known) - NAMED} more"
    return (
        f"no worker serves {model!r} (models served now: {served}; chatjobs work --model {model} "
        "starts one)"
    )


def who_loads(model: str, loading: Iterable[Mapping[str, Any]]) -> str:
    """A clause about the workers that load a model; "" if none does."""
    names = [
        worker["name"]
        for worker in loading
        if any(model in possible for possible in worker["loading"].values())
    ]
    if len(names) > 1:
        return f"workers {', '.join(names[:-1])} and {names[-1]} are loading it"
    return f"worker {names[0]} is loading it" if names else ""


class ServingCheck:
    """Warns about jobs that no worker takes, once per model and function in CHECK_SECONDS. May be
    shared by threads."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lock = threading.Lock()
        self._next_read = 0.0
        self._workers = WorkerStatuses([], [], [], [])
        self._warned: set[tuple[str, str]] = set()

    def warn(self, jobs: Iterable[tuple[str, str]]) -> None:
        """Jobs for these models, of these functions, were enqueued."""
        with self._lock:
            try:
                self._read()
            except RedisError:  # the jobs are enqueued all the same
                return
            workers = self._workers
            unserved = sorted(one for one in set(jobs) - self._warned if not workers.serve(*one))
            self._warned.update(unserved)
        other = (
            "; chatjobs submit --model M submits to one that is served, the rows of a run with "
            "another --run"
            if workers.served
            else ""
        )
        for model, func in unserved:
            message = f"{nobody_takes(model, func, workers)}: its jobs wait until one does{other}"
            warn_caller(message, NobodyServes)

    def _read(self) -> None:
        now = time.monotonic()
        if now < self._next_read:
            return
        self._workers = read_statuses(self._redis)
        self._warned = set()
        self._next_read = now + CHECK_SECONDS

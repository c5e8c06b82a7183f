"""The status that a worker publishes: models, device, memory, speed. jobs/store/presence.py writes
it to Redis, and jobs/store/worker_status.py reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from jobs import keys
from jobs.errors import JobError
from jobs.operations import OPERATIONS
from worker.backend import Backend
from worker.processes.resident import resident_bytes
from worker.queue.served import Served


class BudgetedModel(NamedTuple):
    """A model of a worker with a budget. The names are those of the published status."""

    weight_bytes: int
    share_bytes: int  # of the budget
    pinned: bool


class ResidencyStatus(NamedTuple):
    """The models of a worker with a budget, by their own names, which come and go."""

    models: Mapping[str, BudgetedModel]
    failing: Collection[str]  # whose last loads have failed
    loads: int
    evictions: int


class WorkerStatus:
    """The status of one worker. Its speed is the one since the last call of `read`.

    models: their owner may change them. results: the state of the worker's recorder; None if it
    writes no rows. residency: of the models that come and go; None if all of them stay.
    """

    def __init__(
        self,
        backend: Backend,
        models: Served,
        results: Callable[[], Mapping[str, str] | None] = lambda: None,
        residency: Callable[[], ResidencyStatus] | None = None,
    ) -> None:
        self._backend, self._results, self._residency = backend, results, residency
        self._models = models
        self._started_at = time.time()
        self._tokens, self._read_at = 0, time.monotonic()

    def read(
        self, now: float, sick: str = "", pause: str = "", *, claims: bool = True
    ) -> dict[str, Any]:
        """The status at the monotonic time `now`. Why the worker claims no jobs for a while:
        `sick` because it fails them, `pause` for another reason; `claims`: False once it stops.
        Raises JobError if the engine's thread has died."""
        health = self._backend.health()
        if not health.alive:
            raise JobError("internal", f"the engine thread died: {health.error}")
        memory = self._backend.memory()
        tokens, seconds = health.tokens_generated - self._tokens, now - self._read_at
        self._tokens, self._read_at = health.tokens_generated, now
        return {
            "models": sorted(set(self._models.values())),
            "names": sorted(self._models),
            **self._of_models(),
            "versions": {name: one._asdict() for name, one in self._models.versions.items()},
            "contexts": self._models.contexts,
            "funcs": sorted(OPERATIONS),
            "started_at": self._started_at,
            "device": memory.device,
            "memory": asdict(memory),
            "rss": resident_bytes(),
            "paused": sick or pause,
            "healthy": not sick,
            "results": self._results(),
            "room": self._room() if claims and not (sick or pause) else {},
            "running": health.running,
            "waiting": health.waiting,
            "tokens": health.tokens_generated,
            "prompt_tokens": health.prompt_tokens,
            "cached_tokens": health.cached_tokens,
            "drafted_tokens": health.drafted_tokens,
            "accepted_tokens": health.accepted_tokens,
            "draft_steps": health.draft_steps,
            "tokens_per_second": round(tokens / seconds, 1) if seconds > 0 else 0.0,
        }

    def _of_models(self) -> dict[str, Any]:
        """The names of each model and the bytes that it takes; under a budget also the states, the
        names for which no jobs are claimed now, and those whose last loads have failed."""
        names, served = self._models.names, self._models
        if self._residency is None:
            weights = served.weight_bytes
            return {
                "about": {
                    name: {"names": names[name], "weight_bytes": weights[name]} for name in names
                }
            }
        found = self._residency()
        return {
            "about": {
                name: {"names": names[name], **one._asdict()} for name, one in found.models.items()
            },
            "states": {name: state.value for name, state in served.states.items()},
            "closed": sorted(set(served).difference(served.open_names)),
            "failing": sorted(one for name in found.failing for one in names[name]),
            "loads": found.loads,
            "evictions": found.evictions,
        }

    def _room(self) -> dict[str, int]:
        """Number of sequences that may be started, by queue."""
        return {
            keys.queue(name, priority): self._backend.room(model, bulk=priority == "bulk")
            for name, model in self._models.open_names.items()
            for priority in ("interactive", "bulk")
        }

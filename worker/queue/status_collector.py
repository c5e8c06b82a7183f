"""Collects the status that a worker publishes: models, device, memory, speed.

jobs/store/worker_status.py has its type, and jobs/store/presence.py writes it to Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from jobs import keys
from jobs.errors import JobError
from jobs.store.worker_status import MemoryStatus, ResultsStatus, ServingStatus
from worker.backend import Backend, MemoryUse
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


def memory_status(memory: MemoryUse) -> MemoryStatus:
    """The memory of the backend as a worker publishes it."""
    return {
        "device": memory.device,
        "weights": memory.weights,
        "cache": memory.cache,
        "cache_limit": memory.cache_limit,
        "free": memory.free,
        "budget": memory.budget,
        "caches": {
            name: {"used": one.used, "limit": one.limit, "least": one.least}
            for name, one in memory.caches.items()
        },
        "host_limit": memory.host_limit,
        "kept": dict(memory.kept),
    }


class StatusCollector:
    """The status of one worker. Its speed is the one since the last call of `read`.

    models: their owner may change them. results: the state of the worker's recorder; None if it
    writes no rows. residency: of the models that come and go; None if all of them stay. tokenizers:
    the fingerprints of those that are in Redis, by the names of the models.
    """

    def __init__(
        self,
        backend: Backend,
        models: Served,
        results: Callable[[], ResultsStatus | None] = lambda: None,
        residency: Callable[[], ResidencyStatus] | None = None,
        tokenizers: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._backend, self._results, self._residency = backend, results, residency
        self._models, self._tokenizers = models, tokenizers
        self._started_at = time.time()
        self._tokens, self._read_at = 0, time.monotonic()

    def read(
        self, now: float, sick: str = "", pause: str = "", *, claims: bool = True
    ) -> ServingStatus:
        """The status at the monotonic time `now`. Why the worker claims no jobs for a while:
        `sick` because it fails them, `pause` for another reason; `claims`: False once it stops.
        Raises JobError if the engine's thread has died."""
        health = self._backend.health()
        if not health.alive:
            raise JobError("internal", f"the engine thread died: {health.error}")
        memory = self._backend.memory()
        tokens, seconds = health.tokens_generated - self._tokens, now - self._read_at
        self._tokens, self._read_at = health.tokens_generated, now
        status: ServingStatus = {
            "models": sorted(set(self._models.values())),
            "names": sorted(self._models),
            "about": {},
            "versions": {
                name: {
                    "model_fingerprint": one.model_fingerprint,
                    "tokenizer_hash": one.tokenizer_hash,
                    "chat_template_hash": one.chat_template_hash,
                    "dtype": one.dtype,
                }
                for name, one in self._models.versions.items()
            },
            "tokenizers": self._tokenizers(),
            "contexts": dict(self._models.contexts),
            "templates": dict(self._models.templates),
            "funcs": sorted(self._backend.funcs),
            "started_at": self._started_at,
            "device": memory.device,
            "memory": memory_status(memory),
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
        self._add_models(status)
        return status

    def _add_models(self, status: ServingStatus) -> None:
        """Add the names of each model and the bytes that it takes; under a budget also the states,
        the names for which no jobs are claimed now, and those whose last loads have failed."""
        names, served = self._models.names, self._models
        if self._residency is None:
            for name, weight_bytes in served.weight_bytes.items():
                status["about"][name] = {"names": names[name], "weight_bytes": weight_bytes}
            return
        found = self._residency()
        for name, one in found.models.items():
            status["about"][name] = {
                "names": names[name],
                "weight_bytes": one.weight_bytes,
                "share_bytes": one.share_bytes,
                "pinned": one.pinned,
            }
        status["states"] = {name: state.value for name, state in served.states.items()}
        status["closed"] = sorted(set(served).difference(served.open_names))
        status["failing"] = sorted(one for name in found.failing for one in names[name])
        status["loads"], status["evictions"] = found.loads, found.evictions

    def _room(self) -> dict[str, int]:
        """Number of sequences that may be started, by queue."""
        return {
            keys.queue(name, priority): self._backend.room(model, bulk=priority == "bulk")
            for name, model in self._models.open_names.items()
            for priority in ("interactive", "bulk")
        }

"""The models that workers serve, read from Redis at most once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, NamedTuple

from jobs.api.wire import describe
from jobs.gateway.failures import SHOWN, HttpError
from jobs.gateway.redis_waits import read_soon
from jobs.operations import CHAT
from jobs.store.connection.protocol import Connection
from jobs.store.worker_status import WorkerStatuses, funcs_of, statuses_as_steps

LISTED = 20  # names in a message
READ_SECONDS = 1.0  # between two reads
# For so long after a model was served last, its jobs wait: its worker may be restarting.
REMEMBER_SECONDS = 600.0


class Model(NamedTuple):
    """A name that requests may give."""

    id: str
    root: str  # the model's own name
    max_model_len: int | None  # tokens of a sequence; None if no worker says so
    tokenizer: str | None = None  # its fingerprint; None if no worker has published it

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "model",
            "created": 0,
            "owned_by": "chatjobs",
            "root": self.root,
            "max_model_len": self.max_model_len,
        }


class ServedModels:
    """The models of all workers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()
        self._next_read = 0.0
        self._models: dict[str, Model] = {}
        self._workers = 0
        # Each name with the time when it was served last.
        self._seen: dict[str, tuple[float, Model]] = {}

    async def models(self) -> Mapping[str, Model]:
        """By name. Raises JobError if Redis can't be read."""
        async with self._lock:
            now = time.monotonic()
            if now >= self._next_read:
                found = await read_soon(statuses_as_steps, self._connection)
                self._models = dict(sorted(models_of(found).items()))
                self._workers = len(found.running)
                since = now - REMEMBER_SECONDS
                self._seen = {name: one for name, one in self._seen.items() if one[0] > since}
                self._seen |= {name: (now, one) for name, one in self._models.items()}
                self._next_read = time.monotonic() + READ_SECONDS
        return self._models

    async def workers(self) -> int:
        """Number of the workers that run."""
        await self.models()
        return self._workers

    async def find(self, name: Any) -> Model:
        """The model of a name that a worker serves, or served of late; without a name, the only
        one. Raises HttpError."""
        models = self._known(await self.models())
        if name is None:
            roots = {one.root: one for one in models.values()}
            if len(roots) == 1:
                return next(iter(roots.values()))
            raise HttpError(
                400,
                f"model: name one of the {len(roots)} models that are served: {listed(models)}",
                "invalid_request",
                "model",
            )
        if not isinstance(name, str) or name not in models:
            raise unknown_model(name, models)
        return models[name]

    async def require(self, name: Any) -> None:
        """Raises HttpError 404 for a model that no worker serves, or served of late."""
        if not isinstance(name, str):
            return  # the check of the request has the sentence
        models = await self.models()
        if name not in self._known(models):
            raise unknown_model(name, models)

    def _known(self, served: Mapping[str, Model]) -> Mapping[str, Model]:
        """The models that are served, or were of late, by name."""
        since = time.monotonic() - REMEMBER_SECONDS
        late = {name: one for name, (seen, one) in self._seen.items() if seen > since}
        return {**late, **served}


def unknown_model(name: Any, models: Mapping[str, Model]) -> HttpError:
    return HttpError(
        404,
        f"the model {describe(name)} does not exist: models served now: {listed(models)}",
        "model_not_found",
        "model",
    )


def listed(models: Collection[str]) -> str:
    """The first names of models, for a message."""
    names = list(islice(models, LISTED))
    more = len(models) - len(names)
    shown = [name[:SHOWN] for name in names] + ([f"and {more} more"] if more else [])
    return ", ".join(shown) or "none"


def models_of(found: WorkerStatuses) -> dict[str, Model]:
    """The models that workers serve or load, by name. Of several workers, the longest sequence
    counts."""
    models: dict[str, Model] = {}
    for worker in found.loading:
        for reference, names in worker["loading"].items():
            models |= {name: Model(name, reference, None) for name in names}
    for worker in found.running:
        roots = {
            name: root for root, about in worker.get("about", {}).items() for name in about["names"]
        }
        contexts = worker.get("contexts", {}) if CHAT.func in funcs_of(worker) else {}
        tokenizers = worker.get("tokenizers", {})
        for name in worker["names"]:
            others = models.get(name, Model(name, name, None))
            models[name] = Model(
                name,
                roots.get(name, name),
                max(filter(None, (others.max_model_len, contexts.get(name))), default=None),
                others.tokenizer or tokenizers.get(name),
            )
    return models

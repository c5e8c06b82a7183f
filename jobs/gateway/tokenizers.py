"""The tokenizers of the models that are served, read from Redis when they are needed.

The code that makes prompts is that of the workers, which comes through the entry-point group
`chatjobs.prompts`, so the counts are those of their jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from jobs.api.request import ChatRequest
from jobs.errors import JobError
from jobs.gateway.failures import RETRY_SECONDS, HttpError
from jobs.gateway.redis_waits import read_soon
from jobs.gateway.served import Model
from jobs.store.connection.protocol import Connection
from jobs.store.damage import Damage, Reports
from jobs.store.tokenizers import tokenizer_as_steps

T = TypeVar("T")

MOST_OPEN = 4  # tokenizers in memory: one of a large vocabulary takes 200 MB
THREADS = 2  # that tokenize: the library holds Python's lock


class Prompts(Protocol):
    """The prompts of one model, see `worker.prompt.published`. All raise JobError."""

    vocab_size: int

    def encode(self, request: ChatRequest) -> list[int]: ...

    def pieces(self, ids: Sequence[int]) -> list[str]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def info(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Tokenizers:
    """The tokenizers of one gateway; those that were used last stay in memory. Calls of them run on
    threads of their own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._opening = asyncio.Lock()
        self._open: dict[str, Prompts] = {}  # by fingerprint, the one that was used last at the end
        self._reports = Reports()
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer")

    async def of(self, model: Model) -> Prompts:
        """Raises HttpError if the tokenizer of a model can't be had."""
        fingerprint = model.tokenizer
        if fingerprint is None:
            raise HttpError(
                400,
                f"the tokenizer of the model {model.id!r} is not known here: its workers send its "
                "jobs to another server, still load it, or are of an older version",
                "unsupported_model",
                "model",
            )
        async with self._opening:
            prompts = self._open.pop(fingerprint, None)
            if prompts is None:
                prompts = await self._read(model.root, fingerprint)
            self._open[fingerprint] = prompts
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]  # its process ends with its last request
        return prompts

    async def run(self, call: Callable[[], T]) -> T:
        """The result of a call of a tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        for one in self._open.values():
            one.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, name: str, fingerprint: str) -> Prompts:
        found = await read_soon(partial(tokenizer_as_steps, fingerprint), self._connection)
        damage = [found] if isinstance(found, Damage) else []
        self._reports.update(fingerprint, damage)
        if isinstance(found, Damage):
            raise JobError("internal", f"the tokenizer of {name} can't be read: {found}")
        if found is None:
            raise HttpError(
                503,
                f"Redis has lost the tokenizer of {name}: a worker writes it again within a minute",
                "unavailable",
                headers={"retry-after": str(RETRY_SECONDS)},
            )
        document = found
        return await self.run(lambda: _open_document(name, document))


def _open_document(name: str, document: bytes) -> Prompts:
    from importlib.metadata import entry_points

    (plugin,) = entry_points(group="chatjobs.prompts", name="published")
    prompts: Prompts = plugin.load()(name, document)
    return prompts

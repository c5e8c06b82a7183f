"""The backend of an upstream: sends chat requests to an OpenAI-compatible server, many at a time.

One thread runs all exchanges, with asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Coroutine
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import httpx2

from jobs.api.via import HEADER, to_header
from jobs.errors import JobError, invalid
from jobs.operations import CHAT, Operation, Request
from worker.backend import UNKNOWN_CONTEXT, Health, MemoryUse, ModelInfo, Sink
from worker.model_spec import ModelSpec
from worker.upstream.address import Address
from worker.upstream.availability import (
    Availability,
    Away,
    Models,
    pause_before,
    read_models,
    require_model,
)
from worker.upstream.body import body_of
from worker.upstream.exchange import Exchange

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BATCH = 64  # sequences of a model that are sent at a time
RESERVED_SHARE = 16  # one of so many is kept for interactive sequences
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0  # after which a connection counts as lost: a busy server is silent long
KEEPALIVE_SECONDS = 2.0  # that an idle connection is kept: servers close theirs after 5 or more
BEAT_SECONDS = 1.0
CLOSE_SECONDS = 5.0


class Remote(NamedTuple):
    """A model of the upstream."""

    info: ModelInfo
    name: str  # there
    batch: int  # most sequences at a time


class UpstreamHost:
    """Implements `worker.backend.Backend`. `queue_id`: of the queues whose jobs it is given.
    `interactive_slots`: sequences of each model that bulk jobs leave to interactive ones; None: a
    sixteenth."""

    def __init__(
        self, address: Address, queue_id: str, *, interactive_slots: int | None = None
    ) -> None:
        self._address, self._interactive_slots = address, interactive_slots
        self._queue_id = queue_id
        # By all names that requests may use. Replaced, never changed: any thread may read it.
        self._models: dict[str, Remote] = {}
        self._lock = threading.Lock()  # held to change and to read the following
        self._running: dict[Exchange, str] = {}  # with the own name of its model
        self._tokens = self._prompt_tokens = self._cached_tokens = 0  # of those that have ended
        self._beats = 0
        self._error: str | None = None
        self._loop = asyncio.new_event_loop()
        self._client = httpx2.AsyncClient(
            headers={
                **address.headers,
                HEADER: to_header([queue_id]),
                "content-type": "application/json",
            },
            timeout=httpx2.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_SECONDS),
        )
        self._availability = Availability(self._client, address, self._names)
        self._thread = threading.Thread(target=self._run, name="upstream", daemon=True)
        self._thread.start()

    @property
    def funcs(self) -> Collection[str]:
        """Scoring jobs need the model's files."""
        return (CHAT.func,)

    def health(self) -> Health:
        with self._lock:
            running = list(self._running)
            tokens, prompt, cached = self._tokens, self._prompt_tokens, self._cached_tokens
        return Health(
            alive=self._thread.is_alive(),
            progress=self._beats,
            running=sum(one.sequences for one in running),
            waiting=0,
            tokens_generated=tokens + sum(one.answer.tokens for one in running),
            prompt_tokens=prompt,
            cached_tokens=cached,
            error=self._error,
            obstacle=self._availability.obstacle,
        )

    def memory(self) -> MemoryUse:
        """None of this machine."""
        return MemoryUse(str(self._address), weights=0, cache=0, cache_limit=0, free=0)

    def load(self, spec: ModelSpec) -> ModelInfo:
        """Find a model, and wait for the upstream if it does not answer. `spec`: its reference is
        the name there, and an alias the name of its queue. Raises JobError."""
        batch = MAX_BATCH if spec.max_batch is None else spec.max_batch
        reserved = self._interactive_slots
        if reserved is not None and not 0 <= reserved < batch:
            raise invalid(
                f"interactive_slots must be 0 to {batch - 1}, fewer than max_batch, got {reserved}",
                "interactive_slots",
            )
        found = self._call(self._find_models())
        require_model(found, spec.reference, self._address)
        info = self._info(spec, found[spec.reference])
        remote = Remote(info, spec.reference, batch)
        self._models = {**self._models, info.name: remote, info.reference: remote}
        return info

    def room(self, model: str, *, bulk: bool) -> int:
        if self._availability.obstacle or self._availability.holds:
            return 0
        remote = self._models[model]
        with self._lock:
            running = [one for one, name in self._running.items() if name == remote.info.name]
        left = max(0, remote.batch - sum(one.sequences for one in running))
        if not bulk:
            return left
        # One bulk sequence may always run, so that interactive ones don't starve them.
        least = min(left, 1) if not any(one.bulk for one in running) else 0
        return max(least, left - self._reserved(remote.batch))

    def submit(self, operation: Operation, request: Request, sink: Sink) -> Exchange:
        remote = self._models.get(request.model)
        if remote is None:
            loaded = ", ".join(sorted(self._models)) or "none"
            raise JobError(
                "model_not_found",
                f"the upstream {self._address} is asked for no model '{request.model}'; for: "
                f"{loaded}",
                "model",
            )
        passed = request.job.via or []
        if self._queue_id in passed:
            raise invalid(
                f"the job is from this queue already, and would come back to it without end: the "
                f"upstream {self._address} is a gateway that leads here; give --upstream the "
                "server that has the model",
                "job.via",
            )
        exchange = Exchange(
            request,  # type: ignore[arg-type]  # CHAT's
            body_of(request, remote.name, str(self._address)),  # type: ignore[arg-type]
            {HEADER: to_header([*passed, self._queue_id])},
            sink,
            self._client,
            self._address,
            self._availability,
            self._loop,
            self._ended,
        )
        with self._lock:
            self._running[exchange] = remote.info.name
        self._loop.call_soon_threadsafe(exchange.begin)
        return exchange

    def close(self) -> None:
        with suppress(RuntimeError):  # the thread has died, and with it the loop
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _names(self) -> set[str]:
        """Of the models, as the upstream names them."""
        return {one.name for one in self._models.values()}

    def _reserved(self, batch: int) -> int:
        if self._interactive_slots is not None:
            return self._interactive_slots
        return min(batch - 1, max(1, batch // RESERVED_SHARE))

    def _info(self, spec: ModelSpec, entry: Any) -> ModelInfo:
        return ModelInfo(
            name=spec.aliases[0] if spec.aliases else spec.reference,
            reference=spec.reference,
            revision=None,
            family="upstream",
            takes_templates=True,  # the server may refuse them
            parameters=0,
            weight_bytes=0,
            dtype="",
            device=str(self._address),
            device_name=str(self._address),
            context_length=_context(entry),
            # Nothing is known of the weights: the same name is taken for the same ones.
            fingerprint=f"upstream {spec.reference}",
            tokenizer_hash=None,
            template_hash=None,
            engine="upstream",
            engine_version=None,
            torch_version=None,
            cuda_version=None,
        )

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the upstream's thread and wait for its result."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not wait((future,), BEAT_SECONDS).done:
            if not self._thread.is_alive():
                raise JobError("internal", f"the upstream's thread has ended: {self._error}")
        return future.result()

    # --- on the upstream's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            beat = self._loop.create_task(self._beat())
            self._loop.run_forever()
            beat.cancel()
            self._loop.run_until_complete(self._close())
        except BaseException as error:
            # An exchange handles its errors, so this is a defect: the worker returns its jobs.
            self._error = f"{type(error).__name__}: {error}"
            logger.exception("the thread of the upstream died")
        finally:
            self._loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS / 2)
        await self._client.aclose()

    async def _beat(self) -> None:
        """Show the watchdog that the thread works; the upstream may think for long."""
        while True:
            self._beats += 1
            await asyncio.sleep(BEAT_SECONDS)

    async def _find_models(self) -> Models:
        """Wait for the upstream. Raises JobError if it can't be used."""
        tried = 0
        while True:
            try:
                return await read_models(self._client, self._address)
            except Away as error:
                if not tried:
                    logger.warning("waiting: %s", error)
            await asyncio.sleep(pause_before(tried))
            tried += 1

    def _ended(self, exchange: Exchange) -> None:
        """An exchange has no connection any more."""
        usage = exchange.answer.usage
        with self._lock:
            self._running.pop(exchange, None)
            self._tokens += exchange.answer.tokens if usage is None else usage.completion_tokens
            if usage is not None:
                self._prompt_tokens += usage.prompt_tokens
                details = usage.prompt_tokens_details
                self._cached_tokens += details.cached_tokens if details is not None else 0


def _context(entry: Any) -> int:
    """The context of a model in the list of models: servers name it differently, or not at all."""
    about = entry.get("meta") if isinstance(entry.get("meta"), dict) else {}
    for value in (
        entry.get("max_model_len"),  # vLLM, SGLang
        about.get("n_ctx"),  # llama.cpp
        entry.get("context_length"),
        entry.get("context_window"),
    ):
        if isinstance(value, int) and value > 0:
            return value
    return UNKNOWN_CONTEXT

"""One chat request on its way to an upstream and back: sent, repeated if the upstream has not begun
it, streamed, cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import httpx2

from jobs import clock
from jobs.api.request import ChatRequest
from jobs.errors import JobError, failure_of
from jobs.stream.delta import Delta
from worker.backend import MachineError, Outcome, Progress, Sink
from worker.upstream.address import Address
from worker.upstream.answer import Answer, broken, lost
from worker.upstream.availability import LONGEST_HOLD, Availability, describe, pause_before
from worker.upstream.events import DONE, read_events
from worker.upstream.faults import NotNow, fault_of, message_of

logger = logging.getLogger(__name__)

MOST_WAITS = 10  # for an upstream that is there and takes no request; the job then fails
MAX_ERROR_BYTES = 64 << 10


class ProgressQueue:
    """Implements `worker.backend.Assembly`: leads from the upstream's thread to the loop's."""

    def __init__(self) -> None:
        self._parts: deque[Progress] = deque()

    def put(self, part: Progress) -> bool:
        """True if the receiver has to be told: it had taken everything."""
        self._parts.append(part)
        return len(self._parts) == 1

    def take(self) -> Progress:
        deltas: list[Delta] = []
        outcome: Outcome | None = None
        while self._parts:
            part = self._parts.popleft()
            deltas += part.deltas
            outcome = part.outcome or outcome
        return Progress(deltas, outcome)


class Exchange:
    """`begin` is called by the thread of the upstream, `cancel` by any. `on_end`: called once,
    before the receiver is told of the outcome."""

    def __init__(
        self,
        request: ChatRequest,
        body: str,
        headers: Mapping[str, str],
        sink: Sink,
        client: httpx2.AsyncClient,
        address: Address,
        availability: Availability,
        loop: asyncio.AbstractEventLoop,
        on_end: Callable[[Exchange], None],
    ) -> None:
        self.sequences = request.n or 1
        self.bulk = request.job.priority == "bulk"
        self.answer = Answer(request)
        self._body, self._headers = body.encode(), headers
        self._sink, self._progress = sink, ProgressQueue()
        self._client, self._address, self._availability = client, address, availability
        self._loop, self._on_end = loop, on_end
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Close the connection. Thread-safe."""
        self._cancelled = True  # first: `begin` looks at it
        with suppress(RuntimeError):  # the loop is closed, and the connection with it
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def begin(self) -> None:
        self._task = self._loop.create_task(self._run())
        if self._cancelled:
            self._task.cancel()
        # A task that is cancelled before it has begun never runs.
        self._task.add_done_callback(lambda _: self._end(None))

    async def _run(self) -> None:
        error: JobError | None = None
        try:
            await self._converse()
        except asyncio.CancelledError:
            error = JobError("cancelled", "the request was cancelled")
        except BaseException as failure:  # it fails this request only
            error = failure_of(failure)
            if error is not failure:
                logger.exception("a request to the upstream failed")
        self._end(self.answer.outcome(self._masked(error)))

    def _end(self, outcome: Outcome | None) -> None:
        """Pass the outcome on, once; None: the request was cancelled before it began."""
        on_end, self._on_end = self._on_end, _nothing
        if on_end is _nothing:
            return
        on_end(self)
        if outcome is None:
            outcome = self.answer.outcome(JobError("cancelled", "the request was cancelled"))
        self._progress.put(Progress((), outcome))
        self._sink.pending(self._progress)

    def _masked(self, error: JobError | None) -> JobError | None:
        """An error without the secrets that the upstream may have repeated."""
        if error is not None:
            error.message = self._address.masked(error.message)
            error.args = (error.message,)
        return error

    async def _converse(self) -> None:
        """Send the request until the upstream begins it. Raises JobError."""
        waits = 0
        while True:
            await self._availability.wait()
            if obstacle := self._availability.obstacle:
                raise MachineError("internal", obstacle)
            try:
                return await self._send()
            except NotNow as error:
                refused = error
            if not refused.limited and not await self._availability.usable():
                continue  # its obstacle is the error
            waits += 1
            if waits > MOST_WAITS:
                raise refused.error
            seconds = max(refused.seconds or 0.0, pause_before(waits))
            if refused.limited or seconds > LONGEST_HOLD:
                self._availability.hold(seconds, self._address.masked(refused.error.message))
            else:
                await asyncio.sleep(seconds)

    async def _send(self) -> None:
        """Send the request and read the answer. Raises NotNow if the upstream has not begun it,
        else JobError."""
        self.answer.started_at = clock.now()
        try:
            async with self._client.stream(
                "POST",
                f"{self._address}/chat/completions",
                content=self._body,
                headers=self._headers,
            ) as response:
                await self._read(response)
        except (
            httpx2.ConnectError,
            httpx2.ConnectTimeout,
            httpx2.PoolTimeout,
            httpx2.ProxyError,
        ) as error:
            fact = f"the upstream {self._address} does not answer: {describe(error)}"
            raise NotNow(JobError("unavailable", fact)) from None
        except httpx2.DecodingError as error:
            raise broken(describe(error)) from None
        except httpx2.TransportError as error:
            self._availability.suspect()
            raise lost(self.answer, describe(error)) from None
        except JobError as error:
            if error.code == "unavailable":
                self._availability.suspect()
            raise

    async def _read(self, response: httpx2.Response) -> None:
        if response.status_code != 200:
            await self._raise(response)
        kind = response.headers.get("content-type", "")
        if "text/event-stream" not in kind:
            said, _ = message_of(kind, await _beginning(response))
            raise broken(f"no stream of events but {kind or 'no content type'}: {said}")
        done = False
        async for data in read_events(response.aiter_bytes()):
            if data == DONE:
                done = True
                break
            if deltas := self.answer.add(data):
                self._pass_on(Progress(deltas))
        self.answer.check(done=done)

    async def _raise(self, response: httpx2.Response) -> None:
        fault = fault_of(response.status_code, response.headers, await _beginning(response))
        # The key or the model may be gone for all jobs.
        suspected = response.status_code in (401, 403, 404)
        if suspected and not await self._availability.usable():
            raise MachineError("internal", self._availability.obstacle)
        raise fault

    def _pass_on(self, part: Progress) -> None:
        if self._progress.put(part):
            self._sink.pending(self._progress)


def _nothing(exchange: Exchange) -> None:
    """In place of `on_end` after the end."""


async def _beginning(response: httpx2.Response) -> bytes:
    """The first bytes of the body of an error."""
    found = b""
    async for part in response.aiter_bytes():
        found += part
        if len(found) >= MAX_ERROR_BYTES:
            break
    return found[:MAX_ERROR_BYTES]

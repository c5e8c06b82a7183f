"""Hands requests with large bodies to a process beside the gateway, and their replies on.

To parse and to check a body of 16 MiB takes a second and more, in which each call holds Python's
lock for up to tenths of a second, whatever the thread. `jobs.gateway.large_process` is that
process: a gateway on a unix socket. The first large body starts it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.child import ChildProcess
from jobs.gateway.endpoints import REQUEST_ID
from jobs.gateway.failures import RETRY_SECONDS, HttpError
from jobs.gateway.figures import StreamFigures
from jobs.gateway.leaving import ClientLeft, until_left
from jobs.gateway.settings import Settings
from jobs.store.connection.connect import URL_VARIABLE

LOOK_SECONDS = 0.02  # between two looks whether the process has its socket
END_SECONDS = 8.0  # of the process, after SIGTERM
PART_BYTES = 2**16
# Headers of one connection, and those that both servers set.
OF_REQUESTS = {b"connection", b"content-length", b"expect", b"keep-alive", b"transfer-encoding"}
OF_REPLIES = {b"connection", b"date", b"transfer-encoding"}

logger = logging.getLogger(__name__)


class LargeBodies:
    """The process of one gateway, which ends with it, however that ends. It is started again if it
    dies."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._starting = asyncio.Lock()
        self._folder: Path | None = None  # of the socket
        self._child: ChildProcess | None = None

    def reply_to(self, body: bytes) -> ASGIApp:
        """The reply to a request whose body has been read. If its client goes away, the process
        sees that as well."""

        async def reply(scope: Scope, receive: Receive, send: Send) -> None:
            with suppress(ClientLeft):
                await until_left(receive, self._forward(scope, body, send))

        return reply

    def leave(self) -> None:
        """The gateway stops: the jobs of connections that it closes from now on go on."""
        if self._child is not None:
            self._child.send(signal.SIGTERM)

    async def close(self) -> None:
        """End the process."""
        if self._child is not None:
            await asyncio.to_thread(self._child.stop, END_SECONDS)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        started = False
        try:
            async with self._connected() as (reader, writer):
                async for event in _exchange(scope, body, reader, writer):
                    if isinstance(event, h11.Response):
                        started = True
                        replying = _Reply(scope, send)
                    await replying.take(event)
        except (OSError, EOFError, h11.RemoteProtocolError) as error:
            logger.error("the process of large requests does not answer: %r", error)
            if not started:
                raise HttpError(
                    503,
                    "the process of the gateway that answers requests with large bodies has died: "
                    "send the request again",
                    "unavailable",
                    headers={"retry-after": str(RETRY_SECONDS)},
                ) from None

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection to the process. Raises OSError."""
        reader, writer = await self._connect()
        try:
            yield reader, writer
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deaths = 0
        while True:
            child = await self._running()
            try:
                return await asyncio.open_unix_connection(self._socket)
            except (FileNotFoundError, ConnectionRefusedError):  # it is not up yet, or has died
                if child.poll() is not None:
                    deaths += 1
                    if deaths > 1:  # of a process that was just started
                        raise
            await asyncio.sleep(LOOK_SECONDS)

    async def _running(self) -> ChildProcess:
        """The process, which is started if there is none."""
        async with self._starting:
            if self._child is not None and self._child.poll() is not None:
                logger.error("the process of large requests has died: it is started again")
                self._child.stop(0)
                self._child = None
            if self._child is None:
                self._child = await asyncio.to_thread(self._start)
            return self._child

    def _start(self) -> ChildProcess:
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="chatjobs-"))
        given = {**asdict(self._settings), "redis_url": "", "tls_cert": None, "tls_key": None}
        command = [sys.executable, "-P", "-m", "jobs.gateway.large_process", str(self._socket)]
        # The URL may have a password, which a command line would show.
        environment = {**os.environ, URL_VARIABLE: self._settings.redis_url}
        return ChildProcess(
            [*command, json.dumps(given, default=str)],
            environment=environment,
            temporary=self._folder,
        )

    @property
    def _socket(self) -> Path:
        assert self._folder is not None
        return self._folder / "gateway.sock"


async def _exchange(
    scope: Scope, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[Any]:
    """Send a request. The events of its reply. Raises OSError, EOFError, RemoteProtocolError."""
    client = h11.Connection(h11.CLIENT)
    query = scope["query_string"]
    headers = [one for one in scope["headers"] if one[0] not in OF_REQUESTS]
    if not any(name == b"host" for name, _ in headers):
        headers.append((b"host", b"localhost"))
    headers += [(b"connection", b"close"), (b"content-length", str(len(body)).encode())]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    writer.write(client.send(h11.Request(method=scope["method"], target=target, headers=headers)))
    writer.write(client.send(h11.Data(data=body)))
    client.send(h11.EndOfMessage())
    await writer.drain()
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            client.receive_data(await reader.read(PART_BYTES))
        elif not isinstance(event, h11.InformationalResponse):
            yield event
            if isinstance(event, h11.EndOfMessage):
                return


class _Reply:
    """The reply of the process, on its way to the client."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._figures: StreamFigures | None = None  # of a stream

    async def take(self, event: Any) -> None:
        if isinstance(event, h11.Response):
            await self._begin(event)
        elif isinstance(event, h11.Data):
            if self._figures is not None:
                self._figures.came()
            await self._send(
                {"type": "http.response.body", "body": bytes(event.data), "more_body": True}
            )
            if self._figures is not None:
                self._figures.sent(len(event.data))
        else:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, response: h11.Response) -> None:
        headers = []
        for name, value in response.headers:
            if name == b"x-request-id":
                self._scope[REQUEST_ID] = value.decode()
            elif name not in OF_REPLIES:
                headers.append((name, value))
            if name == b"content-type" and value.startswith(b"text/event-stream"):
                self._figures = StreamFigures(self._scope)
        status = response.status_code
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

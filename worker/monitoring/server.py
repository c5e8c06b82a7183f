"""A small HTTP server for probes and metrics, on a thread of its own.

It answers while the worker's other threads wait or compute. Clients can't hurt the worker: each
connection has one request, a limited time and a limited head, and beyond MAX_CONNECTIONS the oldest
one is closed, so that file descriptors and memory stay bounded and a new client is still answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

from jobs.errors import JobError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 8192
EXCHANGE_SECONDS = 5.0  # from the connection to the last byte of the response
END_SECONDS = 1.0  # that open connections may take to end when the server is closed
BACKLOG = 128
TEXT = "text/plain; charset=utf-8"


class Response(NamedTuple):
    """What a page answers with."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT

    @classmethod
    def of(cls, status: HTTPStatus, text: str) -> Response:
        return cls(status, f"{text}\n".encode())


@dataclass(frozen=True, slots=True)
class Page:
    """`render` makes the response to a request with this Accept header. `waits`: it may take a
    while, so another thread runs it."""

    render: Callable[[str], Response]
    waits: bool = False


class HttpServer:
    """Listens from its construction on, and answers GET and HEAD from `start` to `close`.

    pages: by path; `show` replaces them. Raises JobError("unavailable") if it can't listen.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None)
            reason = os.strerror(number) if number and number > 0 else str(error)
            raise JobError(
                "unavailable",
                f"can't listen on {_address(host, port)}: {reason}; give --http another port or "
                "address",
            ) from None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="http-page")
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest connection first
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def address(self) -> str:
        """Host and port, as in a URL."""
        host, port, *_ = self._socket.getsockname()
        return _address(host, port)

    def start(self) -> None:
        self._thread.start()

    def show(self, pages: Mapping[str, Page]) -> None:
        """Answer with these pages from now on."""
        self._pages = pages

    def close(self) -> None:
        """Close all connections and the port."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join(EXCHANGE_SECONDS)
        elif not self._loop.is_closed():  # it was never started
            self._loop.close()
        self._socket.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    # --- on its thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:  # probes fail from now on, so the worker is restarted
            logger.exception("the HTTP server has ended")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._socket, limit=MAX_HEAD_BYTES
        )
        await self._closed.wait()
        server.close()
        for writer in list(self._open):
            writer.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=END_SECONDS)  # of these connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        writer.transport.set_write_buffer_limits(0)  # `drain` returns when all is sent
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                writer.write(await self._exchange(reader))
                await writer.drain()
                writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._open.pop(writer, None)

    async def _exchange(self, reader: asyncio.StreamReader) -> bytes:
        """Read a request. Returns the bytes of the response."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.LimitOverrunError:
            return _encoded(Response.of(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too large"))
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        target, _, version = rest.partition(" ")
        if not version.startswith("HTTP/1."):
            return _encoded(Response.of(HTTPStatus.BAD_REQUEST, "not a request of HTTP/1"))
        if method not in ("GET", "HEAD"):
            return _encoded(Response.of(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD only"))
        pages = self._pages
        page = pages.get(target.partition("?")[0])
        if page is None:
            return _encoded(Response.of(HTTPStatus.NOT_FOUND, f"pages: {', '.join(pages)}"))
        accept = next(
            (line.partition(":")[2] for line in lines if line.lower().startswith("accept:")), ""
        )
        return _encoded(await self._render(page, accept), body=method == "GET")

    async def _render(self, page: Page, accept: str) -> Response:
        try:
            if page.waits:
                return await self._loop.run_in_executor(self._executor, page.render, accept)
            return page.render(accept)
        except Exception:  # one page must not end the others
            logger.exception("a page of the HTTP server failed")
            return Response.of(HTTPStatus.INTERNAL_SERVER_ERROR, "see the log of the worker")


def _encoded(response: Response, *, body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (response.body if body else b"")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

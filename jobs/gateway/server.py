"""Runs the gateway: uvicorn with connections, signals and an end of its own."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, Literal

import uvicorn

from jobs.api.request import IgnoredFieldWarning
from jobs.client.aio import AsyncClient
from jobs.client.serving import NobodyServes
from jobs.errors import JobError
from jobs.gateway.app import make_app
from jobs.gateway.connections import protocol, sweep
from jobs.gateway.figures import Counted
from jobs.gateway.gateway import Gateway
from jobs.gateway.large_bodies import LargeBodies
from jobs.gateway.settings import Settings

logger = logging.getLogger(__name__)

BACKLOG = 2048


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises JobError if it can't start."""
    settings.check()
    prepare()
    with _listening(settings.host, settings.port) as listener:
        asyncio.run(_serve(settings, listener))


def prepare() -> None:
    """Prepare this process for a server."""
    warnings.simplefilter("ignore", IgnoredFieldWarning)  # docs/http.md lists the fields
    warnings.simplefilter("ignore", NobodyServes)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its client has the error
    _raise_file_limit()


async def _serve(settings: Settings, listener: socket.socket) -> None:
    large = LargeBodies(settings)
    gateway = Gateway(settings, AsyncClient(settings.redis_url), large)
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.tls_cert else "http"
    name = f"[{host}]" if ":" in host else host
    server = server_of(gateway, f"{scheme}://{name}:{port}/v1", lifespan="on")
    await server.serve(sockets=[listener])
    await large.close()
    gateway.tokenizers.close()


def server_of(gateway: Gateway, url: str, *, lifespan: Literal["on", "off"]) -> uvicorn.Server:
    """A server of a gateway. `lifespan`: "on" for the work that it does beside its replies."""
    settings = gateway.settings
    config = uvicorn.Config(
        Counted(make_app(gateway), gateway.figures),
        http=protocol(settings, gateway.figures),
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=settings.forwarded_allow_ips is not None,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=int(settings.grace_seconds),
    )
    return _Server(config, gateway, url)


class _Server(uvicorn.Server):
    """Stops at the first signal, after the replies that are open; at the second one at once."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, url: str) -> None:
        super().__init__(config)
        self._gateway, self._url = gateway, url
        self._next_sweep = 0.0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:  # and signals have their handlers
            logger.info("serving %s (Ctrl-C stops)", self._url)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            self.force_exit = True
        else:
            logger.info(
                "stopping: replies that are open: %d, with %g s to end, and the jobs of the others "
                "go on (a second signal stops now)",
                len(self.server_state.tasks),
                self._gateway.settings.grace_seconds,
            )
        self.should_exit = self._gateway.stopping = True
        if self._gateway.large is not None:
            self._gateway.large.leave()

    async def on_tick(self, counter: int) -> bool:
        now = monotonic()
        if now >= self._next_sweep:
            wait = sweep(self.server_state.connections, self._gateway.settings)
            self._next_sweep = now + wait
        return await super().on_tick(counter)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises JobError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, number, _, address = found[0]
        listener = socket.socket(family, kind, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise JobError(
            "unavailable",
            f"can't listen on {host} port {port}: {reason}: choose another --host or --port",
        ) from None
    return listener


def _raise_file_limit() -> None:
    """Each connection is an open file: take as many as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

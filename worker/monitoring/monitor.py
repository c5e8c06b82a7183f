"""The HTTP server of a worker, if it has an address for one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from worker.monitoring.sources import Sources

if TYPE_CHECKING:
    from worker.monitoring.redis_figures import RedisFigures
    from worker.monitoring.server import HttpServer

logger = logging.getLogger(__name__)


class Monitor:
    """Answers from `start` to `close`; before `show`, as a worker that loads its models.

    address: host and port; None: nothing listens, and prometheus_client is not imported.
    """

    def __init__(self, address: tuple[str, int] | None, redis_url: str | None) -> None:
        self._address, self._redis_url = address, redis_url
        self._running: tuple[HttpServer, RedisFigures] | None = None

    def start(self) -> None:
        """Raises JobError("unavailable") if the address is not free."""
        if self._address is None:
            return
        from worker.monitoring.pages import pages_of
        from worker.monitoring.redis_figures import RedisFigures
        from worker.monitoring.server import HttpServer

        redis = RedisFigures(self._redis_url)
        server = HttpServer(*self._address, pages_of(None, redis))
        self._running = server, redis
        server.start()
        logger.info("probes and metrics: http://%s/metrics", server.address)

    def show(self, sources: Sources) -> None:
        """The worker serves its models."""
        if self._running is None:
            return
        from worker.monitoring.pages import pages_of

        server, redis = self._running
        server.show(pages_of(sources, redis))

    def close(self) -> None:
        if self._running is not None:
            server, redis = self._running
            server.close()
            redis.close()

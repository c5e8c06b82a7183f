"""The pages of a worker's HTTP server: /healthz, /readyz and /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from jobs.metrics_page import MetricsPage
from worker.monitoring.metrics import WorkerCollector
from worker.monitoring.redis_figures import RedisFigures
from worker.monitoring.server import Page, Response
from worker.monitoring.sources import Sources

LOADING = "starting: the models are being loaded"


def pages_of(sources: Sources | None, redis: RedisFigures) -> Mapping[str, Page]:
    """The pages of a worker; of one that still loads its models, without `sources`."""
    # While the models are loaded, there are figures of the process alone.
    metrics = MetricsPage(*([] if sources is None else [WorkerCollector(sources, redis)]))
    return {
        "/healthz": Page(lambda _: _health(sources)),
        "/readyz": Page(lambda _: _readiness(sources)),
        "/metrics": Page(lambda accept: _page(metrics, accept), waits=True),
    }


def _page(metrics: MetricsPage, accept: str) -> Response:
    return Response(HTTPStatus.OK, *metrics.render(accept))


def _health(sources: Sources | None) -> Response:
    """The interpreter runs, and the engine's thread lives. A worker that hangs
    ends by itself (worker/queue/watchdog.py)."""
    health = None if sources is None else sources.backend.health()
    if health is not None and not health.alive:
        reason = f"the engine thread has ended: {health.error}"
        return Response.of(HTTPStatus.SERVICE_UNAVAILABLE, reason)
    return Response.of(HTTPStatus.OK, "ok")


def _readiness(sources: Sources | None) -> Response:
    if reason := LOADING if sources is None else sources.readiness.obstacle:
        return Response.of(HTTPStatus.SERVICE_UNAVAILABLE, reason)
    return Response.of(HTTPStatus.OK, "ok")

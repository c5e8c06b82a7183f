"""The metrics of a gateway for Prometheus, read when they are scraped. docs/metrics.md lists them.

Names are those of vLLM's HTTP server where it has the same figure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from jobs.gateway.figures import BOUNDS, Figures

PAGE_SECONDS = 1.0  # a page is made at most so often, since anybody may ask for it


class MetricsPage:
    """Makes the page at most once in PAGE_SECONDS for each format."""

    def __init__(self, figures: Figures) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(GatewayCollector(figures))
        self._made: dict[str, tuple[float, bytes]] = {}  # time (monotonic) and page, by format

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type."""
        encode, content_type = choose_encoder(accept)
        made, body = self._made.get(content_type, (-PAGE_SECONDS, b""))
        if time.monotonic() - made >= PAGE_SECONDS:
            body = encode(self._registry)
            self._made[content_type] = time.monotonic(), body
        return body, content_type


class GatewayCollector(Collector):
    """All metrics of a gateway, but those of its process."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        figures = self._figures
        info = GaugeMetricFamily("chatjobs_gateway_info", "The gateway.", labels=["version"])
        info.add_metric([version("chatjobs")], 1)
        yield info
        requests = CounterMetricFamily(
            "chatjobs_http_requests", "Requests answered.", labels=["handler", "status"]
        )
        for (handler, status), count in figures.requests.items():
            requests.add_metric([handler, str(status)], count)
        yield requests
        yield GaugeMetricFamily(
            "chatjobs_http_streams_open", "Streams that are open.", figures.streams
        )
        yield CounterMetricFamily(
            "chatjobs_http_stream_bytes", "Bytes of events sent.", figures.stream_bytes
        )
        added = HistogramMetricFamily(
            "chatjobs_http_first_event_added_seconds",
            "What the gateway adds to the first event of a stream.",
        )
        bounds = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"]
        counts = accumulate(figures.added)
        added.add_metric([], list(zip(bounds, counts, strict=True)), figures.added_sum)
        yield added

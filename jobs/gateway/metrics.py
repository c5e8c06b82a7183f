"""The metrics of a gateway for Prometheus, read when they are scraped. docs/metrics.md lists them.

Names are those of vLLM's HTTP server where it has the same figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jobs.gateway.figures import BOUNDS, Figures


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

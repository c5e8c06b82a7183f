"""The page that Prometheus scrapes, of a worker and of a gateway.

It has two formats, whatever a scraper asks for: nothing of its request becomes a part of the reply.
"""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

PAGE_SECONDS = 1.0  # a page is made at most so often: more scrapes cost the process nothing
FORMATS: dict[str, tuple[Any, str]] = {
    "application/openmetrics-text": (openmetrics.generate_latest, openmetrics.CONTENT_TYPE_LATEST),
    "text/plain": (generate_latest, CONTENT_TYPE_PLAIN_0_0_4),
}


class MetricsPage:
    """Makes the page at most once in PAGE_SECONDS for each format. Used by one thread at a time."""

    def __init__(self, *collectors: Collector) -> None:
        """`collectors`: of all metrics but those of the process."""
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        for one in collectors:
            self._registry.register(one)
        self._made: dict[str, tuple[float, bytes]] = {}  # time (monotonic) and page, by format

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type. `accept`: the header of the request."""
        asked = [one.partition(";")[0].strip() for one in accept.split(",")]
        form = next((one for one in asked if one in FORMATS), "text/plain")
        encode, content_type = FORMATS[form]
        made, body = self._made.get(form, (-PAGE_SECONDS, b""))
        if time.monotonic() - made >= PAGE_SECONDS:
            body = encode(self._registry)
            self._made[form] = time.monotonic(), body
        return body, content_type
